"""Numbers of a family over learning rates and other axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mmqk.analysis.metrics.losses import final_loss, has_floor, initial_loss, trained_modalities, weight_of
from mmqk.analysis.metrics.metric import Measured
from mmqk.analysis.metrics.stability import divergence_step
from mmqk.analysis.runs.load import Run

LR = "optim.lr"
UNSTABLE_NATS = 0.1


def learning_rate(run: Run) -> float:
    """The peak learning rate of a run, NaN where it is not recorded."""
    return axis_value(run, LR)


def axis_value(run: Run, axis: str) -> float:
    """A number of the run's point or configuration, NaN where it is none."""
    value = run.point.get(axis, run.setting(axis))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


@dataclass(frozen=True)
class Ended:
    """Where a run came from and where it ended, in nats a token.

    Attributes:
        rate: its learning rate.
        final: the loss at the end, infinite if it diverged.
        initial: the loss at initialisation.
        diverged: whether it did.
    """

    rate: float
    final: float
    initial: float
    diverged: bool


def ends(runs: Sequence[Run], modality: str | None = None) -> tuple[list[Ended], str]:
    """The runs of a family by rising learning rate, or why they cannot be compared.

    The loss is the held-out one, its excess over the floor where every run has one; without a modality, the mean
    over the modalities that are trained, by their weights in the loss.
    """
    trained = {(modality,) if modality else trained_modalities(run) for run in runs}
    if len(trained) > 1:
        return [], "the runs train different modalities: name one"
    names = trained.pop() if trained else ()
    if not names:
        return [], "the runs have no loss by modality"
    series = "excess" if all(has_floor(run, m) for run in runs for m in names) else "loss"
    found, held_out = [], set()
    for run in runs:
        diverged = divergence_step(run) is not None
        rate, total = learning_rate(run), sum(weight_of(run, m) for m in names)
        if math.isnan(rate):
            return [], f"{run.name} has no learning rate"
        if not diverged and run.status.status != "completed":
            return [], f"{run.name} has not finished"
        last = [final_loss(run, m, series) for m in names]
        if not diverged:
            held_out |= {end.held_out for end in last}
        final = (
            math.inf
            if diverged
            else sum(weight_of(run, m) * end.value for m, end in zip(names, last, strict=True))
        )
        first = sum(weight_of(run, m) * initial_loss(run, m, series) for m in names)
        if total <= 0 or math.isnan(final) or math.isnan(first):
            return [], f"{run.name} has no {series} of {' and '.join(names)} at its end or at initialisation"
        found.append(Ended(rate, final / total, first / total, diverged))
    found.sort(key=lambda end: end.rate)
    rates = [end.rate for end in found]
    if len(held_out) > 1:
        return [], "the last loss is held-out in some runs and of training steps in others"
    if len(set(rates)) < len(rates):
        twice = next(rate for rate in rates if rates.count(rate) > 1)
        return [], f"several runs have the learning rate {twice:g}: give those of one point of the other axes"
    if len(rates) < 2:
        return [], "one learning rate says nothing about others"
    return found, ""


def lr_sensitivity(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """Mean over the learning rates of ``min(loss, loss at initialisation) - lowest loss of the grid``.

    Wortsman et al. (arXiv 2309.14322, section 2.2), every learning rate with the same weight. Infinite where no run
    ended below its loss at initialisation: the formula gives 0 then, which looks like a perfect arm.
    """
    found, why = ends(runs, modality)
    if why:
        return Measured(math.nan, why)
    clipped = [min(end.final, end.initial) for end in found]
    if all(end.final >= end.initial for end in found):
        return Measured(math.inf, "no run ended below its loss at initialisation: ranked worst", 1)
    lowest = min(clipped)
    return Measured(sum(loss - lowest for loss in clipped) / len(clipped))


def first_diverging_lr(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """The lowest learning rate at which the run diverged (`divergence_step`).

    Where none did, the learning rate that would come next in the grid, as a bound (`Measured.towards` is 1).
    """
    found, why = ends(runs, modality)
    return Measured(math.nan, why) if why else _first(found, lambda end: end.diverged)


def first_unstable_lr(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """The lowest learning rate at which the run diverged or, above the best one, ended 0.1 nat above its loss.

    Small models stall more than they diverge; below the best learning rate, a loss that ended higher was learnt more
    slowly. Where no learning rate is unstable, as `first_diverging_lr`.
    """
    found, why = ends(runs, modality)
    if why:
        return Measured(math.nan, why)
    best = min(found, key=lambda end: end.final)
    return _first(
        found,
        lambda end: end.diverged or (end.rate > best.rate and end.final > best.final + UNSTABLE_NATS),
    )


def _first(found: Sequence[Ended], unstable: Callable[[Ended], bool]) -> Measured:
    for end in found:
        if unstable(end):
            return Measured(end.rate)
    highest, before = found[-1].rate, found[-2].rate
    return Measured(
        highest * highest / before,
        f"no learning rate up to {highest:g} was unstable: the next one of the grid stands in, as a bound",
        1,
    )


@dataclass(frozen=True)
class DoseResponse:
    """How a metric follows an axis.

    Attributes:
        axis: the dotted field.
        doses: its values, rising.
        responses: the metric at each, on the metric's scale.
        slope: of least squares, per unit of the axis; NaN with a response that is not finite.
        monotonicity: Kendall's tau-b, from -1 (falls everywhere) to 1 (rises everywhere); a response that is
            not finite ranks worst.
        why: why one of them is NaN.
    """

    axis: str = ""
    doses: tuple[float, ...] = ()
    responses: tuple[float, ...] = ()
    slope: float = math.nan
    monotonicity: float = math.nan
    why: str = ""


FEWEST_DOSES = 3


def dose_response(runs: Sequence[Run], measure: Callable[[Run], float], axis: str = "") -> DoseResponse:
    """The response of a number of a run to an axis of its family, at one seed.

    Args:
        runs: at least three, one at each value of the axis.
        measure: the number on the scale to be fitted: infinite where it ranks worst, NaN where it was not
            measured.
        axis: the dotted field; where left out, the one axis of their points.
    """
    varied = sorted({name for run in runs for name in run.point})
    if not axis:
        if len(varied) != 1:
            return DoseResponse(why=f"the axes are {', '.join(varied) or 'none'}: name the one to follow")
        axis = varied[0]
    doses = [axis_value(run, axis) for run in runs]
    if any(math.isnan(dose) for dose in doses):
        missing = next(run.name for run, dose in zip(runs, doses, strict=True) if math.isnan(dose))
        return DoseResponse(axis, why=f"{axis} is not a number in {missing}")
    if len(set(doses)) < len(doses):
        return DoseResponse(
            axis, why=f"several runs have the same {axis}: give those of one point of other axes"
        )
    if len(doses) < FEWEST_DOSES:
        return DoseResponse(
            axis, why=f"{len(doses)} values of {axis} show no course: {FEWEST_DOSES} are needed"
        )
    pairs = sorted((dose, measure(run), run.name) for dose, run in zip(doses, runs, strict=True))
    for _, response, name in pairs:
        if math.isnan(response):
            return DoseResponse(axis, why=f"{name} has no value of the metric")
    x, y = np.array([dose for dose, _, _ in pairs]), np.array([response for _, response, _ in pairs])
    tau, why = float(stats.kendalltau(x, y).statistic), ""
    slope = math.nan
    if np.isfinite(y).all():
        slope = float(stats.linregress(x, y).slope)
    else:
        why = "a response is not finite: it has a rank and no slope"
    return DoseResponse(axis, tuple(x.tolist()), tuple(y.tolist()), slope, tau, why)
