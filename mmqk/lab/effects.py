"""Effects of a treatment with their intervals: differences of two arms, and AUROCs.

An effect is the mean difference of an outcome over shared seeds, on the scale of the outcome: the logarithm for
ratios, nats for a loss. Three seeds estimate the spread of an arm poorly. A spread pooled over all arms has more
degrees of freedom, but is wrong for arms with different spreads. So the interval uses the pooled spread, unless the
standard error of the two arms alone is larger; then it is the Welch interval. For three arms with three seeds each
and standard deviations of 1, 0.3 and 0.3, 6 % of the intervals by this rule miss a true effect of 0. If Bartlett's
test at p = 0.1 chose the interval instead, 10 % would miss it.

A t interval is too short on the side of the longer tail if one arm is skewed: a few seeds rarely include a value of
the tail, and without one both the mean and the spread are too small. `Effect.shifted` is a second interval, of the
two arms alone and shifted towards the longer tail (Johnson, JASA 73, 1978). A verdict needs both intervals.
`docs/experiments/second_test.py` compares it with other second tests.

The area under the ROC curve (AUROC) measures how well a score predicts which runs fail. A learning rate that is too
high raises norms and also makes runs fail. So only runs of the same stratum, for example with the same learning rate,
are compared. A pair consists of one failed run and one survivor of the same stratum.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special, stats

CONFIDENCE = 0.95
POWER = 0.8


class WithInterval(ABC):
    """A number with an interval; `low` and `high` are the ends of the 95 % interval.

    Attributes:
        error: standard error; NaN if there is no interval.
    """

    error: float

    @property
    def has_interval(self) -> bool:
        """Whether there are enough runs for an interval."""
        return math.isfinite(self.error)

    @abstractmethod
    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the interval at confidence 1 - alpha; (NaN, NaN) if there is none."""

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval; NaN if there is no interval."""
        return self.interval(1 - CONFIDENCE)[0]

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval; NaN if there is no interval."""
        return self.interval(1 - CONFIDENCE)[1]


@dataclass(frozen=True)
class Spread:
    """Spread over seeds within arms.

    Attributes:
        sd: pooled standard deviation on the scale of the outcome.
        df: degrees of freedom of ``sd``, the sum over arms of (seeds - 1).
        by_arm: standard deviation of each arm.
        p_equal: p-value of Bartlett's test that all arms have the same variance.
    """

    sd: float
    df: int
    by_arm: Mapping[str, float]
    p_equal: float


@dataclass(frozen=True)
class Effect(WithInterval):
    """A difference of two arms on the scale of the outcome.

    Attributes:
        value: mean over seeds of treatment - control.
        error: standard error; NaN if no spread can be estimated.
        n: number of shared seeds.
        df: degrees of freedom of the interval.
        of: what the standard error is computed from: the spread "pooled" over arms, the spread of the "two arms"
            alone, or the "differences" by seed.
        differences: treatment - control by seed.
        own_error: standard error from the two arms alone, or from the differences by seed.
        own_df: degrees of freedom of ``own_error`` (Welch).
        skewness: skewness of ``value``: its third central moment over ``own_error`` cubed; 0 with two seeds.
    """

    value: float
    error: float
    n: int
    df: float
    of: Literal["pooled", "two arms", "differences"]
    differences: tuple[float, ...] = ()
    own_error: float = math.nan
    own_df: float = math.nan
    skewness: float = 0.0

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the interval at confidence 1 - alpha."""
        half = quantile_t(1 - alpha / 2, self.df) * self.error
        return self.value - half, self.value + half

    def shifted(self, alpha: float) -> tuple[float, float]:
        """Return the interval of the two arms alone at confidence 1 - alpha, shifted for their skewness."""
        t = quantile_t(1 - alpha / 2, self.own_df)
        middle = self.value + self.skewness * (2 * t * t + 1) / 6 * self.own_error
        return middle - t * self.own_error, middle + t * self.own_error

    def p_at(self, threshold: float) -> float:
        """Return the two-sided p-value of the hypothesis that the true effect is ``threshold``. At confidence 1 - p,
        the interval ends at ``threshold``."""
        distance = abs(self.value - threshold)
        if self.error == 0:
            return float(distance == 0)
        return float(2 * special.stdtr(self.df, -distance / self.error))

    def beyond(self, alpha: float, power: float = POWER) -> float:
        """Return how far beyond a threshold the true effect must lie for the interval at confidence 1 - alpha to
        exclude the threshold with this power; NaN if there is no standard error."""
        return (quantile_t(1 - alpha / 2, self.df) + quantile_t(power, self.df)) * self.error


def quantile_t(p: float, df: float) -> float:
    """Return the quantile of Student's t."""
    return float(special.stdtrit(df, p))


