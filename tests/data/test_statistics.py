"""Check the estimates of how predictable tokens are, against sources of known entropy and against plain counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from data.build.predictability import predictability
from mmqk.data import sequences as statistics
from mmqk.data.sequences import Row
from mmqk.data.tokens.folder import Layout


def entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def chain(transitions: np.ndarray, documents: int, length: int, lag: int, seed: int) -> np.ndarray:
    """Return documents of a Markov chain in which each token depends on the token ``lag`` positions before it."""
    random, (size, _) = np.random.default_rng(seed), transitions.shape
    ids_DT = random.integers(size, size=(documents, length))
    cumulative = transitions.cumsum(1)
    for t in range(lag, length):
        above = random.random(documents)[:, None] > cumulative[ids_DT[:, t - lag]]
        ids_DT[:, t] = above.sum(1).clip(0, size - 1)
    return ids_DT


def conditional_entropy(transitions: np.ndarray) -> float:
    """Return the entropy rate of the stationary chain in nats per token, from its matrix."""
    stationary = np.linalg.matrix_power(transitions, 200)[0]
    return float(stationary @ [entropy(row) for row in transitions])


def describe(train, val, vocab_sizes, **kwargs):
    """Return the statistics and the estimates of each modality as one."""
    plain = statistics.describe(map(Row, train), Layout(vocab_sizes))
    estimates = predictability(train, val, vocab_sizes, **kwargs)
    assert plain.keys() == estimates.keys()
    return {name: SimpleNamespace(**vars(plain[name]), **vars(estimates[name])) for name in plain}


def one(train, val=(), size: int = 64, **kwargs):
    return describe(list(train), list(val), {"text": size}, **kwargs)["text"]


@pytest.fixture(scope="module")
def transitions() -> np.ndarray:
    return np.random.default_rng(1).dirichlet(np.full(64, 0.1), size=64)


def test_a_chain_is_found_to_be_as_predictable_as_it_is(transitions):
    ids_DT = chain(transitions, 1200, 128, lag=1, seed=0)
    found, exact = one(ids_DT[:1000], ids_DT[1000:]), conditional_entropy(transitions)
    assert exact - 3 * found.model_error < found.model < 1.03 * exact
    assert found.model_context == (1,)
    assert exact < found.compressed < 0.95 * found.unigram
    assert found.model < 0.7 * found.unigram
    sizes, nats = zip(*sorted(found.compressed_by_tokens.items()), strict=True)
    assert sizes == (1270, 12700, 127000) and sorted(nats, reverse=True) == list(nats)
    assert nats[-1] == found.compressed
    # In random order, the tokens have only their frequencies in common with the chain.
    mixed_DT = np.random.default_rng(0).permuted(ids_DT, axis=1)
    control = one(mixed_DT[:1000], mixed_DT[1000:])
    assert control.unigram == pytest.approx(found.unigram, abs=0.01)
    assert control.model > 0.97 * control.unigram and control.compressed > control.unigram


def brute_force(train, val, size: int, edge: int, context: int) -> list[float]:
    """Return -log p of the held-out tokens by interpolated absolute discounting, computed with dictionaries.

    Ids of at least ``edge`` belong to a second modality.
    """
    tables = []

    def key(row, t: int, length: int) -> tuple:
        return (row[t - 1] >= edge, *row[t - length : t])

    for length in range(context + 1):
        counts: dict[tuple, Counter] = defaultdict(Counter)
        for row in train:
            for t in range(max(1, length), len(row)):
                counts[key(row, t, length)][row[t]] += 1
        sizes = Counter(c for table in counts.values() for c in table.values())
        y = sizes[1] / max(1, sizes[1] + 2 * sizes[2])
        taken = {}
        for r in (1, 2, 3):
            d = r - (r + 1) * y * sizes[r + 1] / sizes[r] if sizes[r] else y
            taken[r] = min(max(d, 0.05), r)
        tables.append((counts, taken))

    def p(x: int, row: list[int], t: int, length: int) -> float:
        if length < 0:
            return 1 / size
        shorter = p(x, row, t, length - 1)
        counts, taken = tables[length]
        table = counts.get(key(row, t, length)) if t >= length else None
        if not table:
            return shorter
        mass = sum(taken[min(c, 3)] for c in table.values())
        kept = table[x] - taken[min(table[x], 3)] if table[x] else 0
        return (kept + mass * shorter) / sum(table.values())

    for t in (1, 2, 5):
        assert sum(p(x, val[0], t, context) for x in range(size)) == pytest.approx(1)
    return [-np.log(p(row[t], row, t, context)) for row in val for t in range(1, len(row))]


def test_the_ngram_model_is_the_one_of_the_textbook(transitions):
    ids_DT = chain(transitions[:12, :12] / transitions[:12, :12].sum(1, keepdims=True), 60, 20, 1, seed=3)
    train = [row[: 2 + n % 19].tolist() for n, row in enumerate(ids_DT[:50])]  # documents of all lengths
    val = [*ids_DT[50:].tolist(), [0, 13, 13]]  # 13 is not in training
    rows = [[np.array(row) for row in part] for part in (train, val)]

    def means(edge: int) -> dict[str, float]:
        found = describe(*rows, {"low": edge, "high": 16 - edge})
        held_out = np.concatenate([row[1:] for row in rows[1]])
        tokens = [(held_out < edge).sum(), (held_out >= edge).sum()]
        return {
            c: np.average([s.model_by_context[c] for s in found.values()], weights=tokens)
            for c in found["low"].model_by_context
        }

    by_context = [np.mean(brute_force(train, val, 16, 5, c)) for c in range(5)]
    found = means(5)
    assert list(found) == ["none", "1", "1,2", "1,2,3", "1,2,3,4"]
    assert list(found.values()) == pytest.approx(by_context)
    assert len({round(c, 3) for c in by_context}) == 5
    other = [np.mean(brute_force(train, val, 16, 8, c)) for c in range(5)]
    assert list(found.values()) != pytest.approx(other, abs=1e-4)
    assert list(means(8).values()) == pytest.approx(other)
