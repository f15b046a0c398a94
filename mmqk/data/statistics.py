"""Estimate how predictable the tokens of real data are, by modality: four estimates that need no training.

The floors of the dial are known; the floors of real data are not. These estimates show how far the loss of a modality
can fall below the entropy of its token frequencies. All statistics are of *targets*: all tokens of a document except
the first, which no model predicts. The module needs Numpy only.

Shapes: N tokens of all documents, concatenated; D documents.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

REPEAT_LENGTH = 8
"""Length of a repeated passage in tokens."""
CONTEXT = (1, 2, 3, 4)
"""Distances from a token back to its context tokens in the n-gram model, nearest first."""
SMALLEST_SAMPLE = 100
_LARGEST_DICTIONARY = 2**26
# Every count above 0 gets at least this discount, so that tokens that never occurred get a probability.
_SMALLEST_DISCOUNT = 0.05


@dataclass(frozen=True)
class ModalityStatistics:
    """Statistics of the tokens of one modality. Entropies are in nats per token; lower is more predictable.

    Attributes:
        tokens: number of training tokens of this modality.
        held_out_tokens: number of held-out tokens of this modality.
        documents: number of training documents with at least one token of this modality.
        share: share of this modality in all training tokens, 0 to 1.
        block: number of ids of this modality in the vocabulary.
        used: number of these ids that occur in the training documents.
        unigram: entropy of token frequencies within the modality, with the Miller-Madow correction for small samples,
            (used - 1) / (2 tokens); too low if there are few tokens per used id.
        compressed: LZMA size of the tokens of the modality, in the order of the documents. It is an upper bound on
            their entropy without the context of other modalities. It includes the cost of learning the statistics:
            on tokens without structure, it is 3 to 15 % above the entropy.
        compressed_by_tokens: ``compressed`` of the first hundredth, the first tenth and all of the tokens. The keys
            are the numbers of tokens. If the last value is far below the one before, more data would lower it
            further.
        model: held-out cross-entropy of an n-gram model of the joint vocabulary, trained on the training documents,
            with the best context for this modality. It is an upper bound on the entropy given that context. Like the
            loss of a model, it includes the choice of the next modality. None if no held-out target has this
            modality.
        model_error: standard error of ``model`` over held-out documents; None if ``model`` is None.
        model_context: the best context, as distances back to its tokens; empty if the best context has no tokens.
        model_by_context: held-out cross-entropy with each context that was tried. The key "1,2" is the context of the
            tokens at distances 1 and 2. Every context includes the modality of the previous token; the context "none"
            has only this modality.
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
    compressed: float
    compressed_by_tokens: dict[int, float]
    model: float | None
    model_error: float | None
    model_context: tuple[int, ...]
    model_by_context: dict[str, float]
    repeated: float
    repeated_held_out: float | None
    duplicates: float


class _Stream(NamedTuple):
    """Training documents and then held-out documents, concatenated."""

    ids_N: np.ndarray
    document_N: np.ndarray
    place_N: np.ndarray  # position in the document, from 0
    modality_N: np.ndarray
    trained: int  # number of tokens of the training documents

    @property
    def target_N(self) -> np.ndarray:
        return self.place_N > 0