def pooled_spread(outcomes: Mapping[str, Sequence[float]]) -> Spread | None:
    """Return the pooled spread of the outcomes by arm, without arms that have fewer than two seeds.

    Returns None if no arm has two seeds.
    """
    usable = {arm: np.asarray(values) for arm, values in outcomes.items() if len(values) >= 2}
    if not usable:
        return None
    variances = np.array([values.var(ddof=1) for values in usable.values()])
    dofs = np.array([len(values) - 1 for values in usable.values()])
    pooled = float((variances * dofs).sum() / dofs.sum())
    by_arm = {arm: math.sqrt(v) for arm, v in zip(usable, variances, strict=True)}
    return Spread(math.sqrt(pooled), int(dofs.sum()), by_arm, _bartlett(list(usable.values()), variances))


def _bartlett(arms: Sequence[np.ndarray], variances: np.ndarray) -> float:
    """Return the p-value of Bartlett's test that all arms have the same variance.

    It is 1 if there are fewer than two arms or if no arm has spread, and 0 if only some arms have spread; scipy's
    function does not handle these cases.
    """
    if len(arms) < 2 or not variances.any():
        return 1.0
    return float(stats.bartlett(*arms).pvalue) if variances.all() else 0.0


def paired_effect(
    treatment: Mapping[int, float], control: Mapping[int, float], spread: Spread | None, share_history: bool = False
) -> Effect | None:
    """Return the effect, treatment - control, over the shared seeds; None if there are none.

    The interval treats the two means as independent, although runs with the same seed share data order and initial
    weights, because a paired interval would have only n - 1 degrees of freedom. If the outcomes of the arms are
    positively correlated over seeds, the interval is too wide; if they are negatively correlated, it is too narrow.

    Args:
        treatment: outcome of the treatment by seed.
        control: outcome of the control by seed.
        spread: pooled spread over seeds.
        share_history: whether the two runs of a seed are identical until a fork. The interval then uses the
            differences by seed, with n - 1 degrees of freedom, because the variation over seeds affects both runs.
    """
    seeds = sorted(treatment.keys() & control.keys())
    if not seeds:
        return None
    a, b = (np.array([values[s] for s in seeds]) for values in (treatment, control))
    n = len(seeds)
    value = float((a - b).mean())
    differences = tuple((a - b).tolist())
    if share_history:
        error = float((a - b).std(ddof=1)) / math.sqrt(n) if n >= 2 else math.nan
        skewness = _skewness(error, a - b)
        return Effect(value, error, n, n - 1.0, "differences", differences, error, n - 1.0, skewness)
    error, df = math.nan, 0.0
    if n >= 2:
        va, vb = float(a.var(ddof=1)) / n, float(b.var(ddof=1)) / n
        df = (va + vb) ** 2 * (n - 1) / (va**2 + vb**2) if va + vb > 0 else 2.0 * (n - 1)
        error = math.sqrt(va + vb)
    own = error, df, _skewness(error, a, -b)
    # Use the pooled spread if the two errors are equal up to rounding.
    if spread is not None and not error > (of_pool := spread.sd * math.sqrt(2 / n)) * (1 + 1e-9):
        return Effect(value, of_pool, n, float(spread.df), "pooled", differences, *own)
    return Effect(value, error, n, df, "two arms", differences, *own)


def _skewness(error: float, *samples: np.ndarray) -> float:
    """Return the skewness of the sum of the means of these samples, whose standard error is ``error``."""
    n = len(samples[0])
    if n < 3 or not error > 0:
        return 0.0
    third = sum(float(((x - x.mean()) ** 3).sum()) for x in samples) * n / ((n - 1) * (n - 2))
    return third / n**2 / error**3


MOST_FLIPPED = 16


