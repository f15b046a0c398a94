"""The endless order of the training rows of a run, and its fixed validation rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from mmqk.data.dial import Dial
from mmqk.data.mixture import Epochs, IndexedCache, Mixture, Packing, kind_of, random_stream, source_of
from mmqk.data.sequences import Row, SequenceBuilder, joined, pieces

DIAL_CHUNK = 64
# The order of each kind of row uses its own random stream: `random_stream(seed, number, epoch)` with this number.
# The mixture uses number 0.
STREAMS = {"pair": 1, "image": 3, "interleaved": 5, "tokens": 6, "text": 7}
TEXT_WINDOWS, TEXT_OFFSET = 2, 4


@dataclass(frozen=True)
class Content:
    """One document of a row: tokens ``start`` to ``end`` of document number ``item`` of the source ``kind``."""

    kind: str
    item: int
    start: int
    end: int


def sequence_numbers(places_N: np.ndarray, left_out: Sequence[int]) -> np.ndarray:
    """Return the numbers of the sequences at places of the order without the sequences ``left_out``, ascending."""
    kept_before = np.asarray(left_out, dtype=np.int64) - np.arange(len(left_out))
    return places_N + np.searchsorted(kept_before, places_N, side="right")


class Windows(IndexedCache):
    """Text rows: windows over the concatenated documents. In each epoch the windows start at another offset."""

    def __init__(self, builder: SequenceBuilder, kind: str, seed: int) -> None:
        self.builder, self.kind, self.seed = builder, kind, seed
        self.length = builder.seq_len - 1
        tokens = builder.stores[kind].tokens
        if tokens < 2 * self.length:
            raise ValueError(
                f"data.{kind} has {tokens} training tokens, too few for sequences of data.seq_len {builder.seq_len}:"
                f" set data.seq_len to at most {tokens // 2 + 1}, or give more text."
            )
        self._epochs = Epochs(tokens // self.length - 1, seed, stream=TEXT_WINDOWS)

    def __len__(self) -> int:
        return self._epochs.n

    def _make(self, epoch: int) -> int:
        """Return the random offset of an epoch's windows. Without it, every epoch would cut a document at the same
        places."""
        return int(random_stream(self.seed, TEXT_OFFSET, epoch).integers(self.length))

    def row(self, nth: int, slot: str) -> Row:
        return self.builder.window(self.kind, self._start(nth))

    def _start(self, nth: int) -> int:
        epoch, item = self._epochs.item(nth)
        return self._kept(epoch) + item * self.length

    def contents(self, nth: int) -> list[Content]:
        """Return the documents of row ``nth``; the first and the last may be cut."""
        start, lengths_N = self._start(nth), self.builder.stores[self.kind].lengths_N
        ends_N = np.cumsum(lengths_N)
        first, last = np.searchsorted(ends_N, [start, start + self.length - 1], side="right").tolist()
        found = []
        for n in range(first, last + 1):
            begin = int(ends_N[n] - lengths_N[n])
            end = min(int(ends_N[n]), start + self.length) - begin
            found.append(Content(self.kind, n, max(0, start - begin), end))
        return found


class DialRows(IndexedCache):
    """Rows of the dial: an endless stream of new documents.

    Raises:
        ValueError: a document of the dial is longer than a row.
    """

    _cached = 4

    def __init__(self, dial: Dial, room: int, seed: int, pack: bool) -> None:
        if dial.length > room:
            raise ValueError(f"data.seq_len {room} is too short for the dial's documents of {dial.length} tokens.")
        self.dial, self.seed = dial, seed
        self.per_row = room // dial.length if pack else 1

    def _make(self, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count = DIAL_CHUNK * self.per_row
        ids_NT = self.dial.documents(self.seed, chunk * count, count)
        noise = self.dial.config.target_noise
        targets_NT = self.dial.targets(self.seed, chunk * count, count) if noise else ids_NT
        surprise_NT = -self.dial.log_prob(ids_NT, targets_NT)
        shape = (DIAL_CHUNK, self.per_row * self.dial.length)
        return ids_NT.reshape(shape), surprise_NT.reshape(shape), targets_NT.reshape(shape)

    def row(self, nth: int, slot: str) -> Row:
        chunk, place = divmod(nth, DIAL_CHUNK)
        ids, surprise, targets = self._kept(chunk)
        starts = tuple(range(0, self.per_row * self.dial.length, self.dial.length))
        return Row(ids[place], starts, surprise[place], targets[place] if self.dial.config.target_noise else None)

    def contents(self, nth: int) -> list[Content]:
        """Return the documents of row ``nth``."""
        return [Content("dial", nth * self.per_row + n, 0, self.dial.length) for n in range(self.per_row)]


class ItemRows:
    """Rows of items: pairs, images, or pieces of other documents. A row has one item, or several that are packed."""

    def __init__(self, builder: SequenceBuilder, kind: str, seed: int, pack: bool) -> None:
        self.builder, self.kind = builder, kind
        self.store = builder.stores[source_of(kind)]
        self._pieces_P3 = None if source_of(kind) == "pair" else pieces(self.store, builder.room)
        n = len(self.store) if self._pieces_P3 is None else len(self._pieces_P3)
        self.order: Epochs | Packing = Epochs(n, seed, STREAMS[kind])
        if pack:
            self.order = Packing(self._lengths(), builder.seq_len, seed, STREAMS[kind])

    def _lengths(self) -> np.ndarray:
        """Return, for each item, the number of positions that it fills, special tokens included."""
        if self._pieces_P3 is not None:
            return self._pieces_P3[:, 2] - self._pieces_P3[:, 1] + (self.builder.seq_len - self.builder.room)
        if self.kind == "pair":
            return np.minimum(self.store.lengths_N + 1, self.builder.seq_len)  # captions are cut
        return np.full(len(self.store), self.store.image_tokens + 2)

    def __len__(self) -> int:
        return len(self.order)

    def row(self, nth: int, slot: str) -> Row:
        return joined([self.of(item, slot) for item in self.order.items(nth)])

    def of(self, item: int, slot: str) -> Row:
        """Return the row of one item."""
        if self._pieces_P3 is not None:
            return self.builder.piece(self.kind, self._pieces_P3[item])
        return self.builder.of_pair(item, slot)

    def contents(self, nth: int) -> list[Content]:
        """Return the documents of row ``nth``."""
        items = self.order.items(nth)
        if self._pieces_P3 is not None:
            return [Content(self.kind, *self._pieces_P3[item].tolist()) for item in items]
        return [Content(self.kind, item, 0, len(self.store[item])) for item in items]


class TrainingOrder:
    """The endless training sequences of a run: row ``index`` is a function of (config, seed, index).

    Args:
        builder: builder of the training split.
        weights: ``data.mix``.
        image_first: fraction of the pairs in which the image comes first.
        seed: seed of the data order.
        pack: whether a row holds several documents if they fit.
        dial: the synthetic source, if the mixture contains it.
        streamed: kinds whose rows come from lanes (`mmqk.data.stream`); for them only `mixture` has a meaning.

    Raises:
        ValueError: a kind of the mixture has no documents, or the mixture is impossible.
    """

    def __init__(
        self,
        builder: SequenceBuilder,
        weights: Mapping[str, float],
        image_first: float,
        seed: int,
        pack: bool = False,
        dial: Dial | None = None,
        streamed: Collection[str] = (),
    ):
        self.builder = builder
        self.mixture = Mixture(dict(weights), image_first, seed)
        self._sources: dict[str, Windows | DialRows | ItemRows] = {}
        for kind in (kind for kind, weight in weights.items() if weight > 0 and kind not in streamed):
            if kind == "dial":
                if dial is not None:
                    self._sources[kind] = DialRows(dial, builder.seq_len, 2 * seed, pack)
            elif not len(builder.stores.get(source_of(kind), ())):
                raise ValueError(f"data.mix asks for {kind}, which has no samples.")
            elif kind == "text" and not pack:
                self._sources[kind] = Windows(builder, kind, seed)
            else:
                self._sources[kind] = ItemRows(builder, kind, seed, pack)

    @property
    def padding(self) -> dict[str, float]:
        """Fraction of padding in the rows of each packed kind."""
        packed = {kind: source.order for kind, source in self._sources.items() if isinstance(source, ItemRows)}
        return {kind: order.padding for kind, order in packed.items() if isinstance(order, Packing)}

    @property
    def rows_of_an_epoch(self) -> dict[str, int]:
        """Number of sequences in one epoch of each kind, without the dial, which is endless."""
        return {kind: len(source) for kind, source in self._sources.items() if not isinstance(source, DialRows)}

    def is_fresh(self, index: int) -> bool:
        """Return whether row ``index`` belongs to the first epoch of its kind, in which all documents are new."""
        slot, nth = self.mixture.draw(index)
        return nth < self.rows_of_an_epoch.get(kind_of(slot), nth + 1)

    def contents(self, index: int) -> list[Content]:
        """Return the documents of row ``index`` in order; empty for text windows and the dial."""
        slot, nth = self.mixture.draw(index)
        source = self._sources.get(kind_of(slot))
        return source.contents(nth) if isinstance(source, ItemRows) else []

    def samples(self, index: int) -> list[Content]:
        """Return `contents`, also of text windows and the dial."""
        slot, nth = self.mixture.draw(index)
        source = self._sources.get(kind_of(slot))
        return [] if source is None else source.contents(nth)

    def row(self, index: int) -> Row:
        """Return sequence ``index`` of the order, of at most ``seq_len`` tokens."""
        slot, nth = self.mixture.draw(index)
        return self._sources[kind_of(slot)].row(nth, slot)


# Order of the kinds of validation rows; kinds without held-out samples are left out. With pairs and text, three of
# four rows are pairs, and pairs alternate between image first and caption first. So even the first few rows have both
# modalities and both orders.
VALIDATION_SEED = 1
VALIDATION_CYCLE = ("pair", "pair", "pair", "text", "interleaved", "tokens")
PAIR_FORMS = ("image_first", "caption_first")


def validation_rows(
    builder: SequenceBuilder, n: int, dial: Dial | None = None, pair_forms: Sequence[str] = PAIR_FORMS
) -> list[Row]:
    """Return the fixed validation sequences, which are equal for every arm and seed and never packed.

    Pairs take the slots ``pair_forms`` in turn; a run of images alone validates the slot ``image``.

    If one kind has too few held-out rows for its share, fewer than ``n`` rows are returned, so that the shares of the
    kinds do not change.

    Raises:
        ValueError: the held-out text is too short for a row.
    """
    if dial is not None:
        # Training runs use even seeds for the dial (2 * seed), so no run trains on validation documents.
        rows_of = DialRows(dial, builder.seq_len, VALIDATION_SEED, pack=False)
        return [rows_of.row(i, "dial") for i in range(n)]
    held_out = [kind for kind in VALIDATION_CYCLE if len(builder.stores.get(kind, ()))]
    items = {kind: ItemRows(builder, kind, VALIDATION_SEED, pack=False) for kind in held_out if kind != "text"}
    available = {kind: len(rows) for kind, rows in items.items()}
    if "text" in held_out:
        tokens = builder.stores["text"].tokens
        available["text"] = tokens // builder.room
        if not available["text"]:
            raise ValueError(
                f"data.text holds out {tokens} tokens, too few for a sequence of data.seq_len {builder.seq_len}: set"
                f" data.seq_len to at most {tokens + 1}, or hold out more."
            )
    counts, kinds = dict.fromkeys(held_out, 0), []
    for kind in islice(cycle(held_out), n):
        if counts[kind] == available[kind]:
            break
        kinds.append((kind, counts[kind]))
        counts[kind] += 1

    def row(kind: str, k: int) -> Row:
        # The rows are spread evenly, because the split may be sorted by source.
        item = k * available[kind] // counts[kind]
        if kind == "text":
            return builder.window("text", item * builder.room)
        return items[kind].of(item, pair_forms[k % len(pair_forms)])

    return [row(kind, k) for kind, k in kinds]
