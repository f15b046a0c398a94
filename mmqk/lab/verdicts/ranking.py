"""Rank arms that each add one remedy to a control, an arm without a remedy.

``report.ranking`` of the grid names the controls. With several controls, an arm is compared with the control that has
the same attention backend. A ranking is exploratory: with many arms and few seeds, some arms rank high by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmqk.lab.metrics import METRICS
from mmqk.lab.metrics.families import learning_rate, lr_sensitivity
from mmqk.lab.runs import Run
from mmqk.lab.stats.effects import Effect, Spread, paired_effect, pooled_spread
from mmqk.lab.verdicts.learning_rates import BestRate, chosen, metric_of, value_of
from mmqk.lab.verdicts.study import Study, StudyArm

# An arm trains at a learning rate if all its runs at this learning rate end at most this many nats above the best
# mean loss of the control.
TRAINS_NATS = 0.25


@dataclass(frozen=True)
class Ranked:
    """One arm and its comparison with its control. Losses are means over the trained modalities, in nats per token.

    Attributes:
        arm: name of the arm.
        control: name of its control; for a control, its own name.
        seeds: number of finished runs at the chosen learning rate.
        rate: the chosen learning rate.
        at_edge: whether the chosen learning rate is the lowest or highest one that was tried.
        loss: mean final loss over seeds; infinite if a run diverged.
        difference: loss minus the control's loss over shared seeds; None for a control, or if no seed is shared.
        trains: for each learning rate that was tried, whether the arm trains at it (see `TRAINS_NATS`).
        sensitivity: learning-rate sensitivity of the selection runs (Wortsman et al., arXiv 2309.14322).
        logit: largest attention logit at the end, geometric mean over seeds.
        logit_ratio: logarithm of ``logit`` divided by the control's ``logit``.
        growth: ratio of the last-layer output norm at the end to its value at the start, by modality, geometric mean
            over seeds.
        failed: number of runs that diverged, at all learning rates.
        runs: number of finished runs, at all learning rates.
        time: logarithm of the time per step divided by the control's time per step; None if the machines differ
            (`time_ratio`).
        parameters: number of trained parameters minus the control's; None if the number is not recorded.
    """

    arm: str
    control: str
    seeds: int
    rate: float
    at_edge: bool
    loss: float
    difference: Effect | None
    trains: Mapping[float, bool]
    sensitivity: float
    logit: float
    logit_ratio: Effect | None
    growth: Mapping[str, float]
    failed: int
    runs: int
    time: Effect | None
    parameters: int | None


@dataclass(frozen=True)
class Ranking:
    """The ranked arms, best first, and the controls.

    Attributes:
        rows: the arms with a remedy, by ascending loss difference to their control.
        controls: the arms without a remedy.
        unfinished: names of the arms that are not ranked, because they or their controls lack finished runs.
        front: the arms of the Pareto front (`pareto_front`).
    """

    rows: tuple[Ranked, ...]
    controls: tuple[Ranked, ...]
    unfinished: tuple[str, ...] = ()
    front: frozenset[str] = field(default_factory=frozenset)


def ranking(study: Study) -> Ranking | None:
    """Return the ranking that the grid names; None if it names none or if no arm can be compared with a control."""
    named = study.named("ranking")
    controls = {_backend(study, study.arms[name]): name for name in named if name in study.arms}
    logit = METRICS["largest_attention_logit"]
    losses: dict[str, dict[int, float]] = {}  # the final loss, or the logarithm of the largest logit, by seed
    logits: dict[str, dict[int, float]] = {}
    for name, arm in study.arms.items():
        metric, runs = metric_of(study, arm), study.finished(name)
        losses[name] = {run.seed: value_of(run, metric) for run in runs}
        logits[name] = {run.seed: logit.on_scale(logit.measure(run, None)) for run in runs}
    choices = {arm.name: chosen(study, arm) for arm in study.arms.values()}
    measured = [name for name in study.arms if losses[name] and choices[name]]
    loss_spread, logit_spread = (
        pooled_spread({name: list(filter(math.isfinite, by_seed[name].values())) for name in measured})
        for by_seed in (losses, logits)
    )

    def ranked(arm: StudyArm, control: str, choice: BestRate, control_choice: BestRate) -> Ranked:
        verdict, selection = study.finished(arm.name), [r for r in study.selection(arm) if r.status.finished]
        other = study.arms[control]
        against = [*study.finished(control), *(r for r in study.selection(other) if r.status.finished)]
        metric, is_control = metric_of(study, arm), arm.name == control
        limit = control_choice.means[control_choice.rate] + TRAINS_NATS
        runs = [*verdict, *selection]
        return Ranked(
            arm=arm.name,
            control=control,
            seeds=len(verdict),
            rate=choice.rate,
            at_edge=choice.at_edge,
            loss=float(np.mean(list(losses[arm.name].values()))),
            difference=None if is_control else _effect(losses[arm.name], losses[control], loss_spread),
            trains={
                rate: all(value_of(r, metric) <= limit for r in selection if learning_rate(r) == rate)
                for rate in sorted({learning_rate(r) for r in selection})
            },
            sensitivity=_sensitivity(selection),
            logit=math.exp(float(np.mean(list(logits[arm.name].values())))),
            logit_ratio=None if is_control else _effect(logits[arm.name], logits[control], logit_spread),
            growth={m: _growth(verdict, m) for m in study.modalities},
            failed=sum(run.status.status == "diverged" for run in runs),
            runs=len(runs),
            time=None if is_control else time_ratio(runs, against),
            parameters=None if is_control else _parameters(verdict, against),
        )

    rows: list[Ranked] = []
    control_rows: list[Ranked] = []
    unfinished: list[str] = []
    for arm in study.arms.values():
        control = controls.get(_backend(study, arm), "")
        choice, control_choice = choices[arm.name], choices.get(control)
        if arm.name not in measured or control not in measured or choice is None or control_choice is None:
            unfinished.append(arm.name)
            continue
        (control_rows if arm.name == control else rows).append(ranked(arm, control, choice, control_choice))
    if not rows:
        return None
    rows.sort(key=lambda row: (row.difference.value if row.difference else math.inf, row.sensitivity))
    return Ranking(tuple(rows), tuple(control_rows), tuple(unfinished), pareto_front(rows))


def pareto_front(rows: Iterable[Ranked]) -> frozenset[str]:
    """Return the arms that no other arm dominates. An arm dominates another if neither its loss difference nor its
    sensitivity is higher and at least one of the two is lower."""
    points = {row.arm: (row.difference.value, row.sensitivity) for row in rows if row.difference}
    return frozenset(
        arm
        for arm, (x, y) in points.items()
        if math.isfinite(x)
        and math.isfinite(y)
        and not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())
    )


def _effect(treatment: Mapping[int, float], control: Mapping[int, float], spread: Spread | None) -> Effect | None:
    """Return `paired_effect`; if a run of the treatment diverged, the effect is infinite and has no interval. None if
    a run has no value or a run of the control diverged."""
    if any(map(math.isnan, treatment.values())) or not all(map(math.isfinite, control.values())):
        return None
    if not all(map(math.isfinite, treatment.values())):
        return Effect(math.inf, math.nan, len(treatment), 0.0, "two arms")
    return paired_effect(treatment, control, spread)


def _sensitivity(runs: Sequence[Run]) -> float:
    """Return the mean learning-rate sensitivity over the seeds of the selection runs."""
    seeds = sorted({run.seed for run in runs})
    return float(np.mean([lr_sensitivity([r for r in runs if r.seed == seed]).value for seed in seeds]))


def _growth(runs: Sequence[Run], modality: str) -> float:
    """Return the geometric mean over runs of the ratio of the last-layer output norm at the end to the norm at the
    start; infinite if the last value of a run is not finite."""
    logs = []
    for run in runs:
        _, values = METRICS["final_norm"].series(run, modality)
        if not len(values) or not values[0] > 0:
            return math.nan
        logs.append(math.log(values[-1] / values[0]) if np.isfinite(values[-1]) else math.inf)
    return math.exp(float(np.mean(logs))) if logs else math.nan


def time_ratio(runs: Sequence[Run], against: Sequence[Run]) -> Effect | None:
    """Return the logarithm of the time per step of ``runs`` divided by that of the runs ``against``.

    The time per step of a run is its median over the steps. None if a side has fewer than two runs, or if the
    machines differ. Machines count as equal if their system, processor type, number of cores and device agree,
    because a record does not name the machine.
    """
    places = {_place(run) for run in [*runs, *against]}
    if len(places) > 1:
        return None
    one, two = (dict(enumerate(filter(None, map(_log_time, side)))) for side in (runs, against))
    return paired_effect(one, two, None) if min(len(one), len(two)) > 1 else None


def _place(run: Run) -> str:
    return f"{run.details.get('machine')} {(run.details.get('device') or {}).get('name')}"


def _log_time(run: Run) -> float | None:
    _, speeds = run.series("tokens_per_s")
    return -math.log(float(np.median(speeds))) if len(speeds) else None


def _parameters(runs: Sequence[Run], against: Sequence[Run]) -> int | None:
    one, two = (
        next((n for run in side if isinstance(n := run.details.get("parameters"), int)), None)
        for side in (runs, against)
    )
    return None if one is None or two is None else one - two


def _backend(study: Study, arm: StudyArm) -> str:
    runs = [*study.finished(arm.name), *study.selection(arm)]
    return str(runs[0].setting("backend")) if runs else ""
