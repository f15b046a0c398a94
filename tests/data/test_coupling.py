"""Check couplings of tokens: their marginals and their mutual information."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mmqk.data.dial_coupling import UNITS, Coupling, Edge, coupling, unigram_entropy, zipf

SHAPES = [((7, 0.8), (5, 1.3)), ((6, 0.0), (9, 0.5)), ((16, 1.0), (16, 1.0))]


def made(a: tuple[int, float], b: tuple[int, float], seed: int = 0) -> tuple[Coupling, np.ndarray]:
    """Return a coupling with random token orders, and its joint probabilities, computed without `Coupling`."""
    random = np.random.default_rng(seed)
    order_a, order_b = random.permutation(a[0]), random.permutation(b[0])
    rows, columns = [int(zipf(*a)[i]) for i in order_a], [int(zipf(*b)[i]) for i in order_b]
    dense = np.zeros((a[0], b[0]))
    i = j = 0
    while i < a[0] and j < b[0]:
        step = min(rows[i], columns[j])
        dense[order_a[i], order_b[j]] += step / UNITS
        rows[i] -= step
        columns[j] -= step
        i, j = i + (rows[i] == 0), j + (columns[j] == 0)
    return Coupling(zipf(*a), zipf(*b), order_a, order_b), dense


def joint(edge: Edge, a: tuple[int, float], b: tuple[int, float]) -> np.ndarray:
    """Return the joint probability of every pair of tokens, computed from `Edge.gain`."""
    i, j = np.meshgrid(np.arange(a[0]), np.arange(b[0]), indexing="ij")
    return np.exp(edge.gain(i, j)) * np.outer(zipf(*a) / UNITS, zipf(*b) / UNITS)


def entropy(p: np.ndarray) -> float:
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


@pytest.mark.parametrize(("vocabulary", "skew"), [(2, 0.0), (128, 0.7), (1000, 1.0), (65_536, 1.2), (512, 6.0)])
def test_a_unigram_is_zipf_and_adds_up_to_the_last_bit(vocabulary, skew):
    units = zipf(vocabulary, skew)
    assert int(units.sum()) == UNITS and units.min() >= 1
    weights = [rank**-skew for rank in range(1, vocabulary + 1)]
    assert np.allclose(units / UNITS, np.array(weights) / sum(weights), rtol=1e-9, atol=1e-15 * vocabulary)
    other = [rank ** -(skew + 0.01) for rank in range(1, vocabulary + 1)]  # another exponent
    assert not np.allclose(units / UNITS, np.array(other) / sum(other), rtol=1e-4, atol=0)
    assert unigram_entropy(units) == pytest.approx(entropy(units / UNITS))


@pytest.mark.parametrize(("a", "b"), SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_law_of_a_pair_and_its_marginals_are_exact(a, b, share):
    c, north_west = made(a, b)
    edge = Edge(c, share * c.greatest)
    p_a, p_b = zipf(*a) / UNITS, zipf(*b) / UNITS
    j = joint(edge, a, b)
    assert np.allclose(j, edge.rho * north_west + (1 - edge.rho) * np.outer(p_a, p_b), rtol=1e-11, atol=1e-17)
    assert np.allclose(j.sum(1), p_a, rtol=1e-12, atol=0) and np.allclose(j.sum(0), p_b, rtol=1e-12, atol=0)
    assert entropy(p_a) + entropy(p_b) - entropy(j) == pytest.approx(share * c.greatest, abs=1e-11)
    if share:  # the control: with other token orders the joint distribution differs
        assert not np.allclose(j, joint(Edge(made(a, b, seed=1)[0], edge.information / 2), a, b), rtol=1e-3)


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_information_rises_from_0_and_is_solved_for(a, b):
    c, _ = made(a, b)
    values = [c.information(rho) for rho in np.linspace(0, 1, 101)]
    assert values[0] == pytest.approx(0, abs=1e-15) and values[-1] == c.greatest
    assert (np.diff(values) > 0).all() and (np.diff(values, 2) > -1e-12).all()
    for wanted in (1e-9, 0.01, c.greatest / 3, c.greatest * 0.999):
        assert c.information(c.solve(wanted)) == pytest.approx(wanted, abs=1e-13)
        assert c.information(c.solve(wanted * 1.01)) != pytest.approx(wanted, rel=1e-3)
    assert c.solve(0) == 0 and c.solve(c.greatest) == 1


@pytest.mark.parametrize("a", [(9, 0.0), (64, 1.0), (5000, 1.5)])
def test_no_draw_is_impossible(a):
    c = coupling(a, a, 0, 0)
    edge = Edge(c, c.greatest)
    assert edge.rho == 1
    parents = np.repeat(np.arange(a[0]), 4)
    # Draws at both ends of each parent's interval.
    uniforms = np.tile([0.0, 2.0**-53, 1 - 2.0**-52, 1 - 2.0**-53], a[0])
    assert np.isfinite(edge.gain(parents, edge.draw(parents, uniforms))).all()
    others = np.random.default_rng(0).permutation(parents)
    assert np.isneginf(edge.gain(parents, edge.draw(others, uniforms))).any()


def test_a_vocabulary_of_65536_takes_no_table_of_pairs():
    tracemalloc.start()
    c = coupling((65_536, 1.0), (65_536, 1.0), 0, 0)
    edge, random = Edge(c, 4.0), np.random.default_rng(0)
    parents = c.draw_b(random.random(10_000))
    nats = edge.gain(parents, edge.draw(parents, random.random(10_000)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * 2**20  # a float64 table of all pairs would take 32 GiB
    assert nats.mean() == pytest.approx(4.0, abs=0.2) and edge.information == pytest.approx(4.0, abs=1e-12)
    p = zipf(65_536, 1.0) / UNITS
    for parent in (0, 1234, 65_535):
        gain = edge.gain(np.full(len(p), parent), np.arange(len(p)))
        assert (p * np.exp(gain)).sum() == pytest.approx(1, abs=1e-10)
        assert (p * np.exp(gain * 1.01)).sum() != pytest.approx(1, abs=1e-3)
