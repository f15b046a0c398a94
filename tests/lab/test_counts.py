"""Compare exact tests, corrections for several claims, and tests of survival with their definitions."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from mmqk.lab.counts import Counts
from mmqk.lab.effects import sign_flip
from mmqk.lab.page.figures import survival
from mmqk.lab.study import load_study
from mmqk.lab.verdicts.judge import benjamini_hochberg, holm, judge
from mmqk.lab.verdicts.measure import kaplan_meier, log_rank
from tests.lab.fake_runs import Planted
from tests.lab.verdicts.test_claims import BASIC, study


def flipped_one_by_one(values):
    sums = [abs(np.dot(signs, values)) for signs in itertools.product((1, -1), repeat=len(values))]
    return np.mean([s >= abs(sum(values)) - 1e-12 for s in sums])


@pytest.mark.parametrize("n", [2, 3, 6, 7, 9])
def test_sign_flip_counts_every_pattern(n):
    values = np.random.default_rng(n).normal(0.6, 1, n)
    assert sign_flip(values) == pytest.approx(flipped_one_by_one(values))
    assert sign_flip([1.0] * n) == pytest.approx(2 / 2**n)


def coverage(n, m, first, second, interval):
    """Return the probability, over all outcomes, that the interval contains the true difference of shares."""
    found = 0.0
    for a, b in itertools.product(range(n + 1), range(m + 1)):
        low, high = interval(a, n, b, m)
        if low - 1e-9 <= first - second <= high + 1e-9:
            found += stats.binom.pmf(a, n, first) * stats.binom.pmf(b, m, second)
    return found


def wald(a, n, b, m):
    p, q = a / n, b / m
    half = 1.96 * math.sqrt(p * (1 - p) / n + q * (1 - q) / m)
    return p - q - half, p - q + half


def exactly(a, n, b, m):
    return Counts(a, n, b, m).interval(0.05)


def test_the_interval_of_two_shares_holds_whatever_they_are():
    shares = (0.03, 0.2, 0.5, 0.77, 0.97)
    pairs = list(itertools.product(shares, shares))
    assert min(coverage(6, 5, p, q, exactly) for p, q in pairs) >= 0.95
    assert min(coverage(6, 5, p, q, wald) for p, q in pairs) < 0.7


def test_its_p_value_is_the_worst_over_all_shares():
    counts, delta = Counts(5, 6, 1, 6), 0.2
    worst = 0.0
    for q in np.linspace(0, 1 - delta, 161):
        first, second = stats.binom(6, q + delta), stats.binom(6, q)
        seen = (
            first.pmf(a) * second.pmf(b)
            for a, b in itertools.product(range(7), range(7))
            if a / 6 - b / 6 >= counts.value - 1e-9
        )
        worst = max(worst, sum(seen))
    assert counts.p_at(delta) == pytest.approx(2 * worst, rel=2e-3)
    low, high = counts.interval(0.05)
    assert counts.p_at(low - 0.01) < 0.05 < counts.p_at(low + 0.01)
    assert counts.p_at(high - 0.01) > 0.05 or high == 1


def test_detectable_share_is_found_four_times_in_five():
    found = Counts(0, 8, 0, 8).detectable(0.1, 0.05, 0.8)

    def power(share):
        seen = [
            stats.binom.pmf(a, 8, share)
            for a in range(9)
            if Counts(a, 8, 0, 8).interval(0.05)[0] > 0.1 and Counts(a, 8, 0, 8).fisher <= 0.05
        ]
        return sum(seen)

    assert power(found) >= 0.8 > power(found - 0.02)
    assert math.isnan(Counts(0, 2, 0, 2).detectable(0.1, 0.05, 0.8))


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


RNG = np.random.default_rng(5)


def test_the_curve_is_the_product_of_the_shares_that_survive_each_failure():
    times, failed = RNG.integers(1, 12, 30).astype(float), RNG.random(30) < 0.6
    steps, shares = kaplan_meier(times, failed)
    survival = 1.0
    for step, share in zip(steps, shares, strict=True):
        here = failed & (times == step)
        if step:
            survival *= 1 - here.sum() / (times >= step).sum()
        assert share == pytest.approx(survival)
    naive = [(times > step).mean() for step in steps]  # the control: censored runs counted as failed
    assert not np.allclose(naive, shares)


def test_the_log_rank_test_compares_observed_with_expected_failures():
    a, b = RNG.integers(1, 20, 25).astype(float), RNG.integers(5, 40, 25).astype(float)
    failed_a, failed_b = RNG.random(25) < 0.8, RNG.random(25) < 0.8
    observed = expected = variance = 0.0
    for step in np.unique(np.concatenate([a[failed_a], b[failed_b]])):
        n, m = (a >= step).sum(), (b >= step).sum()
        d = (failed_a & (a == step)).sum() + (failed_b & (b == step)).sum()
        observed += (failed_a & (a == step)).sum()
        expected += d * n / (n + m)
        if n + m > 1:
            variance += d * n * m * (n + m - d) / ((n + m) ** 2 * (n + m - 1))
    p = 2 * stats.norm.sf(abs(observed - expected) / np.sqrt(variance))
    assert log_rank(a, failed_a, b, failed_b) == pytest.approx(p, rel=1e-9)
    assert log_rank(b, failed_b, b, failed_b) == pytest.approx(1)  # the control: equal arms
    assert np.isnan(log_rank([5.0], [False], [5.0], [False]))


CLAIM = BASIC | {"metric": "time_of_failure", "direction": "less", "min_effect": 0.1}


def test_a_claim_about_a_time_of_failure_has_the_test_and_the_curves(tmp_path):
    arms = {"a": lambda seed: Planted(10, diverges=100 + seed, validated=False), "b": Planted(10)}
    made = study(tmp_path, arms, [CLAIM])
    (verdict,) = judge(made)
    p = log_rank([100 + s for s in range(6)], [True] * 6, [200] * 6, [False] * 6)
    assert any(f"Log-rank test of equal survival: p = {p:.2g}." in note
               for note in verdict.notes)  # fmt: skip
    figure = survival(load_study(made.folder))
    lines = {line.arm: line for line in figure.rows[0][0].lines}
    assert lines["a"].y[-1] == 0 and lines["b"].y[-1] == 1
    assert lines["a"].x.max() == 105 and lines["b"].x.max() == 200
    # The interactive chart draws one value per step, so each drop takes one step.
    assert lines["a"].x.tolist() == [0, 99, 100, 101, 102, 103, 104, 105]
    assert lines["a"].y.tolist() == pytest.approx([1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])


def test_the_interval_of_a_time_uses_only_the_two_arms(tmp_path):
    """An arm without failures has no spread, so it must not narrow or widen the interval of other arms."""

    def late(seed):
        return Planted(10, diverges=100 + 10 * seed, validated=False)

    arms = {"a": late, "b": Planted(10)}
    effects = [
        judge(study(tmp_path / name, arms | more, [CLAIM]))[0].effect
        for name, more in (("two", {}), ("calm", {"c": Planted(10)}), ("failing", {"c": late}))
    ]
    assert {effect.of for effect in effects} == {"two arms"} and effects[0] == effects[1] == effects[2]
    times = np.array([0.5 + 0.05 * seed for seed in range(6)])
    assert effects[0].interval(0.05) == pytest.approx(stats.ttest_1samp(times - 1, 0).confidence_interval())
