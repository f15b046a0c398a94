"""Effects of a treatment with their intervals.

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
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
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
    return Spread(
        sd=math.sqrt(pooled),
        df=int(dofs.sum()),
        by_arm={arm: math.sqrt(v) for arm, v in zip(usable, variances, strict=True)},
        p_equal=_bartlett(list(usable.values()), variances),
    )


def _bartlett(arms: Sequence[np.ndarray], variances: np.ndarray) -> float:
    """Return the p-value of Bartlett's test that all arms have the same variance.

    It is 1 if there are fewer than two arms or if no arm has spread, and 0 if only some arms have spread; scipy's
    function does not handle these cases.
    """
    if len(arms) < 2 or not variances.any():
        return 1.0
    return float(stats.bartlett(*arms).pvalue) if variances.all() else 0.0


def paired_effect(
    treatment: Mapping[int, float],
    control: Mapping[int, float],
    spread: Spread | None,
    share_history: bool = False,
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
