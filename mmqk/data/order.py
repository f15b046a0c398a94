"""Which row stands where: the endless training order of a run, and the fixed validation rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mmqk.data.dial import Dial
from mmqk.data.mix import Epochs, Mixture, kind_of, random_stream
from mmqk.data.packing import Packing
from mmqk.data.sequences import Row, SequenceBuilder, joined, pieces

# Streams of random numbers of a seed, by what they order; 0 is the mixture's.
DIAL_CHUNK = 64
PAIRS, TEXT, IMAGES, TEXT_OFFSET, INTERLEAVED, TOKENS, TEXT_DOCUMENTS = range(1, 8)


@dataclass(frozen=True)
class Content:
    """One document of a row: tokens ``start`` to ``end`` of document ``item`` of a source of kind ``kind``."""

    kind: str
    item: int
    start: int
    end: int


class Windows:
    """Text rows: every part of the text, end to end, in windows that begin elsewhere in each epoch."""

    def __init__(self, builder: SequenceBuilder, kind: str, seed: int) -> None:
        self.builder, self.kind, self.seed = builder, kind, seed
        self.length = builder.seq_len - 1
        counts = [max(0, len(part) // self.length - 1) for part in builder.stores[kind].parts]
        self._first = np.cumsum([0, *counts])
        self._epochs = Epochs(int(self._first[-1]), seed, stream=TEXT)

    def __len__(self) -> int:
        return self._epochs.n

    def row(self, nth: int) -> Row:
        epoch, item = self._epochs.item(nth)
        # So that a document is not always cut in the same place.
        offset = int(random_stream(self.seed, TEXT_OFFSET, epoch).integers(self.length))
        part = int(np.searchsorted(self._first, item, side="right")) - 1
        return self.builder.window(self.kind, part, offset + (item - int(self._first[part])) * self.length)


class Single:
    """One item a row, in shuffled epochs."""

    def __init__(self, n: int, seed: int, stream: int) -> None:
        self._epochs = Epochs(n, seed, stream)

    def __len__(self) -> int:
        return self._epochs.n

    def items(self, nth: int) -> list[int]:
        return [self._epochs.item(nth)[1]]


class Packed:
    """As many items a row as fit."""

    def __init__(self, lengths_N: np.ndarray, room: int, seed: int, stream: int) -> None:
        self.packing = Packing(lengths_N, room, seed, stream)

    def __len__(self) -> int:
        return len(self.packing)

    def items(self, nth: int) -> list[int]:
        return self.packing.row(nth).tolist()


class DialRows:
    """Rows of the dial: fresh documents without end.

    Raises:
        ValueError: a document of the dial is longer than a row.
    """

    def __init__(self, dial: Dial, room: int, seed: int, pack: bool) -> None:
        if dial.length > room:
            raise ValueError(
                f"data.seq_len {room} is too short for the dial's documents of {dial.length} tokens."
            )
        self.dial, self.seed = dial, seed
        self.per_row = room // dial.length if pack else 1
        self._chunk = lru_cache(maxsize=4)(self._make_chunk)

    def _make_chunk(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        count = DIAL_CHUNK * self.per_row
        ids_NT = self.dial.documents(self.seed, chunk * count, count)
        surprise_NT = -self.dial.log_prob(ids_NT)
        shape = (DIAL_CHUNK, self.per_row * self.dial.length)
        return ids_NT.reshape(shape), surprise_NT.reshape(shape)

    def row(self, nth: int) -> Row:
        chunk, place = divmod(nth, DIAL_CHUNK)
        ids, surprise = self._chunk(chunk)
        length = self.dial.length
        return Row(ids[place], tuple(range(0, self.per_row * length, length)), surprise[place])


class TrainingOrder:
    """The endless training sequences of a run: row ``index`` is a function of (config, seed, index).

    Args:
        builder: of the training split.
        weights: ``data.mix``.
        image_first: share of the pairs in which the image comes first.
        seed: of the run's data.
        pack: several documents a row, where they fit.
        dial: the synthetic source, where the mixture asks for it.

    Raises:
        ValueError: a kind that is asked for has no documents, or an impossible mixture.
    """

    def __init__(
        self,
        builder: SequenceBuilder,
        weights: Mapping[str, float],
        image_first: float,
        seed: int,
        pack: bool = False,
        dial: Dial | None = None,
    ):
        self.builder = builder
        self.mixture = Mixture(dict(weights), image_first, seed)
        self.seed = seed
        bos = 0 if builder.layout.bos is None else 1
        room, stores = builder.seq_len, builder.stores
        self._orders: dict[str, Single | Packed] = {}
        self._pieces: dict[str, np.ndarray] = {}
        self._windows: Windows | None = None
        self._dial = None if dial is None else DialRows(dial, room, 2 * seed, pack)
        for kind in (kind for kind, weight in weights.items() if weight > 0):
            source = "pair" if kind == "image" else kind
            if kind == "dial":
                continue
            if not len(stores.get(source, ())):
                raise ValueError(f"data.mix asks for {kind}, of which there are no samples.")
            if kind == "text" and not pack:
                self._windows = Windows(builder, kind, seed)
                continue
            if source == "pair":
                stream = PAIRS if kind == "pair" else IMAGES
                if not pack:
                    self._orders[kind] = Single(len(stores[source]), seed, stream)
                    continue
                lengths_N = builder.pair_lengths()
                if kind == "image":
                    lengths_N = np.full(len(lengths_N), stores[source].image_tokens + 2)
            else:
                self._pieces[kind] = pieces(stores[kind], room - bos)
                lengths_N = self._pieces[kind][:, 2] - self._pieces[kind][:, 1] + bos
                stream = {"interleaved": INTERLEAVED, "tokens": TOKENS, "text": TEXT_DOCUMENTS}[kind]
            self._orders[kind] = (
                Packed(lengths_N, room, seed, stream) if pack else Single(len(lengths_N), seed, stream)
            )

    @property
    def padding(self) -> dict[str, float]:
        """Share of padding in the rows of each kind that is packed."""
        return {k: o.packing.padding for k, o in self._orders.items() if isinstance(o, Packed)}

    @property
    def rows_of_an_epoch(self) -> dict[str, int]:
        """Sequences in one pass over each kind; the dial, which has no end, is left out."""
        orders = {**self._orders, **({} if self._windows is None else {"text": self._windows})}
        return {kind: len(order) for kind, order in orders.items()}

    def contents(self, index: int) -> list[Content]:
        """Which documents stand in row ``index``, in order; none for a window of the text and for the dial."""
        slot, nth = self.mixture.draw(index)
        kind = kind_of(slot)
        if kind not in self._orders:
            return []
        items = self._orders[kind].items(nth)
        if kind in self._pieces:
            return [Content(kind, *self._pieces[kind][item].tolist()) for item in items]
        return [Content(kind, item, 0, len(self.builder.stores["pair"][item])) for item in items]

    def row(self, index: int) -> Row:
        """The sequence at place ``index``, at most ``seq_len`` long."""
        slot, nth = self.mixture.draw(index)
        if slot == "text" and self._windows is not None:
            return self._windows.row(nth)
        if slot == "dial" and self._dial is not None:
            return self._dial.row(nth)
        kind = kind_of(slot)
        return joined([self._item(slot, kind, item) for item in self._orders[kind].items(nth)])

    def _item(self, slot: str, kind: str, item: int) -> Row:
        if kind == "pair":
            return self.builder.pair(item, image_first=slot == "image_first")
        if kind == "image":
            return self.builder.image(item)
        return self.builder.piece(kind, self._pieces[kind][item])


# Of every four rows three are pairs, in alternating order, and one is text, so that any first few rows hold both
# modalities and both orders; kinds of which there is nothing are left out.
VALIDATION_SEED = 1
VALIDATION_CYCLE = ("pair", "pair", "pair", "text", "interleaved", "tokens")


def validation_rows(builder: SequenceBuilder, n: int, dial: Dial | None = None) -> list[Row]:
    """The fixed validation sequences: the same for every arm and seed, and never packed.

    Raises:
        ValueError: there are not as many.
    """
    if dial is not None:
        # An odd seed: those of training runs are even.
        rows_of = DialRows(dial, builder.seq_len, VALIDATION_SEED, pack=False)
        return [rows_of.row(i) for i in range(n)]
    cycle = [kind for kind in VALIDATION_CYCLE if len(builder.stores.get(kind, ()))]
    bos = 0 if builder.layout.bos is None else 1
    if not cycle:
        raise ValueError("there is nothing held out: no validation split has a document.")
    rows: list[Row] = []
    taken: dict[str, int] = {}
    cut: dict[str, np.ndarray] = {}
    for i in range(n):
        kind = cycle[i % len(cycle)]
        k = taken.setdefault(kind, 0)
        taken[kind] += 1
        store = builder.stores[kind]
        if kind == "text":
            rows.append(_validation_text(builder, k, sum(c == "text" for c in cycle) * n // len(cycle) + 1))
            continue
        if kind != "pair" and kind not in cut:
            cut[kind] = pieces(store, builder.seq_len - bos)
        there = len(store) if kind == "pair" else len(cut[kind])
        if k >= there:
            what = {"pair": "pairs", "tokens": "documents"}.get(kind, f"{kind} documents")
            raise ValueError(f"data.val_sequences {n} asks for more than the {there} held-out {what}.")
        rows.append(
            builder.pair(k, image_first=k % 2 == 0) if kind == "pair" else builder.piece(kind, cut[kind][k])
        )
    return rows


def _validation_text(builder: SequenceBuilder, k: int, of: int) -> Row:
    """Window k of ``of``, spread over the whole held-out text, which is of many sources."""
    length = builder.seq_len - 1
    counts = [len(part) // length for part in builder.stores["text"].parts]
    first = np.cumsum([0, *counts])
    item = k * int(first[-1]) // max(1, of)
    part = int(np.searchsorted(first, item, side="right")) - 1
    return builder.window("text", part, (item - int(first[part])) * length)
