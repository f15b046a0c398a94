"""Times to failure: the Kaplan-Meier curve and the log-rank test.

A run that did not fail is censored at its last step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats


def kaplan_meier(times: Sequence[float], failed: Sequence[bool]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (times, share of runs that survive beyond each time), starting at time 0 (Kaplan and Meier 1958)."""
    curve = stats.ecdf(_censored(times, failed)).sf
    return np.concatenate([[0.0], curve.quantiles]), np.concatenate([[1.0], curve.probabilities])


def log_rank(
    times: Sequence[float], failed: Sequence[bool], others: Sequence[float], others_failed: Sequence[bool]
) -> float:
    """Return the two-sided p-value of the log-rank test of equal survival (Mantel 1966); NaN if no run failed."""
    if not len(times) or not len(others) or not (any(failed) or any(others_failed)):
        return math.nan
    return float(stats.logrank(_censored(times, failed), _censored(others, others_failed)).pvalue)


def _censored(times: Sequence[float], failed: Sequence[bool]) -> stats.CensoredData:
    return stats.CensoredData.right_censored(np.asarray(times, dtype=float), ~np.asarray(failed, dtype=bool))
