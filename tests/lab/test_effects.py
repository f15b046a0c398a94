"""Compare effects with scipy's statistics and check their stated coverage; compare the stratified AUROC with the
Mann-Whitney U, the DeLong variance and brute force."""

import math

import numpy as np
import pytest
from scipy import special, stats

from mmqk.lab.effects import auroc, paired_effect, pooled_spread

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


def misses(sds, draws=1500):
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


@pytest.mark.parametrize("sds", [(1, 1, 1), (1, 0.3, 0.3), (1, 0.2, 0.2)])
def test_unlike_spreads_do_not_narrow_the_interval(sds):
    missed, pooled = misses(sds)
    assert missed <= 0.065
    assert (pooled > 0.08) == (sds != (1, 1, 1))


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


RNG = np.random.default_rng(7)


def brute(scores, failed, strata):
    wins, pairs = 0.0, 0
    for x, lost, s in zip(scores, failed, strata, strict=True):
        for y, other, t in zip(scores, failed, strata, strict=True):
            if lost and not other and s == t:
                wins, pairs = wins + (x > y) + 0.5 * (x == y), pairs + 1
    return wins / pairs


def test_one_stratum_is_the_u_of_mann_and_whitney():
    scores, failed = RNG.integers(0, 8, 40).astype(float), np.arange(40) < 15  # with many ties
    a, b = scores[failed], scores[~failed]
    found = auroc(scores, failed)
    assert found.value == pytest.approx(stats.mannwhitneyu(a, b).statistic / (15 * 25))
    assert (found.failures, found.survivors, found.pairs) == (15, 25, 375)


def test_strata_by_brute_force_and_an_infinite_score_ranks_worst():
    scores = RNG.integers(0, 6, 60).astype(float)
    scores[:3] = math.inf
    failed, strata = RNG.random(60) < 0.5, RNG.integers(0, 4, 60).tolist()
    assert auroc(scores, failed, strata).value == pytest.approx(brute(scores, failed, strata))
    assert abs(auroc(scores, failed).value - brute(scores, failed, strata)) > 1e-3


def test_the_interval_of_one_stratum_has_delongs_variance():
    a, b = RNG.normal(1.0, 1, 14), RNG.normal(0, 1, 18)
    wins = (a[:, None] > b[None, :]).astype(float)
    variance = wins.mean(1).var(ddof=1) / 14 + wins.mean(0).var(ddof=1) / 18
    value = wins.mean()
    half = stats.norm.ppf(0.975) * math.sqrt(variance) / (value * (1 - value))
    found = auroc([*a, *b], [True] * 14 + [False] * 18)
    assert (found.low, found.high) == pytest.approx(
        tuple(special.expit(special.logit(value) + s * half) for s in (-1, 1))
    )


def test_the_interval_covers_and_is_not_far_too_wide():
    rng, truth, inside = np.random.default_rng(3), stats.norm.cdf(0.8 / math.sqrt(2)), 0
    for _ in range(300):
        shift = np.repeat([0.0, 1.5, 3.0], 12)  # the strata differ; within a stratum, failed runs score 0.8 higher
        failed = rng.random(36) < 0.5
        found = auroc(rng.normal(0, 1, 36) + shift + 0.8 * failed, failed, shift.tolist(), fewest=1)
        inside += found.low <= truth <= found.high
    assert 0.90 <= inside / 300 <= 0.985


def test_perfect_scores_have_wilsons_interval():
    found = auroc([2.0] * 10 + [1.0] * 30, [True] * 10 + [False] * 30)
    z2 = stats.norm.ppf(0.975) ** 2
    assert found.value == 1 and found.high == pytest.approx(1) and found.low == pytest.approx(10 / (10 + z2))
    useless = auroc([1.0] * 40, [True] * 10 + [False] * 30)
    assert useless.value == 0.5 and useless.low < 0.25 < 0.75 < useless.high


def test_below_ten_of_each_there_is_no_value():
    scores, failed = RNG.random(40), [True] * 10 + [False] * 30
    assert not math.isnan(auroc(scores, failed).value)
    found = auroc(scores, [True] * 9 + [False] * 31)
    assert math.isnan(found.value) and "9 failures and 31 survivors" in found.why and "10 of each" in found.why
    # Ten runs of each kind that never share a stratum make no pair.
    apart = auroc(scores, failed, failed, fewest=0)
    assert math.isnan(apart.value) and (apart.failures, apart.survivors, apart.pairs) == (0, 0, 0)
