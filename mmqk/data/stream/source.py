"""The shards of one kind of documents as a source of a run: which are held out, and the rows of a lane."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmqk.data.sequences import Row, SequenceBuilder, joined, pieces
from mmqk.data.shards.images import load_image
from mmqk.data.shards.samples import document_of
from mmqk.data.stream.cache import ShardCache
from mmqk.data.stream.lanes import Account, Cursor, Lane
from mmqk.data.stream.names import filesystem, is_remote, split_shards
from mmqk.data.stream.shards import Sample
from mmqk.data.tokenizers.files import read_config
from mmqk.data.tokens.encode import DocumentEncoder
from mmqk.data.tokens.folder import TokenStore, layout_of
from mmqk.store import UserError

PAIRS = ("pair", "image")  # the kinds of data.mix that pairs are read for
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
        size = self._encoder.image_size if self.kind != "text" else 0
        self._encoder.add([place if isinstance(place, str) else load_image(place, size) for place in places])
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
        account, found, size = _HeldOut(self.kind), list[np.ndarray](), 0
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


class _HeldOut(Account):
    """An account that lets no shard be skipped: the validation set must be the same in all runs."""

    def skip(self, what: str, name: str, reason: str) -> None:
        if what == "shards":
            raise UserError(f"held-out {name} cannot be read ({reason}): repair it, or try again later")
        super().skip(what, name, reason)


class Rows:
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
            parts: Sequence[Any] = [] if self.kind in PAIRS else self._pieces(one)  # type: ignore[assignment]
            if slot == "image":
                row = one.image(0)
            else:
                row = one.piece(self.kind, parts[part]) if len(parts) else one.pair(0, slot == "image_first")
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
