"""Describe the tokens of data by modality: counts, unigram entropy, repeated passages and duplicates.

All statistics are of *targets*: all tokens of a document except the first, which no model predicts. The module needs
Numpy only; `data.build.predictability` has estimates of the entropy given context.

Shapes: N tokens of all documents, concatenated; D documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

REPEAT_LENGTH = 8
"""Length of a repeated passage in tokens."""


@dataclass(frozen=True)
class ModalityStatistics:
    """Statistics of the tokens of one modality.

    Attributes:
        tokens: number of training tokens of this modality.
        held_out_tokens: number of held-out tokens of this modality.
        documents: number of training documents with at least one token of this modality.
        share: share of this modality in all training tokens, 0 to 1.
        block: number of ids of this modality in the vocabulary.
        used: number of these ids that occur in the training documents.
        unigram: entropy of token frequencies within the modality in nats per token, with the Miller-Madow correction
            for small samples, (used - 1) / (2 tokens); too low if there are few tokens per used id.
        repeated: share of the tokens that are in a passage of 8 tokens which occurred earlier in training, 0 to 1.
        repeated_held_out: share of the held-out tokens that are in a passage of 8 tokens which occurred in training.
        duplicates: share of the documents whose tokens of this modality equal those of an earlier document.
    """

    tokens: int
    held_out_tokens: int
    documents: int
    share: float
    block: int
    used: int
    unigram: float
    repeated: float
    repeated_held_out: float | None
    duplicates: float


class Stream(NamedTuple):
    """Training documents and then held-out documents, concatenated."""

    ids_N: np.ndarray
    document_N: np.ndarray
    place_N: np.ndarray  # position in the document, from 0
    modality_N: np.ndarray
    trained: int  # number of tokens of the training documents

    def split(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which tokens are training targets of modality ``number``, and which are held-out targets."""
        chosen_N = (self.place_N > 0) & (self.modality_N == number)
        train_N = np.arange(len(chosen_N)) < self.trained
        return chosen_N & train_N, chosen_N & ~train_N


def describe(
    train_rows: Iterable[np.ndarray], val_rows: Iterable[np.ndarray], vocab_sizes: Mapping[str, int]
) -> dict[str, ModalityStatistics]:
    """Return the statistics of token sequences, by the name of each modality in the training documents.

    Args:
        train_rows: documents as joint ids, 1-D integers, in the order of reading.
        val_rows: held-out documents; may be empty.
        vocab_sizes: name and number of ids of each modality, in the order of the vocabulary.

    Raises:
        ValueError: an id is outside the vocabulary.
    """
    stream = concatenated(list(train_rows), list(val_rows), list(vocab_sizes.values()))
    repeated_N = _repeated(stream)
    total = int((stream.place_N[: stream.trained] > 0).sum())
    statistics, low = {}, 0
    for number, (name, block) in enumerate(vocab_sizes.items()):
        train_N, val_N = stream.split(number)
        ids, tokens = stream.ids_N[train_N] - low, int(train_N.sum())
        low += block
        if not tokens:
            continue
        counts = np.unique(ids, return_counts=True)[1]
        p = counts / tokens
        starts = np.flatnonzero(np.diff(stream.document_N[train_N], prepend=-1))
        parts = [part.tobytes() for part in np.split(stream.ids_N[train_N], starts[1:])]
        statistics[name] = ModalityStatistics(
            tokens=tokens,
            held_out_tokens=int(val_N.sum()),
            documents=len(parts),
            share=tokens / total,
            block=block,
            used=len(counts),
            unigram=float(-(p * np.log(p)).sum() + (len(p) - 1) / (2 * tokens)),
            repeated=float(repeated_N[train_N].mean()),
            repeated_held_out=float(repeated_N[val_N].mean()) if val_N.any() else None,
            duplicates=(len(parts) - len(set(parts))) / len(parts),
        )
    return statistics


def concatenated(train: list[np.ndarray], val: list[np.ndarray], vocab_sizes: list[int]) -> Stream:
    """Join the documents."""
    lengths_D = np.array([len(row) for row in (*train, *val)], dtype=np.int64)
    ids_N = np.concatenate([np.zeros(0, dtype=np.int64), *train, *val]).astype(np.int64)
    if len(ids_N) and not 0 <= ids_N.min() <= ids_N.max() < sum(vocab_sizes):
        wrong = ids_N.min() if ids_N.min() < 0 else ids_N.max()
        raise ValueError(f"a document has the id {wrong}, but the vocabulary has ids 0 to {sum(vocab_sizes) - 1}.")
    return Stream(
        ids_N=ids_N,
        document_N=np.repeat(np.arange(len(lengths_D)), lengths_D),
        place_N=np.arange(len(ids_N)) - np.repeat(np.cumsum(lengths_D) - lengths_D, lengths_D),
        modality_N=np.searchsorted(np.cumsum(vocab_sizes)[:-1], ids_N, side="right"),
        trained=int(lengths_D[: len(train)].sum()),
    )


def numbered(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Number the pairs (first, second) from 0 without gaps; equal pairs get equal numbers."""
    codes = first * (int(second.max(initial=0)) + 1) + second
    return np.unique(codes, return_inverse=True)[1].reshape(-1)


def _repeated(stream: Stream) -> np.ndarray:
    """Return whether each token is in a passage that occurred earlier (for a held-out token: in training)."""
    size, length = len(stream.ids_N), REPEAT_LENGTH
    covered_N = np.zeros(size + 1, dtype=np.int64)
    if size < length:
        return covered_N[:size] > 0
    passage, reach = stream.ids_N, 1
    while reach < length:
        passage = numbered(passage[: len(passage) - reach], passage[reach:])
        reach *= 2
    last = stream.document_N[length - 1 :]
    starts = np.flatnonzero(stream.document_N[: len(last)] == last)
    passage = passage[starts]
    earliest = np.full(passage.max(initial=0) + 1, size)
    earliest[passage[::-1]] = starts[::-1]  # for equal indices the last assignment wins: the earliest start
    seen = earliest[passage] < np.minimum(starts, stream.trained)
    np.add.at(covered_N, starts[seen], 1)
    np.add.at(covered_N, starts[seen] + length, -1)
    return np.cumsum(covered_N)[:size] > 0
