"""The endless order of the training rows of a run, and its fixed validation rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mmqk.data.mixture import Epochs, IndexedCache, Mixture, kind_of, random_stream
from mmqk.data.order.packing import Packing
from mmqk.data.order.sequences import Row, SequenceBuilder, joined, pieces
from mmqk.data.synthetic.dial import Dial

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


class Windows(IndexedCache):
    """Text rows: windows over all documents, concatenated; the windows start at other places in each epoch."""

    def __init__(self, builder: SequenceBuilder, kind: str, seed: int) -> None:
        self.builder, self.kind, self.seed = builder, kind, seed
        self.length = builder.seq_len - 1
        tokens = builder.stores[kind].tokens
        if tokens < 2 * self.length:
            raise ValueError(
                f"data.{kind} has {tokens} training tokens, too few for sequences of data.seq_len {builder.seq_len}:"
                f" set data.seq_len to at most {tokens // 2 + 1}, or give more."
            )
        self._epochs = Epochs(tokens // self.length - 1, seed, stream=TEXT)
        super().__init__(2)

    def __len__(self) -> int:
        return self._epochs.n

    def _make(self, epoch: int) -> int:
        """Offset of the windows of an epoch, so that a document is not always cut at the same place."""
        return int(random_stream(self.seed, TEXT_OFFSET, epoch).integers(self.length))

    def row(self, nth: int) -> Row:
        epoch, item = self._epochs.item(nth)
        return self.builder.window(self.kind, self._kept(epoch) + item * self.length)


class Single:
    """One item per row, in shuffled epochs."""

    def __init__(self, n: int, seed: int, stream: int) -> None:
        self._epochs = Epochs(n, seed, stream)

    def __len__(self) -> int:
        return self._epochs.n

    def items(self, nth: int) -> list[int]:
        return [self._epochs.item(nth)[1]]


class Packed:
    """As many items per row as fit."""

    def __init__(self, lengths_N: np.ndarray, room: int, seed: int, stream: int) -> None:
        self.packing = Packing(lengths_N, room, seed, stream)

    def __len__(self) -> int:
        return len(self.packing)

    def items(self, nth: int) -> list[int]:
        return self.packing.row(nth).tolist()


class DialRows(IndexedCache):
    """Rows of the dial: an endless stream of new documents.

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
        super().__init__(4)

    def _make(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        count = DIAL_CHUNK * self.per_row
        ids_NT = self.dial.documents(self.seed, chunk * count, count)
        surprise_NT = -self.dial.log_prob(ids_NT)
        shape = (DIAL_CHUNK, self.per_row * self.dial.length)
        return ids_NT.reshape(shape), surprise_NT.reshape(shape)

    def row(self, nth: int) -> Row:
        chunk, place = divmod(nth, DIAL_CHUNK)
        ids, surprise = self._kept(chunk)
        length = self.dial.length
        return Row(ids[place], tuple(range(0, self.per_row * length, length)), surprise[place])


class TrainingOrder:
    """The endless training sequences of a run: row ``index`` is a function of (config, seed, index).

    Args:
        builder: of the training split.
        weights: ``data.mix``.
        image_first: fraction of the pairs in which the image comes first.
        seed: seed of the data order.
        pack: whether a row holds several documents if they fit.
        dial: the synthetic source, if the mixture contains it.

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
    ):
        self.builder = builder
        self.mixture = Mixture(dict(weights), image_first, seed)
        self.seed = seed
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
                self._pieces[kind] = pieces(stores[kind], builder.room)
                lengths_N = self._pieces[kind][:, 2] - self._pieces[kind][:, 1]
                lengths_N = lengths_N + (room - builder.room)
                stream = {"interleaved": INTERLEAVED, "tokens": TOKENS, "text": TEXT_DOCUMENTS}[kind]
            self._orders[kind] = (
                Packed(lengths_N, room, seed, stream) if pack else Single(len(lengths_N), seed, stream)
            )

    @property
    def padding(self) -> dict[str, float]:
        """Fraction of padding in the rows of each packed kind."""
        return {k: o.packing.padding for k, o in self._orders.items() if isinstance(o, Packed)}

    @property
    def rows_of_an_epoch(self) -> dict[str, int]:
        """Sequences in one epoch of each kind, without the dial, which is endless."""
        orders = {**self._orders, **({} if self._windows is None else {"text": self._windows})}
        return {kind: len(order) for kind, order in orders.items()}

    def is_fresh(self, index: int) -> bool:
        """Whether row ``index`` belongs to the first epoch of its kind, so that its documents are new."""
        slot, nth = self.mixture.draw(index)
        return nth < self.rows_of_an_epoch.get(kind_of(slot), nth + 1)

    def contents(self, index: int) -> list[Content]:
        """The documents of row ``index`` in order; empty for text windows and the dial."""
        slot, nth = self.mixture.draw(index)
        kind = kind_of(slot)
        if kind not in self._orders:
            return []
        items = self._orders[kind].items(nth)
        if kind in self._pieces:
            return [Content(kind, *self._pieces[kind][item].tolist()) for item in items]
        return [Content(kind, item, 0, len(self.builder.stores["pair"][item])) for item in items]

    def row(self, index: int) -> Row:
        """Sequence ``index`` of the order, of at most ``seq_len`` tokens."""
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
    """The fixed validation sequences: equal for every arm and seed, and never packed.

    Fewer than ``n`` if a kind has too few: the kinds keep their shares.

    Raises:
        ValueError: a kind has no held-out rows.
    """
    if dial is not None:
        # An odd seed: those of training runs are even.
        rows_of = DialRows(dial, builder.seq_len, VALIDATION_SEED, pack=False)
        return [rows_of.row(i) for i in range(n)]
    cycle = [kind for kind in VALIDATION_CYCLE if len(builder.stores.get(kind, ()))]
    if not cycle:
        raise ValueError("there is nothing held out: no validation split has a document.")
    rows: list[Row] = []
    taken = dict.fromkeys(cycle, 0)
    held_out = {kind: Spread(builder, kind).there for kind in taken}
    for i in range(n):
        taken[kind := cycle[i % len(cycle)]] += 1
        if taken[kind] > held_out[kind]:
            n, taken[kind] = i, held_out[kind]
            break
    there = {kind: Spread(builder, kind, wanted) for kind, wanted in taken.items()}
    taken = dict.fromkeys(cycle, 0)
    for i in range(n):
        kind = cycle[i % len(cycle)]
        rows.append(there[kind].row(taken[kind]))
        taken[kind] += 1
    return rows


class Spread:
    """A sample of the held-out rows of a kind, evenly spaced, because the rows may come from many sources.

    Args:
        builder: of the held-out split.
        kind: of `VALIDATION_CYCLE`.
        wanted: number of rows.

    Raises:
        ValueError: there is no row.
    """

    def __init__(self, builder: SequenceBuilder, kind: str, wanted: int = 0) -> None:
        self.builder, self.kind, self.wanted = builder, kind, wanted
        store = builder.stores[kind]
        self._pieces = None if kind in ("pair", "text") else pieces(store, builder.room)
        self.there = len(store) if self._pieces is None else len(self._pieces)
        if kind == "text":
            self.there = store.tokens // builder.room
            if not self.there:
                raise ValueError(
                    f"data.text holds out {store.tokens} tokens, too few for a sequence of data.seq_len"
                    f" {builder.seq_len}: set data.seq_len to at most {store.tokens + 1}, or hold out more."
                )

    def row(self, k: int) -> Row:
        """Row k of the sample."""
        item = k * self.there // self.wanted
        if self.kind == "pair":
            return self.builder.pair(item, image_first=k % 2 == 0)
        if self._pieces is not None:
            return self.builder.piece(self.kind, self._pieces[item])
        return self.builder.window(self.kind, item * self.builder.room)
