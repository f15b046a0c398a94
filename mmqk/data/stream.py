"""Documents that a run reads from shards while it trains, in an order that any resume continues exactly.

Lane r is the endless sequence of documents from which row r of every batch is made. In each epoch a keyed permutation
deals the shards to the lanes, and a lane reads its shards from front to back, one window of samples after the other, in
a random order inside the window.

```
epoch ── permutation ── shards r, r + lanes, ... ── windows of WINDOW samples ── permutation ── documents
```

So a lane is the same for any number of ranks and loader workers, and its position is a few integers (`Cursor`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmqk.data.mixture import mixed, permuted, random_stream, source_of
from mmqk.data.sequences import Row, SequenceBuilder, joined, pieces
from mmqk.data.shards.files import filesystem, is_remote
from mmqk.data.shards.images import Dropped
from mmqk.data.shards.manifest import split_shards
from mmqk.data.shards.read import Sample, ShardCache, ShardError, samples_of
from mmqk.data.shards.samples import IGNORED, ReasonCounts, count_unread, document_of, printable
from mmqk.data.tokenizers.files import read_config
from mmqk.data.tokens.encode import DocumentEncoder
from mmqk.data.tokens.folder import TokenStore, layout_of
from mmqk.store import UserError

WINDOW = 32
# A process ends with an error if more than this share of the samples (or of the shards) that it tried cannot be used,
# and they are at least LEAST_UNUSABLE.
MOST_UNUSABLE, LEAST_UNUSABLE = 0.1, 10
# Epochs in a row in which a lane may find no document.
EMPTY_EPOCHS = 1000


class Cursor(NamedTuple):
    """The position of a lane: the next document.

    Attributes:
        epoch: number of the epoch.
        shard: number of the shard among those of the lane in this epoch.
        sample, byte: number and byte of the first sample of the open window in the shard.
        place: samples of the window that were used or skipped.
        part: pieces or tokens of the document that were used.
    """

    epoch: int = 0
    shard: int = 0
    sample: int = 0
    byte: int = 0
    place: int = 0
    part: int = 0


@dataclass
class Skips:
    """What could not be used.

    Attributes:
        skipped: (name, reason) of each sample or shard.
        unread: files that belong to no document.
        files: number of all files that were read.
    """

    skipped: list[tuple[str, str]] = field(default_factory=list)
    unread: ReasonCounts = field(default_factory=ReasonCounts)
    files: int = 0


class Account:
    """Counts what a process tried of one kind of documents, and what it could not use.

    Args:
        kind: pair, interleaved or text.
        held_out: whether no shard may be skipped, because the validation set must be the same in all runs.

    Attributes:
        skips: receives what could not be used.
    """

    def __init__(self, kind: str = "pair", held_out: bool = False) -> None:
        self.kind, self.held_out, self.skips = kind, held_out, Skips()
        self.tried, self.bad = Counter[str](), Counter[str]()

    def sample(self, shard: str, sample: Sample) -> None:
        """Count the files of a sample that was tried."""
        self.tried["samples"] += 1
        self.skips.files += len(sample.fields) + len(sample.unread)
        for name in sample.unread:
            self.skips.unread.add(IGNORED, f"{shard}: {name}")
        if self.kind != "text":
            count_unread(self.skips.unread, self.kind, f"{shard}: {sample.key}", sample.fields)

    def skip(self, what: str, name: str, reason: str) -> None:
        """Record that one of the ``what`` (samples or shards) cannot be used.

        Raises:
            UserError: too many cannot be used, or a held-out shard cannot.
        """
        if self.held_out and what == "shards":
            raise UserError(f"held-out {name} cannot be read ({reason}): repair it, or try again later")
        self.skips.skipped.append((name, reason))
        self.bad[what] += 1
        tried, bad = self.tried[what], self.bad[what]
        if bad >= LEAST_UNUSABLE and bad > MOST_UNUSABLE * tried:
            raise UserError(
                f"{bad} of the {tried} {what} read so far cannot be used, more than {MOST_UNUSABLE:.0%} (the last one"
                f" is {printable(name)}: {reason}): repair the shards, or tokenize them with mmqk data tokenize,"
                " which drops and counts such samples"
            )


@dataclass
class Lane:
    """An endless stream of documents.

    Args:
        shards: names of all shards.
        encode: returns the ids of a sample, or raises Dropped.
        account: counts samples and shards that cannot be used.
        number: number of the lane.
        lanes: number of lanes.
        key: seed and kind, which choose the order.
        cursor: where to begin.
        cache: copies of remote shards.
    """

    shards: Sequence[str]
    encode: Callable[[Sample], np.ndarray]
    account: Account
    number: int
    lanes: int
    key: tuple[int, ...]
    cursor: Cursor = Cursor()  # noqa: RUF009 - immutable
    cache: ShardCache | None = None

    def __post_init__(self) -> None:
        self._samples: Iterator[Sample] | None = None
        self._window: list[Sample] = []
        self._document: np.ndarray | None = None

    def document(self) -> np.ndarray:
        """Return the ids of the next document, again until `advance` is called.

        Raises:
            UserError: too many samples or shards cannot be used.
        """
        while self._document is None:
            if not self._window:
                self._open_window()
            sample = self._window[self._order[self.cursor.place]]
            if not self.cursor.part:
                self.account.sample(self._shard, sample)
            try:
                self._document = self.encode(sample)
            except Dropped as dropped:
                self.account.skip("samples", f"sample {sample.key} of shard {self._shard}", dropped.reason)
                self.advance()
        return self._document

    def advance(self, part: int | None = None) -> None:
        """Go to the next document, or to a later part of this one."""
        if part is not None:
            self.cursor = self.cursor._replace(part=part)
            return
        self._document = None
        self.cursor = self.cursor._replace(place=self.cursor.place + 1, part=0)
        if self.cursor.place == len(self._window):
            last = self._window[-1]
            self.cursor = Cursor(self.cursor.epoch, self.cursor.shard, last.number + 1, last.end)
            self._window = []

    @property
    def where(self) -> tuple[str, str]:
        """Shard and key of the document that `document` returned."""
        return self._shard, self._window[self._order[self.cursor.place]].key

    def _open_window(self) -> None:
        """Read the window at the cursor, from the next shards if this one has ended."""
        first = self.cursor.epoch
        while True:
            epoch, shard, sample, byte, *_ = self.cursor
            if (dealt := self._dealt(epoch, shard)) is None:
                self.cursor, self._samples = Cursor(epoch + 1), None
                if epoch - first > EMPTY_EPOCHS:
                    raise UserError(
                        f"row {self.number} of the batch finds no document in {len(self.shards)} shards: set"
                        " data.batch_size to less than the number of samples."
                    )
                continue
            self._shard, stride, rest = dealt
            if self._samples is None:
                self.account.tried["shards"] += 1
                self._samples = samples_of(self._shard, byte, sample, stride, rest, self.cache)
            try:
                self._window = list(islice(self._samples, WINDOW))
                if not self._window and sample == 0 and stride == 1:
                    raise ShardError("it has no sample")
                if self._window and self.cursor.place >= len(self._window):
                    raise ShardError("it has fewer samples than before the resume")
            except ShardError as error:
                self._window = []
                self.account.skip("shards", f"shard {self._shard} from sample {sample} on", str(error))
            if self._window:
                stream = random_stream(*self.key, epoch, shard, sample, self.number)
                self._order = stream.permutation(len(self._window)).tolist()
                return
            self.cursor, self._samples = Cursor(epoch, shard + 1), None

    def _dealt(self, epoch: int, shard: int) -> tuple[str, int, int] | None:
        """Return the name of a shard of this lane, and the stride and remainder of the samples that the lane reads.

        With fewer shards than lanes, several lanes share a shard: each reads the samples of one remainder. The lanes
        change places in each epoch, so that none always has more shards.
        """
        n, turn = len(self.shards), (self.number + mixed(*self.key, epoch)) % self.lanes
        if n >= self.lanes:
            place = turn + shard * self.lanes
            return None if place >= n else (self.shards[permuted(place, n, *self.key, epoch)], 1, 0)
        if shard:
            return None
        place = turn % n
        sharing = self.lanes // n + (place < self.lanes % n)
        return self.shards[permuted(place, n, *self.key, epoch)], sharing, turn // n


# The held-out shards are read in this many lanes, or one lane a shard. Their order is the same for every run.
HELD_OUT_LANES, HELD_OUT_KEY = 8, (1, 0)


class Stream:
    """The documents of one kind that a run reads from shards while it trains.

    It stands in for a `TokenStore` of the training split, but has no lengths.

    Args:
        kind: pair, interleaved or text.
        pattern: a folder with a manifest, a path or a URL, with brace ranges and globs.
        tokenizers: folder of the tokenizers.
        val_fraction: share of the shards to hold out.
        cache: copies of remote shards; None for none.

    Raises:
        UserError: the pattern names no shard, or no shard could be held out.
    """

    lengths_N = None

    def __init__(
        self, kind: str, pattern: str, tokenizers: Path, val_fraction: float | None, cache: ShardCache | None = None
    ) -> None:
        self.kind, self.tokenizers, self.cache = kind, tokenizers, cache
        self.train, self.val = split_shards(pattern, val_fraction)
        if is_remote(self.train[0]):
            filesystem(self.train[0])  # raises if its engine is missing

    def __len__(self) -> int:
        return len(self.train)

    def __getstate__(self) -> dict[str, Any]:
        # A loader worker loads its own tokenizers.
        return {k: v for k, v in self.__dict__.items() if k != "_encoder"}

    @cached_property
    def _encoder(self) -> DocumentEncoder:
        return DocumentEncoder(self.tokenizers, images=self.kind != "text")

    @cached_property
    def image_tokens(self) -> int:
        """Tokens of an image with its two boundary tokens."""
        return read_config(self.tokenizers).grid ** 2 + 2

    def encode(self, sample: Sample) -> np.ndarray:
        """Return the ids of a sample, int64. It is encoded alone, so its ids do not depend on other samples.

        Raises:
            Dropped: the sample cannot be used.
        """
        _, places = document_of(sample.fields, self.kind)
        self._encoder.add(places)
        return self._encoder.take()[0].astype(np.int64)

    def lane(self, account: Account, number: int, lanes: int, key: tuple[int, ...], cursor: Cursor) -> Lane:
        """Return a lane of the training shards."""
        return Lane(self.train, self.encode, account, number, lanes, key, cursor, self.cache)

    def held_out(self, documents: int, tokens: int) -> TokenStore:
        """Read held-out documents until there are enough, or no more.

        Raises:
            UserError: a held-out shard cannot be read, or too many samples cannot be used.
        """
        lanes = min(HELD_OUT_LANES, len(self.val))
        account, found, size = Account(self.kind, held_out=True), list[np.ndarray](), 0
        left = [Lane(self.val, self.encode, account, n, lanes, HELD_OUT_KEY, cache=self.cache) for n in range(lanes)]
        while left and (len(found) < documents or size < tokens):
            lane = left.pop(0)
            document = lane.document()
            if lane.cursor.epoch == 0:
                found.append(document)
                size += len(document)
                lane.advance()
                left.append(lane)
        layout = layout_of(self.tokenizers)
        ids = np.concatenate([np.zeros(0, dtype=layout.dtype), *found]).astype(layout.dtype)
        return TokenStore(self.kind, layout, [ids], [np.array([len(document) for document in found])])


class LaneRows:
    """The rows of lanes, for one kind of data.mix.

    Args:
        stream: the documents.
        builder: builds the rows.
        kind: pair, image, interleaved or text.
        pack: whether a row holds several documents if they fit.
    """

    def __init__(self, stream: Stream, builder: SequenceBuilder, kind: str, pack: bool) -> None:
        self.stream, self.builder, self.kind, self.pack = stream, builder, kind, pack

    def row(self, lane: Lane, slot: str) -> Row:
        """Return the next row of a lane.

        Raises:
            UserError: too many samples cannot be used, or data.seq_len is too short for a document.
        """
        if self.kind == "text" and not self.pack:
            return self._one(_tokens(lane, self.builder.room)).window("text", 0)
        rows, room = list[Row](), self.builder.seq_len
        while True:
            document = lane.document()
            one, part = self._one(document), lane.cursor.part
            parts: Sequence[Any] = [] if source_of(self.kind) == "pair" else self._pieces(one)  # type: ignore[assignment]
            row = one.piece(self.kind, parts[part]) if len(parts) else one.of_pair(0, slot)
            if rows and len(row.ids) > room:
                return joined(rows)
            rows.append(row)
            room -= len(row.ids)
            lane.advance(part + 1 if part + 1 < len(parts) else None)
            if not self.pack:
                return row

    def _one(self, document: np.ndarray) -> SequenceBuilder:
        """Return a builder of one document."""
        store = TokenStore(self.stream.kind, self.builder.layout, [document], [np.array([len(document)])])
        return SequenceBuilder({self.stream.kind: store}, self.builder.layout, self.builder.seq_len)

    def _pieces(self, one: SequenceBuilder) -> np.ndarray:
        try:
            return pieces(one.stores[self.kind], one.room)
        except ValueError as error:
            raise UserError(str(error)) from error


def _tokens(lane: Lane, n: int) -> np.ndarray:
    """Return the next n tokens of the concatenated documents of a lane."""
    taken, left = list[np.ndarray](), n
    while left:
        document, start = lane.document(), lane.cursor.part
        taken.append(document[start : start + left])
        left -= len(taken[-1])
        end = start + len(taken[-1])
        lane.advance(end if end < len(document) else None)
    return np.concatenate(taken)
