"""The second test: its interval, the verdicts that it turns, and its rates of false verdicts in simulated nulls."""

import math

import numpy as np
import pytest
import second_test as second
from scipy import stats

from mmqk.lab.effects import paired_effect, pooled_spread
from tests.lab.fake_runs import Planted
from tests.lab.verdicts.test_claims import BASIC, one


def by_seed(values):
    return dict(enumerate(map(float, values)))


def test_without_skewness_it_is_the_welch_interval():
    a, b = np.array([-2.0, -1, 0, 1, 2]) + 5, np.array([-0.3, 0.1, 0, -0.1, 0.3])
    effect = paired_effect(by_seed(a), by_seed(b), pooled_spread({"a": a, "b": b, "c": b, "d": b}))
    welch = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert effect.skewness == pytest.approx(0) and effect.shifted(0.05) == pytest.approx(tuple(welch))


@pytest.mark.parametrize("share_history", [False, True])
def test_the_shift_is_that_of_johnson(share_history):
    """For one sample of n values with skewness g, the shift is g (2 t² + 1) / 6 / √n standard errors."""
    a = np.array([0.0, 0.1, 0.2, 0.4, 0.9, 3.0])
    b = np.ones(6)
    n, t = 6, stats.t.ppf(0.975, 5)
    error = a.std(ddof=1) / math.sqrt(n)
    shift = stats.skew(a, bias=False) * (2 * t**2 + 1) / 6 / math.sqrt(n) * error
    effect = paired_effect(by_seed(a), by_seed(b), None, share_history)
    middle = a.mean() - 1 + shift
    assert effect.shifted(0.05) == pytest.approx((middle - t * error, middle + t * error))
    mirrored = paired_effect(by_seed(b), by_seed(a), None, share_history)
    assert mirrored.shifted(0.05) == pytest.approx((-middle - t * error, -middle + t * error))


VALUES = {"tail": (-0.15, -0.14, -0.12, -0.06, 0.02, 0.45), "none": (-0.30, -0.17, -0.05, 0.05, 0.17, 0.30)}


def planted(values, ratio):
    """Return an arm whose logarithms have these deviations from the logarithm of 10 times ``ratio``."""
    return lambda seed: Planted(10 * ratio * math.exp(values[seed]), spread=0)


@pytest.mark.parametrize(
    ("values", "sign", "verdict"),
    [("tail", 1, "inconclusive"), ("none", 1, "contradicted"), ("tail", -1, "contradicted")],
)
def test_a_tail_towards_the_threshold_makes_a_verdict_inconclusive(tmp_path, values, sign, verdict):
    """The three arms have the same mean and nearly the same spread, and the first test contradicts each claim. The
    tail of the first points towards the smallest effect of interest."""
    deviations = [sign * value for value in VALUES[values]]
    arms = {"a": planted(deviations, 0.93), "b": planted([-0.01, 0, 0.01, -0.01, 0, 0.01], 1)}
    found = one(tmp_path, arms, [BASIC])
    assert found.p < 0.05 and not found.holds and found.verdict == verdict
    assert ("The second test disagrees" in " ".join(found.notes)) == (verdict == "inconclusive")


@pytest.mark.parametrize(("ratio", "verdict"), [(2.0, "reproduced"), (0.7, "contradicted")])
@pytest.mark.parametrize("tail", [1, -1])
def test_three_seeds_reach_every_verdict(tmp_path, ratio, verdict, tail):
    """With three seeds an exact permutation test has no p-value below 0.1. The skewness is the largest possible."""
    arms = {"a": planted([-0.01 * tail, -0.01 * tail, 0.02 * tail], ratio), "b": planted([-0.01, 0, 0.01], 1)}
    assert one(tmp_path, arms, [BASIC], seeds=range(3)).verdict == verdict
    same = BASIC | {"test": "equivalence"}
    arms["a"] = planted([-0.01 * tail, -0.01 * tail, 0.02 * tail], 1)
    assert one(tmp_path / "same", arms, [same], seeds=range(3)).verdict == "reproduced"


def test_it_lowers_the_rate_of_false_verdicts_and_keeps_power():
    """The second test lowers each rate of false verdicts. For normal arms both tests are right, and 6 seeds keep most
    of their power."""
    draws = 1500
    outliers = "outliers, 10 % of the runs 5 SD higher"
    for name, seeds, most in (("skewed (exponential)", 6, 0.10), (outliers, 4, 0.075)):
        alone, two = second.shares(second.ARMS[name], seeds, draws)
        assert alone - two > 0.008 and two < most, name
    for name, draw in second.TIMES.items():
        alone, two = second.shares(draw, 6, draws, spread=0)
        assert alone > 0.06 and two < 0.075, name
    assert second.shares(second.NORMAL, 6, draws, spread=1)[1] < 0.06
    alone, two = second.shares(second.NORMAL, 6, draws, shift=second.beyond(6, 0.95), spread=1)
    assert two > 0.82 and alone - two < 0.08
