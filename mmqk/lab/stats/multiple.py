"""Correct the significance level for several claims, and for several looks at one claim.

The confirmatory claims of a family share a level of 5 % by the Holm correction (Scandinavian Journal of Statistics 6,
1979). The exploratory claims have a false discovery rate of 10 % by the Benjamini-Hochberg procedure (JRSS B 57,
1995). The intervals of exploratory claims have the confidence that corresponds to this rate (Benjamini and Yekutieli,
JASA 100, 2005), but at least 95 %.

If seeds may be added, every number of seeds from the smallest to the largest registered number is a look. All looks
have the same nominal level, chosen so that the total error over the looks is 5 % (Pocock, Biometrika 64, 1977). The
total error is computed from simulated t-tests of two arms. Pocock's own levels assume normal means with a known
variance; with looks at 3, 4, 5 and 6 seeds they would give a total error of 5.6 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

FAMILY_LEVEL = 0.05
DISCOVERY_LEVEL = 0.10
# Number of simulated pairs of arms. If fewer than FEWEST pairs have a p-value as small as the given one, the
# Bonferroni bound is used instead of the share of these pairs.
PAIRS, FEWEST = 60_000, 60


@dataclass(frozen=True)
class Adjusted:
    """The corrected level and p-value of a claim.

    Attributes:
        method: "Holm" or "Benjamini-Hochberg".
        claims: number of claims that share the level.
        alpha: two-sided level of the interval that decides this claim, corrected for looks.
        p: adjusted p-value; the claim is decided if it is at most 0.05 (Holm) or 0.10 (Benjamini-Hochberg).
    """

    method: str
    claims: int
    alpha: float
    p: float


def holm(p_values: Sequence[float]) -> list[tuple[float, float]]:
    """Return (level, adjusted p-value) of each p-value, in order; a hypothesis is rejected if p is at most its level.

    Hypotheses after the step at which the procedure stops get the level of that step.
    """
    order = np.argsort(p_values, kind="stable")
    p, left = np.asarray(p_values)[order], np.arange(len(p_values), 0, -1)
    rejected = np.append(p <= FAMILY_LEVEL / left, False).argmin()
    levels = FAMILY_LEVEL / np.maximum(left, len(p) - rejected)
    adjusted = np.maximum.accumulate(np.minimum(1.0, left * p))
    back = np.argsort(order)
    return list(zip(levels[back].tolist(), adjusted[back].tolist(), strict=True))


def benjamini_hochberg(p_values: Sequence[float]) -> list[tuple[float, float]]:
    """Return (level, adjusted p-value) of each p-value, in order; the level is at most 5 %."""
    adjusted = stats.false_discovery_control(p_values).tolist() if len(p_values) else []
    discoveries = max(1, sum(p <= DISCOVERY_LEVEL for p in adjusted))
    level = min(FAMILY_LEVEL, DISCOVERY_LEVEL * discoveries / max(1, len(adjusted)))
    return [(level, p) for p in adjusted]


@lru_cache(maxsize=64)
def _smallest(first: int, last: int) -> NDArray[np.float64]:
    """Return the sorted smallest p-values over all looks, for `PAIRS` simulated pairs of equal arms."""
    rng = np.random.default_rng(0)
    arms = rng.standard_normal((2, last, PAIRS))
    smallest = np.ones(PAIRS)
    for n in range(first, last + 1):
        samples = arms[:, :n]
        error = np.sqrt(samples.var(axis=1, ddof=1).sum(axis=0) / n)
        t = np.abs(samples[0].mean(axis=0) - samples[1].mean(axis=0)) / error
        smallest = np.minimum(smallest, 2 * special.stdtr(2 * (n - 1), -t))
    return np.sort(smallest)


def p_over_looks(p: float, first: int, last: int) -> float:
    """Return the p-value of one look, corrected for all registered looks: with ``first`` seeds and with each further
    seed up to ``last``. The result is at least p and at most the Bonferroni correction."""
    if last <= first:
        return p
    below = int(np.searchsorted(_smallest(first, last), p, side="right"))
    most = min(1.0, (last - first + 1) * p)
    return min(most, max(p, below / PAIRS)) if below >= FEWEST else most


@lru_cache(maxsize=1024)
def level_of_look(alpha: float, first: int, last: int) -> float:
    """Return the nominal level of each look for a total error of ``alpha`` over all looks."""
    if last <= first:
        return alpha
    low, high = 0.0, alpha
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if p_over_looks(middle, first, last) <= alpha else (low, middle)
    return low
