"""Compare the statistics with scipy's, and check their stated coverage."""

import math

import numpy as np
import pytest
from scipy import stats

from mmqk.lab.stats.effects import paired_effect, pooled_spread, quantile_t

A, B, C = [4.1, 4.3, 3.9], [2.0, 2.2, 2.1], [3.0, 3.4, 3.1]


def by_seed(values):
    return dict(enumerate(values))


def test_two_arms_pooled_are_the_two_sample_t_interval():
    effect = paired_effect(by_seed(A), by_seed(B), pooled_spread({"a": A, "b": B}))
    expected = stats.ttest_ind(A, B).confidence_interval(0.95)
    assert (effect.low, effect.high) == pytest.approx((expected.low, expected.high))
    assert effect.value == pytest.approx(np.mean(A) - np.mean(B))
    assert effect.n == 3 and effect.df == 4 and effect.of == "pooled"


def test_more_arms_give_degrees_of_freedom():
    spread = pooled_spread({"a": A, "b": B, "c": C})
    assert spread.df == 6
    assert spread.sd == pytest.approx(math.sqrt(np.mean([np.var(v, ddof=1) for v in (A, B, C)])))
    effect = paired_effect(by_seed(A), by_seed(B), spread)
    half = stats.t.ppf(0.975, 6) * spread.sd * math.sqrt(2 / 3)
    assert effect.high - effect.value == pytest.approx(half)


def test_homogeneity_is_bartletts():
    wild = [1.0, 5.0, 9.0]
    for arms in ((A, B, C), (A, B, wild)):
        spread = pooled_spread(dict(zip("abc", arms, strict=True)))
        assert spread.p_equal == pytest.approx(stats.bartlett(*arms).pvalue)
    assert pooled_spread({"a": A, "b": [1.0, 1.0]}).p_equal == 0
    assert pooled_spread({"a": [2.0, 2.0], "b": [1.0, 1.0]}).p_equal == 1


def test_the_interval_is_welchs_where_the_two_arms_are_wilder_than_the_pool():
    wild = [1.0, 5.0, 9.0]
    spread = pooled_spread({"wild": wild, "b": B, "c": C})
    effect = paired_effect(by_seed(wild), by_seed(B), spread)
    expected = stats.ttest_ind(wild, B, equal_var=False).confidence_interval(0.95)
    assert effect.of == "two arms"
    assert (effect.low, effect.high) == pytest.approx((expected.low, expected.high))
    # Two arms with a small spread use the pooled spread, which a third arm with a large spread increases.
    effect = paired_effect(by_seed(B), by_seed(C), spread)
    assert effect.of == "pooled"
    assert effect.high - effect.value == pytest.approx(stats.t.ppf(0.975, 6) * spread.sd * math.sqrt(2 / 3))


def test_runs_of_one_history_are_compared_by_their_differences():
    """Seeds differ much, and the arms differ little at each seed: the paired test detects the difference, but the
    unpaired interval does not."""
    a, b = [5.12, 5.21, 5.10, 4.7], [5.16, 5.25, 5.145, 4.735]
    spread = pooled_spread({"a": a, "b": b})
    effect = paired_effect(by_seed(a), by_seed(b), spread, share_history=True)
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (effect.low, effect.high) == pytest.approx((expected.low, expected.high))
    assert effect.of == "differences" and effect.df == 3 and effect.high < 0
    assert paired_effect(by_seed(a), by_seed(b), spread).high > 0
    assert not paired_effect({0: 1.0}, {0: 2.0}, None, share_history=True).has_interval


def misses(sds, draws=4000):
    """Return how often the interval of the difference between two of three equal arms excludes 0: by our rule, and by
    the pooled spread alone (the control)."""
    rng = np.random.default_rng(3)
    missed = pooled = 0
    for _ in range(draws):
        arms = {str(i): rng.normal(0, sd, 3) for i, sd in enumerate(sds)}
        spread = pooled_spread(arms)
        effect = paired_effect(by_seed(arms["0"]), by_seed(arms["1"]), spread)
        missed += not effect.low <= 0 <= effect.high
        pooled += abs(effect.value) > stats.t.ppf(0.975, spread.df) * spread.sd * math.sqrt(2 / 3)
    return missed / draws, pooled / draws


@pytest.mark.parametrize("sds", [(1, 0.3, 0.3), (1, 0.2, 0.2)])
def test_unlike_spreads_do_not_narrow_the_interval(sds):
    missed, pooled = misses(sds)
    assert missed <= 0.065
    assert pooled > 0.08


def test_only_shared_seeds_count():
    effect = paired_effect({0: 1.0, 1: 2.0, 5: 100.0}, {0: 0.0, 1: 1.0, 7: -100.0}, pooled_spread({"a": A}))
    assert effect.n == 2 and effect.value == 1.0
    assert paired_effect({0: 1.0}, {1: 1.0}, None) is None


def test_one_seed_has_no_interval():
    assert pooled_spread({"a": [1.0], "b": [2.0]}) is None
    effect = paired_effect({0: 2.0}, {0: 1.0}, None)
    assert effect.value == 1.0 and not effect.has_interval and math.isnan(effect.beyond(0.05))


def test_equal_seeds_have_no_spread():
    spread = pooled_spread({"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0]})
    effect = paired_effect(by_seed([2.0] * 3), by_seed([1.0] * 3), spread)
    assert (effect.low, effect.high) == (1.0, 1.0)


def test_smallest_detectable_effect_is_that_of_methods():
    """The smallest detectable effect is (t_.975 + t_.8)·s·√(2/n). With a pooled SD over seeds of s = 0.14, it is
    about 0.35 for three seeds and 0.24 for six."""
    for n, expected in ((3, 0.35), (6, 0.24)):
        values = 0.14 * stats.zscore(np.arange(n), ddof=1)
        spread = pooled_spread({arm: list(values) for arm in ("a", "b", "c", "d", "e")})
        effect = paired_effect(by_seed(values + 1), by_seed(values), spread)
        assert effect.beyond(0.05) == pytest.approx(expected, abs=0.03)
        # The noncentral t distribution gives the power.
        shift = effect.beyond(0.05) / (spread.sd * math.sqrt(2 / n))
        power = 1 - stats.nct.cdf(stats.t.ppf(0.975, spread.df), spread.df, shift)
        assert power == pytest.approx(0.8, abs=0.03)


def test_null_arms_are_rarely_told_apart():
    rng = np.random.default_rng(0)
    wrong = tight = 0
    draws = 2000
    for _ in range(draws):
        arms = {name: list(rng.normal(0, 0.14, 3)) for name in "abc"}
        effect = paired_effect(by_seed(arms["a"]), by_seed(arms["b"]), pooled_spread(arms))
        wrong += not effect.low <= 0 <= effect.high
        # The control: with the normal quantile, the interval is too narrow.
        half = (effect.high - effect.value) * 1.96 / quantile_t(0.975, effect.df)
        tight += abs(effect.value) > half
    assert wrong / draws <= 0.065
    assert tight / draws > 0.065
