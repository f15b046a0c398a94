"""Metrics of a family over learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


def first_unstable_lr(runs: Sequence[Run], modality: str | None = None) -> Measured:
    """Return the lowest unstable learning rate.

    A learning rate is unstable if the run diverged, or if it exceeds the best learning rate and its final loss
    exceeds the lowest final loss by more than 0.1 nat. A higher loss counts, because small models stall more often
    than they diverge. It does not count below the best learning rate, where it means slower learning. If no learning
    rate is unstable, the result is a bound: the learning rate that would come next if the grid were continued.
    """
    ended_runs, why = ends(runs, modality)
    if why:
        return Measured(math.nan, why)
    best = min(ended_runs, key=lambda end: end.final)
    for end in ended_runs:
        if end.diverged or (end.rate > best.rate and end.final > best.final + UNSTABLE_NATS):
            return Measured(end.rate)
    highest, before = ended_runs[-1].rate, ended_runs[-2].rate
    why = f"no run up to the learning rate {highest:g} was unstable: the bound is the next learning rate"
    return Measured(highest * highest / before, why, 1)
