"""Statistics of the targets of rows by modality: counts, entropy of the frequencies, floor and unigram loss.

The targets of a row are all tokens but the first of each document, which no model predicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmqk.data.sequences import Row
from mmqk.data.tokens.folder import Layout


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
