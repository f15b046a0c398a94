"""Area under the ROC curve (AUROC) of a score that predicts which runs fail.

A learning rate that is too high raises norms and also makes runs fail. So only runs of the same stratum, for example
with the same learning rate, are compared. A pair consists of one failed run and one survivor of the same stratum.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from mmqk.lab.stats.effects import WithInterval

FEWEST_OF_EACH = 10


@dataclass(frozen=True)
class Auroc(WithInterval):
    """Share of pairs (a failed run and a survivor) in which the failed run has the higher score.

    It has the interface of `mmqk.lab.stats.effects.Effect`: value, interval at a level, p-value at a threshold.

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
    scores: Sequence[float],
    failed: Sequence[bool],
    strata: Sequence[Hashable] | None = None,
    fewest: int = FEWEST_OF_EACH,
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

    Raises:
        ValueError: lengths differ, or a score is NaN.
    """
    x, failure = np.asarray(scores, dtype=np.float64), np.asarray(failed, dtype=bool)
    names = [0] * len(x) if strata is None else list(strata)
    if not len(x) == len(failure) == len(names):
        raise ValueError(
            f"there are {len(x)} scores, {len(failure)} outcomes and {len(names)} strata: give one of each per run"
        )
    if np.isnan(x).any():
        raise ValueError("a score is NaN: leave out the run, or rank it worst with inf")
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    stratum = np.array([number[name] for name in names])
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
