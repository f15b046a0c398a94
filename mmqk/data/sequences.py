"""Build rows from documents, and a TokenBatch from rows. Measure the targets of rows by modality.

The row of a pair is ``<bos> <image> codes </image> caption <eos>`` or ``<bos> caption <image> codes </image> <eos>``.
An image row is ``<bos> <image> codes </image> <eos>``. A text row is ``<bos>`` and a window of the concatenated text
documents. The row of any other document is ``<bos>`` and the document or, if it is longer than a row, a piece of it.
Short rows are padded at the end; under causal attention no token attends to the padding after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmqk.data.batch import TokenBatch
from mmqk.data.tokens.folder import Layout, TokenStore

SHORTEST_CAPTION = 8


@dataclass(frozen=True)
class Row:
    """One sequence, not yet padded.

    Attributes:
        ids: token ids, int64.
        starts: first position of each document; the first is 0.
        surprise: -log probability of each token (of `target_ids` if given) under the source, nats; None if unknown.
        target_ids: id that replaces each token as a target; None if every target is the token itself.
    """

    ids: np.ndarray
    starts: tuple[int, ...] = (0,)
    surprise: np.ndarray | None = None
    target_ids: np.ndarray | None = None

    @property
    def targets(self) -> int:
        """Number of targets: all tokens but the first of each document."""
        return len(self.ids) - len(self.starts)


def joined(rows: Sequence[Row]) -> Row:
    """Join rows of unknown surprise into one; their documents stay separate documents."""
    if len(rows) == 1:
        return rows[0]
    offsets = np.cumsum([0, *(len(row.ids) for row in rows)])
    starts = tuple(int(o) + s for o, row in zip(offsets, rows, strict=False) for s in row.starts)
    return Row(np.concatenate([row.ids for row in rows]), starts)


class SequenceBuilder:
    """Builds rows of at most ``seq_len`` tokens from one split of the sources.

    A caption that does not fit into a row with its image is cut at its end: ``caption_room`` is the largest length of
    a caption, and ``captions_cut`` the fraction of captions that are cut.

    Args:
        stores: documents by kind of source (pair, text, interleaved or tokens), each a `TokenStore` or a `Stream`.
        layout: id ranges of the modalities.
        seq_len: tokens of a row.

    Raises:
        ValueError: ``seq_len`` leaves a pair's caption fewer than 8 tokens.
    """

    def __init__(self, stores: Mapping[str, Any], layout: Layout, seq_len: int):
        self.stores, self.layout, self.seq_len = stores, layout, seq_len
        self.caption_room = seq_len
        if "pair" in stores and len(stores["pair"]):
            image = stores["pair"].image_tokens
            self.caption_room = seq_len - image - 2
            if self.caption_room < SHORTEST_CAPTION:
                what = f"an image of {image - 2} codes and its caption" if image else "a caption"
                least = image + 2 + SHORTEST_CAPTION
                raise ValueError(f"data.seq_len {seq_len} is too short for {what}: at least {least} is needed.")

    @property
    def captions_cut(self) -> float | None:
        """Fraction of captions that are cut: 0 without pairs, None if unknown."""
        if not len(self.stores.get("pair", ())):
            return 0.0
        pairs = self.stores["pair"]
        if pairs.lengths_N is None:  # pairs that are read from shards during training
            return None
        return float((pairs.lengths_N - pairs.image_tokens - 1 > self.caption_room).mean())

    def pair(self, item: int, image_first: bool, caption: int | None = None) -> Row:
        """Return the row of pair ``item``; if ``caption`` is given, its caption is that of pair ``caption``."""
        image, words = self._pair(item)
        if caption is not None:
            words = self._pair(caption)[1]
        body = [image, words] if image_first else [words, image]
        return Row(np.concatenate([self._bos, *body, [self.layout.eos]]))

    def image(self, item: int) -> Row:
        """Return a row with the image of a pair, without the caption."""
        return Row(np.concatenate([self._bos, self._pair(item)[0], [self.layout.eos]]))

    def of_pair(self, item: int, slot: str) -> Row:
        """Return the row of pair ``item`` at a place of the order: image_first, caption_first or image."""
        return self.image(item) if slot == "image" else self.pair(item, slot == "image_first")

    @property
    def room(self) -> int:
        """Largest length of a document in a row, without ``<bos>``."""
        return self.seq_len - len(self._bos)

    def window(self, kind: str, start: int) -> Row:
        """Return a row with a window of the concatenated documents that starts at position ``start``."""
        return Row(np.concatenate([self._bos, self.stores[kind].stream(start, self.room)]))

    def piece(self, kind: str, piece: np.ndarray) -> Row:
        """Return a row with tokens ``start`` to ``end`` of a document; ``piece`` is (document, start, end)."""
        document, start, end = piece
        return Row(np.concatenate([self._bos, self.stores[kind].cut(document, start, end)]))

    @property
    def _bos(self) -> np.ndarray:
        return np.array([] if self.layout.bos is None else [self.layout.bos], dtype=np.int64)

    def _pair(self, item: int) -> tuple[np.ndarray, np.ndarray]:
        document = self.stores["pair"][item]
        image = self.stores["pair"].image_tokens
        return document[:image], document[image:-1][: self.caption_room]

    def batch(self, rows: Sequence[Row], step_targets: int | None = None, documents: bool = False) -> TokenBatch:
        """Pad rows to one TokenBatch.

        Args:
            rows: rows of at most seq_len tokens each.
            step_targets: number of targets of the optimizer step; by default that of this batch.
            documents: whether to number the documents of each row, so that attention stays inside a document.
        """
        B, T = len(rows), self.seq_len
        ids_BT = np.full((B, T), self.layout.pad or 0, dtype=np.int64)
        target_ids_BT = ids_BT.copy()
        document_BT = np.full((B, T), -1, dtype=np.int64)
        surprise_BT = np.zeros((B, T), dtype=np.float32)
        for b, row in enumerate(rows):
            n = len(row.ids)
            ids_BT[b, :n] = row.ids
            target_ids_BT[b, :n] = row.ids if row.target_ids is None else row.target_ids
            document_BT[b, :n] = np.repeat(np.arange(len(row.starts)), np.diff([*row.starts, n]))
            if row.surprise is not None:
                surprise_BT[b, :n] = row.surprise
        # A target is the next token of the same document.
        target_mask_BT = np.zeros((B, T), dtype=bool)
        target_mask_BT[:, :-1] = (document_BT[:, 1:] == document_BT[:, :-1]) & (document_BT[:, 1:] >= 0)
        if step_targets is None:
            step_targets = int(target_mask_BT.sum())
        return TokenBatch(
            ids_BT=torch.from_numpy(ids_BT),
            modality_BT=torch.from_numpy(self.layout.modality(ids_BT)),
            target_mask_BT=torch.from_numpy(target_mask_BT),
            valid_BT=torch.from_numpy(document_BT >= 0),
            step_targets=torch.tensor(max(1, step_targets)),  # not 0, because it is a divisor
            document_BT=torch.from_numpy(document_BT) if documents else None,
            surprise_BT=torch.from_numpy(surprise_BT) if all(row.surprise is not None for row in rows) else None,
            target_ids_BT=torch.from_numpy(target_ids_BT) if any(r.target_ids is not None for r in rows) else None,
        )


def pieces(store: TokenStore, room: int) -> np.ndarray:
    """Split documents into pieces (document, start, end) of at most ``room`` tokens, never inside an image.

    Without ``<bos>`` the first token of a piece cannot be a target, so pieces of one document overlap by one token.

    Raises:
        ValueError: an image is longer than ``room``, or a document has no target.
    """
    lengths_N = store.lengths_N
    overlap = int(store.layout.bos is None)
    if overlap and (lengths_N < 2).any():
        n = int(np.flatnonzero(lengths_N < 2)[0])
        raise ValueError(f"document {n} of data.{store.kind} has one token and no target: remove it.")
    if room < 1 + overlap:
        raise ValueError("data.seq_len is too short to predict anything: at least 2 is needed.")
    long = np.flatnonzero(lengths_N > room)
    whole = np.flatnonzero(lengths_N <= room)
    parts = [np.stack([whole, np.zeros_like(whole), lengths_N[whole]], axis=1)]
    begin, end = store.layout.begin_image, store.layout.end_image
    for n in long.tolist():
        ids = np.zeros(0) if begin is None else store[n]  # without images, do not read a long document
        opens, closes, length = np.flatnonzero(ids == begin), np.flatnonzero(ids == end), int(lengths_N[n])
        start, cuts = 0, []
        while start < length:
            stop = min(start + room, length)
            i = int(np.searchsorted(opens, stop)) - 1  # the last image that begins before the cut
            j = int(np.searchsorted(closes, opens[i])) if i >= 0 else len(closes)  # its end
            if stop < length and j < len(closes) and closes[j] >= stop:
                stop = int(opens[i])
            if stop <= start + (overlap if start else 0):
                codes = closes[j] - opens[i] - 1
                raise ValueError(
                    f"data.seq_len is too short for an image of {codes} codes: at least {codes + 3} is needed."
                )
            cuts.append((n, start, stop))
            start = stop if stop == length else stop - overlap
        parts.append(np.array(cuts))
    pieces_P3 = np.concatenate(parts)
    return pieces_P3[np.lexsort((pieces_P3[:, 1], pieces_P3[:, 0]))]


# Statistics of the targets of rows: all tokens but the first of each document, which no model predicts.


@dataclass(frozen=True)
class ModalityStatistics:
    """Statistics of the targets of one modality.

    Attributes:
        tokens: number of targets of this modality.
        block: number of ids of this modality in the vocabulary.
        used: number of these ids that occur.
        unigram: entropy of token frequencies within the modality in nats per token, with the Miller-Madow correction
            for small samples, (used - 1) / (2 tokens); too low if there are few tokens per used id.
    """

    tokens: int
    block: int
    used: int
    unigram: float


def describe(rows: Iterable[Row], layout: Layout) -> dict[str, ModalityStatistics]:
    """Return the statistics of each modality that has targets in the rows."""
    counts_V = count_ids(rows, layout)
    statistics = {}
    for name, low, high in _blocks(layout):
        counts = counts_V[low:high][counts_V[low:high] > 0]
        if tokens := int(counts.sum()):
            p = counts / tokens
            unigram = float(-(p * np.log(p)).sum() + (len(p) - 1) / (2 * tokens))
            statistics[name] = ModalityStatistics(tokens, int(high - low), len(p), unigram)
    return statistics


def count_ids(rows: Iterable[Row], layout: Layout) -> np.ndarray:
    """Return how often each id of the vocabulary is a target: (V,), int64."""
    counts_V = np.zeros(layout.size, dtype=np.int64)
    for row in rows:
        np.add.at(counts_V, np.delete(row.ids, row.starts), 1)
    return counts_V


def count_targets(rows: Iterable[Row], layout: Layout) -> dict[str, int]:
    """Return the number of targets of each modality."""
    counts_V = count_ids(rows, layout)
    return {name: int(counts_V[low:high].sum()) for name, low, high in _blocks(layout)}


def floors(rows: Sequence[Row], layout: Layout) -> dict[str, float]:
    """Return the mean -log probability of the targets under the source of the data, in nats, by modality.

    It is the lowest possible loss. The result is empty if the source is unknown.
    """
    if any(row.surprise is None for row in rows):
        return {}
    modality = layout.modality(np.concatenate([np.delete(row.ids, row.starts) for row in rows]))
    nats = np.concatenate([np.delete(row.surprise, row.starts) for row in rows if row.surprise is not None])
    names = enumerate(layout.vocab_sizes)
    return {name: float(nats[modality == m].mean()) for m, name in names if (modality == m).any()}


def unigram_loss(rows: Iterable[Row], val_rows: Sequence[Row], layout: Layout) -> dict[str, float]:
    """Return the validation loss of a predictor that knows the layout of a sequence and the frequency of each token.

    The layout determines the special tokens, so they have loss 0. The probability of any other token is its frequency
    within its modality in ``rows``, with one added to each count. The loss is in nats per token, by modality. A model
    without a lower loss has not learned to use the context.
    """
    counts_V = count_ids(rows, layout) + 1.0
    counts_V[layout.specials] = 0
    targets = np.concatenate([np.delete(row.ids, row.starts) for row in val_rows])
    losses = {}
    for name, low, high in _blocks(layout):
        inside = targets[(targets >= low) & (targets < high)] - low
        if len(inside):
            nats = np.zeros(high - low)
            counted = counts_V[low:high] > 0
            nats[counted] = -np.log(counts_V[low:high][counted] / counts_V[low:high].sum())
            losses[name] = float(nats[inside].mean())
    return losses


def _blocks(layout: Layout) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each modality, its first id, and the id after its last one."""
    return zip(layout.vocab_sizes, layout.edges[:-1], layout.edges[1:], strict=True)
