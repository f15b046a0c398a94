"""Shares of counted runs: their difference with an exact interval.

Two arms are compared by their shares of counted runs. Fisher's exact test tests whether the shares are equal. The
interval of the difference is the tail interval of Santner and Snell (J. Am. Stat. Assoc. 75, 1980), which inverts two
one-sided exact unconditional tests. They order outcomes by the difference of the shares. A p-value is the maximum
over all pairs of true shares, so the interval has at least its nominal coverage for every pair. The interval of one
share is the Clopper-Pearson interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from mmqk.lab.effects import Auroc, Effect, WithInterval

NUISANCE = np.linspace(0, 1, 201)
_TIE = 1e-9


def clopper_pearson(count: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a share, from ``count`` of ``n`` runs."""
    low, high = stats.binomtest(count, n).proportion_ci(confidence)
    return float(low), float(high)


@lru_cache(maxsize=4096)
def _p_above(n: int, m: int, delta: float) -> NDArray[np.float64]:
    """Return, for every outcome [a, b], the probability that the difference of the shares is at least as large as in
    this outcome.

    The probability is the maximum over all pairs of true shares whose difference is ``delta``.
    """
    second = NUISANCE * (1 - abs(delta)) + max(0.0, -delta)
    i, j = np.arange(n + 1), np.arange(m + 1)
    first_PA = _binomial(n, np.clip(second + delta, 0, 1))
    second_PB = _binomial(m, second)
    joint_PT = (first_PA[:, :, None] * second_PB[:, None, :]).reshape(len(second), -1)
    difference_T = (i[:, None] / n - j[None, :] / m).ravel()
    order = np.argsort(-difference_T, kind="stable")
    reached_T = joint_PT[:, order].cumsum(axis=1).max(axis=0)
    falling_T = difference_T[order]
    last = np.searchsorted(-falling_T, -(difference_T - _TIE), side="right") - 1
    return np.minimum(1.0, reached_T[last]).reshape(n + 1, m + 1)


def _binomial(n: int, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the binomial probabilities, [share, count]."""
    return np.asarray(stats.binom.pmf(np.arange(n + 1), n, shares[:, None]))


@dataclass(frozen=True)
class Counts(WithInterval):
    """Difference of two shares: ``a`` of ``n_treatment`` runs minus ``b`` of ``m``.

    It has the interface of `mmqk.lab.effects.Effect`: value, interval at a level, p-value at a threshold.
    """

    a: int
    n_treatment: int
    b: int
    m: int
    error = 0.0  # there is always an interval, and it is exact

    @property
    def value(self) -> float:
        """Share of the treatment - share of the control."""
        return self.a / self.n_treatment - self.b / self.m

    @property
    def n(self) -> int:
        """Number of runs of the smaller arm."""
        return min(self.n_treatment, self.m)

    @property
    def fisher(self) -> float:
        """Two-sided p-value of Fisher's exact test of equal shares."""
        table = [[self.a, self.n_treatment - self.a], [self.b, self.m - self.b]]
        return float(stats.fisher_exact(table).pvalue)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the exact interval at confidence 1 - alpha."""
        low = _edge(self.a, self.n_treatment, self.b, self.m, alpha / 2)
        return low, -_edge(self.b, self.m, self.a, self.n_treatment, alpha / 2)

    def p_at(self, threshold: float) -> float:
        """Return the two-sided p-value of the hypothesis that the true difference is ``threshold``."""
        above = _p_above(self.n_treatment, self.m, threshold)[self.a, self.b]
        below = _p_above(self.m, self.n_treatment, -threshold)[self.b, self.a]
        return float(min(1.0, 2 * min(above, below)))

    def detectable(self, threshold: float, alpha: float, power: float) -> float:
        """Return the smallest true difference above ``threshold`` that is significant with this power; NaN if there
        is none.

        The true share of the control is set to the observed share. For a threshold below 0, the arms are swapped
        and the sign is reversed.
        """
        if threshold < 0:
            return -Counts(self.b, self.m, self.a, self.n_treatment).detectable(-threshold, alpha, power)
        n, m = self.n_treatment, self.m
        cleared_AB = _p_above(n, m, threshold) <= alpha / 2
        equal_AB = np.array([[Counts(i, n, j, m).fisher <= alpha for j in range(m + 1)] for i in range(n + 1)])
        control_B = _binomial(m, np.array([self.b / m]))[0]
        for share in NUISANCE[self.b / m + threshold < NUISANCE]:
            if _binomial(n, np.array([share]))[0] @ (cleared_AB & equal_AB) @ control_B >= power:
                return float(share - self.b / m)
        return math.nan


@lru_cache(maxsize=4096)
def _edge(a: int, n: int, b: int, m: int, tail: float) -> float:
    """Return the lower end of the interval: the largest difference that the one-sided test rejects at ``tail``; -1 if
    it rejects none."""
    low, high = -1.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        if _p_above(n, m, middle)[a, b] <= tail:
            low = middle
        else:
            high = middle
    return low if low > -1 + 1e-6 else -1.0


AnyEffect = Effect | Counts | Auroc