def describe(
    train_rows: Iterable[np.ndarray],
    val_rows: Iterable[np.ndarray],
    vocab_sizes: Mapping[str, int],
    contexts: Sequence[Sequence[int]] = (CONTEXT,),
) -> dict[str, ModalityStatistics]:
    """Return the statistics of token sequences by modality; takes about a second for a million tokens.

    Args:
        train_rows: documents as joint ids, 1-D integers, in the order of reading.
        val_rows: held-out documents for the model-based estimate; may be empty.
        vocab_sizes: name and number of ids of each modality, in the order of the vocabulary.
        contexts: contexts of the model-based estimate, each a list of distances back to the context tokens, the most
            informative first. ``(1, 8)`` is the previous token, then the token above in a grid with 8 columns. The
            estimate of a modality uses the best of all prefixes of the contexts. Each distance is at least 1.

    Returns:
        The statistics by the name of each modality in the training documents.

    Raises:
        ValueError: an id is outside the vocabulary.
    """
    stream = _concatenated(list(train_rows), list(val_rows), list(vocab_sizes.values()))
    n = stream.trained
    training_N, held_out_N = stream.target_N.copy(), stream.target_N.copy()
    training_N[n:], held_out_N[:n] = False, False
    nats_by_context = _ngram_nats(stream, sum(vocab_sizes.values()), contexts) if held_out_N.any() else {}
    repeated_N = _repeated(stream)
    statistics, low = {}, 0
    for number, (name, block) in enumerate(vocab_sizes.items()):
        of_modality_N = stream.modality_N == number
        train_N, val_N = training_N & of_modality_N, held_out_N & of_modality_N
        ids, tokens, held_out = stream.ids_N[train_N] - low, int(train_N.sum()), int(val_N.sum())
        low += block
        if not tokens:
            continue
        by_context = {c: float(nats_N[val_N].mean()) for c, nats_N in nats_by_context.items() if held_out}
        best = min(by_context, key=lambda c: by_context[c], default=())
        sizes = (s for s in (tokens // 100, tokens // 10) if s >= SMALLEST_SAMPLE)
        by_tokens = {size: _compressed(ids[:size], block) for size in (*sizes, tokens)}
        documents, copies = _documents(stream, train_N)
        statistics[name] = ModalityStatistics(
            tokens=tokens,
            held_out_tokens=held_out,
            documents=documents,
            share=tokens / int(training_N.sum()),
            block=block,
            used=len(np.unique(ids)),
            unigram=_unigram(ids, block),
            compressed=by_tokens[tokens],
            compressed_by_tokens=by_tokens,
            model=by_context.get(best),
            model_error=_standard_error(nats_by_context[best][val_N], stream.document_N[val_N]) if held_out else None,
            model_context=best,
            model_by_context={",".join(map(str, c)) or "none": nats for c, nats in by_context.items()},
            repeated=float(repeated_N[train_N].mean()),
            repeated_held_out=float(repeated_N[val_N].mean()) if held_out else None,
            duplicates=copies / documents,
        )
    return statistics


def _concatenated(train: list[np.ndarray], val: list[np.ndarray], vocab_sizes: list[int]) -> _Stream:
    lengths_D = np.array([len(row) for row in (*train, *val)], dtype=np.int64)
    ids_N = np.concatenate([np.zeros(0, dtype=np.int64), *train, *val]).astype(np.int64)
    if len(ids_N) and not 0 <= ids_N.min() <= ids_N.max() < sum(vocab_sizes):
        wrong = ids_N.min() if ids_N.min() < 0 else ids_N.max()
        raise ValueError(f"a document has the id {wrong}, but the vocabulary has ids 0 to {sum(vocab_sizes) - 1}.")
    return _Stream(
        ids_N=ids_N,
        document_N=np.repeat(np.arange(len(lengths_D)), lengths_D),
        place_N=np.arange(len(ids_N)) - np.repeat(np.cumsum(lengths_D) - lengths_D, lengths_D),
        modality_N=np.searchsorted(np.cumsum(vocab_sizes)[:-1], ids_N, side="right"),
        trained=int(lengths_D[: len(train)].sum()),
    )


def _unigram(ids: np.ndarray, block: int) -> float:
    counts = np.bincount(ids, minlength=block)
    p = counts[counts > 0] / len(ids)
    return float(-(p * np.log(p)).sum() + (len(p) - 1) / (2 * len(ids)))


def _compressed(ids: np.ndarray, block: int) -> float:
    """Return the LZMA size in nats per token, without a header, whose size would matter in a small sample."""
    width = 1 if block <= 2**8 else 2 if block <= 2**16 else 4
    data = ids.astype(f">u{width}").tobytes()
    log_width = width.bit_length() - 1
    # lp and pb: one model for each byte of an id; lc 0: no further contexts, because there are too few data for them.
    contexts = {"lc": 0, "lp": log_width, "pb": log_width}
    size = min(max(len(data), 2**12), _LARGEST_DICTIONARY)
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 6, "dict_size": size, **contexts}]
    return len(lzma.compress(data, format=lzma.FORMAT_RAW, filters=filters)) * 8 * np.log(2).item() / len(ids)


def _documents(stream: _Stream, chosen_N: np.ndarray) -> tuple[int, int]:
    """Return the number of documents with a chosen token, and how many of them repeat the chosen tokens of an
    earlier document."""
    starts = np.flatnonzero(np.diff(stream.document_N[chosen_N], prepend=-1))
    parts = [part.tobytes() for part in np.split(stream.ids_N[chosen_N], starts[1:])]
    return len(parts), len(parts) - len(set(parts))