def sign_flip(differences: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the two-sided p-value of the exact sign-flip test that paired differences are symmetric about 0.

    This is the share of all 2^n sign patterns whose sum is at least as far from 0 as the observed sum; NaN for one
    difference, and for more than `MOST_FLIPPED`.
    """
    if not 1 < len(differences) <= MOST_FLIPPED:
        return math.nan
    test = stats.permutation_test(
        (np.asarray(differences, dtype=float),), np.sum, permutation_type="samples", n_resamples=2**MOST_FLIPPED,
        vectorized=True,
    )  # fmt: skip
    return float(test.pvalue)


FEWEST_OF_EACH = 10


@dataclass(frozen=True)
class Auroc(WithInterval):
    """Share of pairs (a failed run and a survivor) in which the failed run has the higher score.

    It has the interface of `mmqk.lab.effects.Effect`: value, interval at a level, p-value at a threshold.

    Attributes:
        value: the share, where ties count half; NaN if the pairs contain too few failed runs or too few survivors.
        error: jackknife standard error over runs; NaN if there is no interval.
        failures: number of failed runs that are in a pair.
        survivors: number of other runs that are in a pair.
        pairs: number of pairs.
        why: why there is no value or no interval; else empty.
    """

    value: float
    error: float = math.nan
    failures: int = 0
    survivors: int = 0
    pairs: int = 0
    why: str = ""

    @property
    def n(self) -> int:
        """Number of runs that are in a pair."""
        return self.failures + self.survivors

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the interval at confidence 1 - alpha."""
        if not self.has_interval:
            return math.nan, math.nan
        z, trials = float(special.ndtri(1 - alpha / 2)), self._trials
        if trials:
            middle = (self.value + z * z / (2 * trials)) / (1 + z * z / trials)
            spread = math.sqrt(self.value * (1 - self.value) / trials + z * z / (4 * trials**2))
            half = z / (1 + z * z / trials) * spread
            return max(0.0, middle - half), min(1.0, middle + half)
        half = z * self.error / (self.value * (1 - self.value))
        low, high = (float(special.expit(special.logit(self.value) + sign * half)) for sign in (-1, 1))
        return low, high

    def p_at(self, threshold: float) -> float:
        """Return the two-sided p-value of the hypothesis that the true AUROC is ``threshold``. At confidence 1 - p,
        the interval ends at ``threshold``."""
        if not self.has_interval or not 0 < threshold < 1:
            return math.nan
        if self._trials:
            z = abs(self.value - threshold) / math.sqrt(threshold * (1 - threshold) / self._trials)
        else:
            distance = abs(special.logit(self.value) - special.logit(threshold))
            z = distance * self.value * (1 - self.value) / self.error
        return float(2 * special.ndtr(-z))

    @property
    def _trials(self) -> int:
        """The number of trials of the Wilson interval; 0 if the interval is on the logit scale."""
        return min(self.failures, self.survivors) if self.error == 0 or self.value in (0.0, 1.0) else 0


def auroc(
    scores: Sequence[float], failed: Sequence[bool], strata: Sequence[Hashable] = (), fewest: int = FEWEST_OF_EACH
) -> Auroc:
    """Return the AUROC over the pairs within strata, with equal weight for every pair.

    The interval comes from a jackknife over runs (failures and survivors separately), on the logit scale. If there is
    one stratum, the jackknife variance is the DeLong variance. If the scores separate the runs perfectly, the
    variance is 0. Then the interval is the Wilson interval, with the number of runs of the smaller group as the
    number of trials. No AUROC has a larger variance than a binomial share of that many trials (Birnbaum and Klose).

    Args:
        scores: one per run; infinite for the worst score, never NaN.
        failed: whether each run failed.
        strata: the stratum of each run; by default one for all.
        fewest: smallest number of failures and of survivors in pairs; with fewer of either, the AUROC is NaN.
    """
    x, failure = np.asarray(scores, dtype=np.float64), np.asarray(failed, dtype=bool)
    stratum = pd.factorize(np.array(strata or [0] * len(x)))[0]
    # One row per failure and one column per survivor: whether both runs are in the same stratum, and the score of the
    # pair (1 if the failure has the higher score, 0.5 for a tie, else 0).
    a, b = x[failure][:, None], x[~failure][None, :]
    allowed = stratum[failure][:, None] == stratum[~failure][None, :]
    wins = np.where(allowed, np.where(a > b, 1.0, np.where(a == b, 0.5, 0.0)), 0.0)
    failures, survivors = int(allowed.any(axis=1).sum()), int(allowed.any(axis=0).sum())
    pairs = int(allowed.sum())
    if min(failures, survivors) < max(1, fewest):
        why = f"only {failures} failures and {survivors} survivors are in pairs: {fewest} of each are needed"
        return Auroc(math.nan, math.nan, failures, survivors, pairs, why)
    value = float(wins.sum() / pairs)
    error = _jackknife_error(wins, allowed)
    why = "too few runs for an interval" if math.isnan(error) else ""
    return Auroc(value, error, failures, survivors, pairs, why)


def _jackknife_error(wins: NDArray[np.float64], allowed: NDArray[np.bool_]) -> float:
    """Return the jackknife standard error of ``wins.sum() / allowed.sum()``, over failures and over survivors."""
    total, pairs, variance = wins.sum(), allowed.sum(), 0.0
    for axis in (1, 0):
        n = allowed.sum(axis=axis)
        n, won = n[n > 0], wins.sum(axis=axis)[n > 0]
        rest = pairs - n
        if len(n) < 2 or (rest == 0).any():
            return math.nan
        without = (total - won) / rest
        variance += (len(n) - 1) / len(n) * float(((without - without.mean()) ** 2).sum())
    return math.sqrt(variance)
