"""Compare the stratified AUROC with the Mann-Whitney U, the DeLong variance and brute force."""

import math

import numpy as np
import pytest
from scipy import special, stats

from mmqk.lab.stats.effects import auroc

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
    assert (
        math.isnan(found.value) and "9 failures and 31 survivors" in found.why and "10 of each" in found.why
    )
    # Ten runs of each kind that never share a stratum make no pair.
    apart = auroc(scores, failed, failed, fewest=0)
    assert math.isnan(apart.value) and (apart.failures, apart.survivors, apart.pairs) == (0, 0, 0)


def test_impossible_scores_are_refused():
    with pytest.raises(ValueError, match="NaN: leave out"):
        auroc([1.0, math.nan], [True, False])
    with pytest.raises(ValueError, match="2 scores, 1 outcomes"):
        auroc([1.0, 2.0], [True])