def _numbered(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Number the pairs (first, second) from 0 without gaps; equal pairs get equal numbers."""
    codes = first * (int(second.max(initial=0)) + 1) + second
    return np.unique(codes, return_inverse=True)[1].reshape(-1)


def _repeated(stream: _Stream) -> np.ndarray:
    """Return whether each token is in a passage that occurred earlier (for a held-out token: in training)."""
    size, length = len(stream.ids_N), REPEAT_LENGTH
    covered_N = np.zeros(size + 1, dtype=np.int64)
    if size < length:
        return covered_N[:size] > 0
    passage, reach = stream.ids_N, 1
    while reach < length:
        passage = _numbered(passage[: len(passage) - reach], passage[reach:])
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


def _ngram_nats(
    stream: _Stream, size: int, contexts: Sequence[Sequence[int]]
) -> dict[tuple[int, ...], np.ndarray]:
    """Return -log p of each held-out token for every prefix of the contexts (shape N; 0 for training tokens).

    The model uses interpolated absolute discounting with three discounts (Chen & Goodman 1999, section 3.4). Unlike
    their modified Kneser-Ney, it uses plain counts, because continuation counts saturate in a vocabulary of few
    codes: p(x | c) = (count(c, x) - D) / count(c) + mass(c) / count(c) * p(x | shorter c), where D is the discount of
    the count and mass(c) the sum of the discounts in context c. Below the shortest context, p is 1 / size.

    The shortest context is the modality of the previous token. Without it, -log p of every token would include the
    choice of the modality, which rarely changes.
    """
    nats: dict[tuple[int, ...], np.ndarray] = {}
    for distances in contexts:
        context_N, reach = np.roll(stream.modality_N, 1), 1
        p_N = np.full(len(stream.ids_N), 1 / size)
        for used in range(len(distances) + 1):
            if used:
                back = distances[used - 1]
                reach = max(reach, back)
                context_N = _numbered(context_N, np.roll(stream.ids_N, back))
            # The first tokens of a document keep the shorter context, because the longer one would start before the
            # document.
            inside_N = stream.place_N >= reach
            p_N = _interpolated(stream, context_N, inside_N, p_N)
            nats_N = -np.log(p_N)
            nats_N[: stream.trained] = 0
            nats[tuple(distances[:used])] = nats_N
    return nats


def _interpolated(
    stream: _Stream, context_N: np.ndarray, inside_N: np.ndarray, shorter_N: np.ndarray
) -> np.ndarray:
    """Return p of each token given its context, or ``shorter_N`` if the context starts before the document or never
    occurred."""
    both_N = _numbered(context_N, stream.ids_N)
    counted = np.flatnonzero(inside_N[: stream.trained])
    count = np.bincount(both_N[counted], minlength=both_N.max() + 1)
    total = np.bincount(context_N[counted], minlength=context_N.max() + 1)
    context_of = np.zeros(len(count), dtype=np.int64)
    context_of[both_N] = context_N
    discount = _discounts(count)[np.minimum(count, 3)]
    mass = np.bincount(context_of, weights=discount, minlength=len(total))
    total_N = total[context_N]
    p_N = (count[both_N] - discount[both_N] + mass[context_N] * shorter_N) / np.maximum(total_N, 1)
    return np.where(inside_N & (total_N > 0), p_N, shorter_N)


def _discounts(count: np.ndarray) -> np.ndarray:
    """Return the discounts of counts 0, 1, 2, and 3 or more, computed from how many counts are 1, 2, 3 and 4."""
    n = np.bincount(np.minimum(count, 5), minlength=6)
    y = n[1] / max(1, n[1] + 2 * n[2])
    by_count = [r - (r + 1) * y * n[r + 1] / n[r] if n[r] else y for r in (1, 2, 3)]
    return np.array([0.0, *(min(max(d, _SMALLEST_DISCOUNT), r) for r, d in enumerate(by_count, start=1))])


def _standard_error(nats_N: np.ndarray, document_N: np.ndarray) -> float:
    """Return the standard error of the mean over tokens. Documents are independent; the tokens of a document are
    not."""
    sums_D = np.bincount(np.unique(document_N, return_inverse=True)[1], weights=nats_N - nats_N.mean())
    n = len(sums_D)
    return float(np.sqrt(np.square(sums_D).sum() * n / max(1, n - 1)) / len(nats_N))
