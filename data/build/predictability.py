"""Estimate how predictable the tokens of a run's data are: ``python -m data.build.predictability --config demo``.

The floors of the dial are known; the floors of real data are not. These estimates show how far the loss of a modality
can fall below the entropy of its token frequencies. All estimates are of *targets*: all tokens of a document except
the first, which no model predicts.

Shapes: N tokens of all documents, concatenated; D documents.
"""

from __future__ import annotations

import lzma
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmqk.data.sequences import Row
from mmqk.store import run_main

CONTEXT = (1, 2, 3, 4)
"""Distances from a token back to its context tokens in the n-gram model, nearest first."""
SMALLEST_SAMPLE = 100
_LARGEST_DICTIONARY = 2**26
# Every count above 0 gets at least this discount, so that tokens that never occurred get a probability.
_SMALLEST_DISCOUNT = 0.05
SEQUENCES = 512


@dataclass(frozen=True)
class Predictability:
    """Estimates for the tokens of one modality, in nats per token; lower is more predictable.

    Attributes:
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
    """

    compressed: float
    compressed_by_tokens: dict[int, float]
    model: float | None
    model_error: float | None
    model_context: tuple[int, ...]
    model_by_context: dict[str, float]


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


def predictability(
    train_rows: Iterable[np.ndarray],
    val_rows: Iterable[np.ndarray],
    vocab_sizes: Mapping[str, int],
    contexts: Sequence[Sequence[int]] = (CONTEXT,),
) -> dict[str, Predictability]:
    """Return the estimates by modality; takes about a second for a million tokens.

    Args:
        train_rows: documents as joint ids, 1-D integers, in the order of reading.
        val_rows: held-out documents for the model-based estimate; may be empty.
        vocab_sizes: name and number of ids of each modality, in the order of the vocabulary.
        contexts: contexts of the model-based estimate, each a list of distances back to the context tokens, the most
            informative first. ``(1, 8)`` is the previous token, then the token above in a grid with 8 columns. The
            estimate of a modality uses the best of all prefixes of the contexts. Each distance is at least 1.
    """
    stream = concatenated(list(train_rows), list(val_rows), list(vocab_sizes.values()))
    held_out = bool((stream.place_N[stream.trained :] > 0).any())
    nats_by_context = _ngram_nats(stream, sum(vocab_sizes.values()), contexts) if held_out else {}
    estimates, low = {}, 0
    for number, (name, block) in enumerate(vocab_sizes.items()):
        train_N, val_N = stream.split(number)
        ids, tokens, has_val = stream.ids_N[train_N] - low, int(train_N.sum()), bool(val_N.any())
        low += block
        if not tokens:
            continue
        by_context = {c: float(nats_N[val_N].mean()) for c, nats_N in nats_by_context.items() if has_val}
        best = min(by_context, key=lambda c: by_context[c], default=())
        sizes = (s for s in (tokens // 100, tokens // 10) if s >= SMALLEST_SAMPLE)
        by_tokens = {size: _compressed(ids[:size], block) for size in (*sizes, tokens)}
        estimates[name] = Predictability(
            compressed=by_tokens[tokens],
            compressed_by_tokens=by_tokens,
            model=by_context.get(best),
            model_error=_standard_error(nats_by_context[best][val_N], stream.document_N[val_N]) if has_val else None,
            model_context=best,
            model_by_context={",".join(map(str, c)) or "none": nats for c, nats in by_context.items()},
        )
    return estimates


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


def documents(rows: Iterable[Row]) -> Iterator[np.ndarray]:
    """Yield the ids of every document in these rows."""
    for row in rows:
        yield from np.split(row.ids, row.starts[1:])


def main(argv: list[str] | None = None) -> int:
    """Print the estimates for the first training sequences of a run; takes the flags of mmqk.train."""
    from mmqk.config import resolve
    from mmqk.data.datamodule import TokenDataModule
    from mmqk.store import with_configs

    run = resolve(with_configs(sys.argv[1:] if argv is None else argv))
    data = TokenDataModule(run.data, run.seed)
    data.setup()
    rows = [data.order.row(i) for i in range(SEQUENCES) if data.order.is_fresh(i)]
    pairs = data.builder.stores.get("pair", ())
    side = round(max(0, pairs.image_tokens - 2) ** 0.5) if len(pairs) else 0
    contexts = [CONTEXT, (1, side)] if side > 1 else [CONTEXT]
    found = predictability(documents(rows), documents(data.val_rows), run.model.vocab_sizes, contexts)
    print("modality  compressed  n-gram model (nats per token)")
    for name, e in found.items():
        model = "no held-out data" if e.model is None else f"{e.model:.3f} ± {e.model_error:.3f}"
        print(f"{name:8}  {e.compressed:10.3f}  {model}")
    return 0


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


def _ngram_nats(stream: Stream, size: int, contexts: Sequence[Sequence[int]]) -> dict[tuple[int, ...], np.ndarray]:
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
                context_N = numbered(context_N, np.roll(stream.ids_N, back))
            # The first tokens of a document keep the shorter context, because the longer one would start before the
            # document.
            inside_N = stream.place_N >= reach
            p_N = _interpolated(stream, context_N, inside_N, p_N)
            nats_N = -np.log(p_N)
            nats_N[: stream.trained] = 0
            nats[tuple(distances[:used])] = nats_N
    return nats


def _interpolated(stream: Stream, context_N: np.ndarray, inside_N: np.ndarray, shorter_N: np.ndarray) -> np.ndarray:
    """Return p of each token given its context, or ``shorter_N`` if the context starts before the document or never
    occurred."""
    both_N = numbered(context_N, stream.ids_N)
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


if __name__ == "__main__":
    run_main(main)
