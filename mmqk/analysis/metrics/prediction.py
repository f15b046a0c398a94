"""Do early norms predict late failure, beyond what the learning rate and the logits predict?

The area under the ROC curve (AUROC) over a sweep of runs, of an early number as the predictor of a later failure.
A learning rate that is too high raises norms and also makes runs fail. So only runs with the same learning rate are
compared: a pair is a failed run and one that did not fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from mmqk.analysis.metrics.metric import planned_steps
from mmqk.analysis.metrics.outcome import outcomes
from mmqk.analysis.metrics.probes import EARLY_SHARE, logit_series, norm_slope
from mmqk.analysis.metrics.rates import learning_rate
from mmqk.analysis.runs.load import Run

FEWEST_OF_EACH = 10
CONFIDENCE = 0.95
GRAD_NORM_STEPS = 50


@dataclass(frozen=True)
class Auroc:
    """Share of pairs (a failed run and a survivor) in which the failed run has the higher score.

    Attributes:
        value: ties count half; NaN without a pair.
        low: lower end of the 95 % interval.
        high: upper end of the 95 % interval.
        failures: number of failed runs in a pair.
        survivors: number of other runs in a pair.
        pairs: number of pairs.
        why: why there is no value or no interval; else empty.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    failures: int = 0
    survivors: int = 0
    pairs: int = 0
    why: str = ""


def auroc(
    scores: Sequence[float],
    failed: Sequence[bool],
    strata: Sequence[Hashable] | None = None,
    fewest: int = FEWEST_OF_EACH,
) -> Auroc:
    """The AUROC over the pairs within strata, with equal weight for every pair.

    The interval comes from a jackknife over runs (failures and survivors separately), on the logit scale; in one
    stratum this is DeLong's variance. If the scores separate the runs perfectly, that variance is 0. Then the
    interval is Wilson's with as many trials as the smaller group has runs, whose binomial variance is the largest
    possible (Birnbaum and Klose).

    Args:
        scores: one per run; infinite if it ranks worst, never NaN.
        failed: whether each run failed.
        strata: the stratum of each run; by default one for all.
        fewest: smallest number of failures and of survivors in pairs.

    Raises:
        ValueError: lengths differ, or a score is NaN.
    """
    wins, allowed = _pairs(scores, failed, strata)
    return _summary(wins, allowed, fewest)


def auroc_difference(
    scores: Sequence[float],
    others: Sequence[float],
    failed: Sequence[bool],
    strata: Sequence[Hashable] | None = None,
) -> tuple[float, float, float]:
    """(AUROC of ``scores`` minus AUROC of ``others``, low, high) with the 95 % jackknife interval."""
    wins, allowed = _pairs(scores, failed, strata)
    other_wins, _ = _pairs(others, failed, strata)
    if not allowed.any():
        return math.nan, math.nan, math.nan
    difference = wins - other_wins
    value, half = float(difference.sum() / allowed.sum()), _z() * _jackknife_error(difference, allowed)
    return value, max(-1.0, value - half), min(1.0, value + half)


