"""Metrics of a family over learning rates and other axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mmqk.lab.metrics.losses import final_loss, has_floor, initial_loss, trained_modalities, weight_of
from mmqk.lab.metrics.metric import Measured
from mmqk.lab.metrics.stability import divergence_step
from mmqk.lab.runs.load import Run

RATE = "optim.lr"
UNSTABLE_NATS = 0.1


def learning_rate(run: Run) -> float:
    """Return the peak learning rate of a run; NaN if not recorded."""
    return axis_value(run, RATE)


def axis_value(run: Run, axis: str) -> float:
    """Return the value of a run on an axis, from its point or configuration; NaN if it is not a number."""
    value = run.point.get(axis, run.setting(axis))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


@dataclass(frozen=True)
class Ended:
    """Initial and final loss of a run, in nats per token.

    Attributes:
        rate: learning rate of the run.
        final: final loss; infinite if the run diverged.
        initial: loss at initialization.
        diverged: whether the run diverged.
    """

    rate: float
    final: float
    initial: float
    diverged: bool


def ends(runs: Sequence[Run], modality: str | None = None) -> tuple[list[Ended], str]:
    """Return the losses of a family's runs by ascending learning rate, and why they cannot be compared (empty if they
    can).

    The loss is the held-out loss, or the excess loss if every run has a floor. If ``modality`` is None, the loss is
    the mean over the trained modalities, weighted as in the training loss.
    """
    trained = {(modality,) if modality else trained_modalities(run) for run in runs}
    if len(trained) > 1:
        return [], "the runs train different modalities: name one modality"
    names = trained.pop() if trained else ()
    if not names:
        return [], "the runs have no loss by modality"
    series = "excess" if all(has_floor(run, m) for run in runs for m in names) else "loss"
    ended_runs, held_out = [], set()
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
            return [], f"{run.name} has no {series} of {' and '.join(names)} at its end or at initialization"
        ended_runs.append(Ended(rate, final / total, first / total, diverged))
    ended_runs.sort(key=lambda end: end.rate)
    rates = [end.rate for end in ended_runs]
    if len(held_out) > 1:
        return [], "the final loss is on held-out data in some runs and on training data in others"
    if len(set(rates)) < len(rates):
        twice = next(rate for rate in rates if rates.count(rate) > 1)
        return (
            [],
            f"several runs have the learning rate {twice:g}: give the runs of one point of the other axes",
        )
    if len(rates) < 2:
        return [], "there is one learning rate: at least 2 are needed"
    return ended_runs, ""


def lr_sensitivity(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """Return the mean over the learning rates of ``min(loss, loss at initialization) - lowest loss of the grid``.

    This is the metric of Wortsman et al. (arXiv 2309.14322, section 2.2), with equal weight for every learning rate.
    Infinite if no run ended below its loss at initialization: the formula would give 0, the best value of this
    metric.
    """
    ended_runs, why = ends(runs, modality)
    if why:
        return Measured(math.nan, why)
    clipped = [min(end.final, end.initial) for end in ended_runs]
    if all(end.final >= end.initial for end in ended_runs):
        return Measured(math.inf, "no run ended below its loss at initialization: ranked worst", 1)
    lowest = min(clipped)
    return Measured(sum(loss - lowest for loss in clipped) / len(clipped))


def first_diverging_lr(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """Return the lowest learning rate at which the run diverged (`divergence_step`).

    If no run diverged, the result is a bound (`Measured.towards` is 1): the learning rate that would come next if the
    grid were continued.
    """
    ended_runs, why = ends(runs, modality)
    return Measured(math.nan, why) if why else _first(ended_runs, "diverged", lambda end: end.diverged)


def first_unstable_lr(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """Return the lowest unstable learning rate.

    A learning rate is unstable if the run diverged, or if it exceeds the best learning rate and its final loss
    exceeds the lowest final loss by more than 0.1 nat. A higher loss counts, because small models stall more often
    than they diverge. It does not count below the best learning rate, where it means slower learning. If no learning
    rate is unstable, the result is the bound of `first_diverging_lr`.
    """
    ended_runs, why = ends(runs, modality)
    if why:
        return Measured(math.nan, why)
    best = min(ended_runs, key=lambda end: end.final)
    return _first(
        ended_runs,
        "was unstable",
        lambda end: end.diverged or (end.rate > best.rate and end.final > best.final + UNSTABLE_NATS),
    )


def _first(ended_runs: Sequence[Ended], failed: str, fails: Callable[[Ended], bool]) -> Measured:
    for end in ended_runs:
        if fails(end):
            return Measured(end.rate)
    highest, before = ended_runs[-1].rate, ended_runs[-2].rate
    return Measured(
        highest * highest / before,
        f"no run up to the learning rate {highest:g} {failed}: the bound is the learning rate that would come next",
        1,
    )


FEWEST_DOSES = 3


def dose_response(runs: Sequence[Run], measure: Callable[[Run], float], axis: str, slope: bool) -> Measured:
    """Return how a metric of the runs of a family at one seed depends on one axis.

    Args:
        runs: at least three, one per value of the axis.
        measure: returns the metric of a run on the scale of the fit; infinite if the run ranks worst, NaN if the
            metric was not measured.
        axis: the dotted field that varies; if empty, the only axis of the runs.
        slope: True for the least-squares slope per unit of the axis, which needs finite responses. False for
            Kendall's tau-b, from -1 (falls everywhere) to 1 (rises everywhere).
    """
    varied = sorted({name for run in runs for name in run.point})
    if not axis and len(varied) != 1:
        return Measured(math.nan, f"the axes are {', '.join(varied) or 'none'}: name one axis")
    axis = axis or varied[0]
    responses: dict[float, float] = {}
    for run in runs:
        dose, response = axis_value(run, axis), measure(run)
        if math.isnan(dose):
            return Measured(math.nan, f"{axis} is not a number in {run.name}")
        if dose in responses:
            why = f"several runs have the same {axis}: give the runs of one point of the other axes"
            return Measured(math.nan, why)
        if math.isnan(response):
            return Measured(math.nan, f"{run.name} has no value of the metric")
        responses[dose] = response
    if len(responses) < FEWEST_DOSES:
        why = f"{len(responses)} values of {axis} are too few for a response: {FEWEST_DOSES} are needed"
        return Measured(math.nan, why)
    x, y = (np.array(column) for column in zip(*sorted(responses.items()), strict=True))
    if not slope:
        if len(set(y)) == 1:
            return Measured(math.nan, "all responses are equal, so they have no order")
        return Measured(float(stats.kendalltau(x, y).statistic))
    if not np.isfinite(y).all():
        return Measured(math.nan, "a response is not finite, so there is no slope: use dose_monotonicity")
    return Measured(float(stats.linregress(x, y).slope))
