"""Compare the corrections for several claims and for several looks with closed testing, their definitions and
simulated t-tests."""

import itertools

import numpy as np
import pytest
from scipy import stats

from mmqk.lab.stats.exact import benjamini_hochberg, holm, level_of_look, p_over_looks

DRAWN = [np.random.default_rng(n).uniform(0, 0.08, n) for n in (1, 2, 4, 6)]


def closed(p_values, i):
    """Return the largest Bonferroni p-value of all intersections that contain this hypothesis."""
    others = [j for j in range(len(p_values)) if j != i]
    subsets = (s for k in range(len(others) + 1) for s in itertools.combinations(others, k))
    return max(min(1, (len(s) + 1) * min(p_values[j] for j in (i, *s))) for s in subsets)


@pytest.mark.parametrize("p_values", DRAWN)
def test_holm_is_the_closed_test_of_bonferronis(p_values):
    for i, (level, adjusted) in enumerate(holm(p_values)):
        assert adjusted == pytest.approx(closed(p_values, i))
        assert (p_values[i] <= level) == (adjusted <= 0.05)


def test_holm_gives_back_what_is_spent():
    assert [level for level, _ in holm([0.001, 0.04])] == [0.025, 0.05]
    # Nothing is rejected at the first step, so the second step has the same level as the first.
    assert [level for level, _ in holm([0.03, 0.04])] == [0.025, 0.025]
    assert holm([0.04])[0] == (0.05, 0.04)


@pytest.mark.parametrize("p_values", DRAWN)
def test_benjamini_hochberg_takes_the_smallest_ratio_of_the_larger_p_values(p_values):
    found = benjamini_hochberg(p_values)
    ordered, m = np.sort(p_values), len(p_values)
    for p, (_, adjusted) in zip(p_values, found, strict=True):
        ratios = [m / rank * other for rank, other in enumerate(ordered, 1) if other >= p]
        assert adjusted == pytest.approx(min(1, *ratios))
    for p, (level, adjusted) in zip(p_values, found, strict=True):
        assert (p <= level) == (adjusted <= 0.10 and p <= 0.05)
    assert max(level for level, _ in found) <= 0.05


def errors(first, last, level, draws=20_000):
    """Return how often scipy's t-test of two equal normal arms is significant at ``level`` in at least one look."""
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(2, draws, last))
    ps = [stats.ttest_ind(a[:, :n], b[:, :n], axis=1).pvalue for n in range(first, last + 1)]
    return np.mean(np.min(ps, axis=0) <= level)


@pytest.mark.parametrize(("first", "last"), [(3, 6), (6, 10)])
def test_looks_are_paid_for(first, last):
    assert errors(first, last, level_of_look(0.05, first, last)) == pytest.approx(0.05, abs=0.004)
    assert errors(first, last, 0.05) > 0.08
    # The Bonferroni correction is too strict, because looks share seeds and are therefore correlated.
    assert level_of_look(0.05, first, last) > 0.05 / (last - first + 1)


def test_a_p_value_over_looks_is_below_five_percent_where_its_level_is():
    for p in (1e-6, 0.002, 0.01, 0.02, 0.03, 0.3):
        over = p_over_looks(p, 6, 10)
        assert p <= over <= min(1, 5 * p)
        assert (over <= 0.05) == (p <= level_of_look(0.05, 6, 10))
    assert p_over_looks(0.03, 6, 6) == 0.03 and level_of_look(0.05, 6, 6) == 0.05