def _pairs(
    scores: Sequence[float], failed: Sequence[bool], strata: Sequence[Hashable] | None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(1 for a win, 0.5 for a tie, else 0; whether both runs are in one stratum), [failure, survivor]."""
    x, lost = np.asarray(scores, dtype=np.float64), np.asarray(failed, dtype=bool)
    of = [0] * len(x) if strata is None else list(strata)
    if not len(x) == len(lost) == len(of):
        raise ValueError(
            f"there are {len(x)} scores, {len(lost)} outcomes and {len(of)} strata: give one of each per run"
        )
    if np.isnan(x).any():
        raise ValueError("a score is NaN: leave out the run, or rank it worst with inf")
    number = {name: i for i, name in enumerate(dict.fromkeys(of))}
    stratum = np.array([number[name] for name in of])
    a, b = x[lost][:, None], x[~lost][None, :]
    allowed = stratum[lost][:, None] == stratum[~lost][None, :]
    wins = np.where(a > b, 1.0, np.where(a == b, 0.5, 0.0))
    return np.where(allowed, wins, 0.0), allowed


def _summary(wins: NDArray[np.float64], allowed: NDArray[np.bool_], fewest: int) -> Auroc:
    failures, survivors = int(allowed.any(axis=1).sum()), int(allowed.any(axis=0).sum())
    pairs = int(allowed.sum())
    if min(failures, survivors) < max(1, fewest):
        why = f"{failures} failures and {survivors} survivors are in a pair: {fewest} of each are needed"
        return Auroc(math.nan, failures=failures, survivors=survivors, pairs=pairs, why=why)
    value = float(wins.sum() / pairs)
    error = _jackknife_error(wins, allowed)
    if math.isnan(error):
        return Auroc(value, math.nan, math.nan, failures, survivors, pairs, "too few runs for an interval")
    if error == 0 or value in (0.0, 1.0):
        low, high = _wilson(value, min(failures, survivors))
    else:
        half = _z() * error / (value * (1 - value))
        low, high = (float(special.expit(special.logit(value) + sign * half)) for sign in (-1, 1))
    return Auroc(value, low, high, failures, survivors, pairs)


def _jackknife_error(wins: NDArray[np.float64], allowed: NDArray[np.bool_]) -> float:
    """Jackknife standard error of ``wins.sum() / allowed.sum()``, over failures and over survivors."""
    total, pairs, variance = wins.sum(), allowed.sum(), 0.0
    for axis in (1, 0):
        mine = allowed.sum(axis=axis)
        mine, won = mine[mine > 0], wins.sum(axis=axis)[mine > 0]
        rest = pairs - mine
        if len(mine) < 2 or (rest == 0).any():
            return math.nan
        without = (total - won) / rest
        variance += (len(mine) - 1) / len(mine) * float(((without - without.mean()) ** 2).sum())
    return math.sqrt(variance)


def _wilson(share: float, trials: int) -> tuple[float, float]:
    z2 = _z() ** 2
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _z() / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def _z() -> float:
    return float(special.ndtri((1 + CONFIDENCE) / 2))


# Early numbers of runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """AUROC of early numbers for late failures, over a sweep.

    Attributes:
        within: AUROC of each predictor within learning-rate strata; for the learning rate it would be 0.5.
        overall: AUROC of each predictor over all pairs, the learning rate included.
        beyond: AUROC of the norm slope minus that of another predictor, with a 95 % interval: within strata for
            the logit and the gradient norm, over all pairs for the learning rate.
        failed_early: excluded runs that diverged within the window.
        unfinished: excluded runs without a known outcome.
        unmeasured: excluded runs without one of the numbers.
    """

    within: Mapping[str, Auroc]
    overall: Mapping[str, Auroc]
    beyond: Mapping[str, tuple[float, float, float]]
    failed_early: int
    unfinished: int
    unmeasured: int


SLOPE, LOGIT, GRAD, RATE = "norm slope", "max logit", "gradient norm", "learning rate"


def early_numbers(
    run: Run, statistic: str = "final_norm", modality: str | None = None, share: float = EARLY_SHARE
) -> dict[str, float]:
    """The predictors of one run, from its steps up to ``share`` of its length.

    The norm slope is `norm_slope` after warm-up. The max logit is that of the last probe. The gradient norm is the
    median of the last 50 steps, infinite if one of them is not finite.
    """
    end = share * planned_steps(run)
    steps, logits = logit_series(run, modality)
    logits = logits[steps <= end]
    at, norms = run.series("grad_norm")
    norms = norms[at <= end][-GRAD_NORM_STEPS:]
    return {
        SLOPE: norm_slope(run, statistic, modality, 0.0, share),
        LOGIT: float(logits[-1]) if len(logits) else math.nan,
        GRAD: _median(norms),
        RATE: learning_rate(run),
    }


def _median(values: NDArray[np.float64]) -> float:
    if not len(values):
        return math.nan
    return float(np.median(values)) if np.isfinite(values).all() else math.inf


def predict_failure(
    runs: Sequence[Run],
    statistic: str = "final_norm",
    modality: str | None = None,
    share: float = EARLY_SHARE,
    fewest: int = FEWEST_OF_EACH,
    failed: Callable[[Sequence[Run]], Sequence[bool | None]] | None = None,
) -> Prediction:
    """How well the slope of a norm in the first quarter of a run predicts a later failure.

    Args:
        runs: a sweep with several runs at each learning rate.
        statistic: the norm (`norm_slope`).
        modality: modality of the tokens, and of the queries of the logit.
        share: share of the run length that is used; a run that diverged within it is excluded.
        fewest: smallest number of failures and of survivors.
        failed: whether each run failed, None to exclude it; by default whether it diverged or stalled (`outcomes`).
    """
    ends = outcomes(runs)
    lost = [end.failed if end.finished else None for end in ends] if failed is None else list(failed(runs))
    early = unfinished = unmeasured = 0
    kept: list[tuple[dict[str, float], bool]] = []
    for run, end, fails in zip(runs, ends, lost, strict=True):
        numbers = early_numbers(run, statistic, modality, share)
        if fails is None:
            unfinished += 1
        elif end.diverged is not None and end.diverged <= share * planned_steps(run):
            early += 1
        elif any(math.isnan(value) for value in numbers.values()):
            unmeasured += 1
        else:
            kept.append((numbers, bool(fails)))
    fails_of = [fails for _, fails in kept]
    scores = {name: [numbers[name] for numbers, _ in kept] for name in (SLOPE, LOGIT, GRAD, RATE)}
    rates = scores[RATE]
    within = {name: auroc(scores[name], fails_of, rates, fewest) for name in scores if name != RATE}
    overall = {name: auroc(values, fails_of, None, fewest) for name, values in scores.items()}
    nothing = math.nan, math.nan, math.nan
    beyond = {
        name: auroc_difference(scores[SLOPE], scores[name], fails_of, None if name == RATE else rates)
        if not math.isnan((overall if name == RATE else within)[SLOPE].value)
        else nothing
        for name in (LOGIT, GRAD, RATE)
    }
    return Prediction(within, overall, beyond, early, unfinished, unmeasured)
