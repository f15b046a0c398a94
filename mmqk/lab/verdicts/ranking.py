"""The best learning rate of each arm, and the ranking of arms that each add one remedy to a control.

Runs with the role "selection" choose the learning rate, and no verdict uses them. Two equal arms can choose different
learning rates by chance, and most metrics depend on the learning rate: a verdict would then depend on chance. So arms
at different learning rates are compared only if the selection runs show that their best learning rates differ.

``report.ranking`` of the grid names the controls of the ranking, arms without a remedy. With several controls, an arm
is compared with the control that has the same attention backend. A ranking is exploratory: with many arms and few
seeds, some arms rank high by chance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmqk.lab.metrics import (
    FAMILY_METRICS,
    METRICS,
    FamilyMetric,
    Metric,
    find_metric,
    metric_value,
    trained_modalities,
)
from mmqk.lab.metrics.families import learning_rate
from mmqk.lab.runs import Run, once_per_run
from mmqk.lab.stats.effects import Effect, Spread, paired_effect, pooled_spread, quantile_t
from mmqk.lab.verdicts.study import RATE_METRIC, Study, StudyArm
from mmqk.store import UserError

# Probability that the test declares two equally good learning rates different, in total over all pairs of learning
# rates that two arms may choose.
ERROR = 0.01
# Metrics that need a modality; named without one, they are averaged over the trained modalities.
_AVERAGED = ("final_loss", "final_excess")


@dataclass(frozen=True)
class BestRate:
    """The chosen learning rate of an arm.

    Attributes:
        rate: the best learning rate.
        means: mean of the metric over seeds, by learning rate; if a run diverged, inf or -inf, whichever is worse.
        values: the metric of each seed, by learning rate.
        high_is_bad: whether a higher value of the metric is worse.
    """

    rate: float
    means: Mapping[float, float]
    values: Mapping[float, tuple[float, ...]]
    high_is_bad: bool

    @property
    def at_edge(self) -> bool:
        """Whether the best learning rate is the lowest or highest one that was tried."""
        return self.rate in (min(self.means), max(self.means))

    def loss(self, rate: float) -> float:
        """Return how much worse a learning rate is than the best; infinite if it was not tried or a run diverged."""
        bad = self.means.get(rate, math.inf if self.high_is_bad else -math.inf)
        return (bad - self.means[self.rate]) * (1 if self.high_is_bad else -1)


@once_per_run
def value_of(run: Run, metric: str) -> float:
    """Return the value of ``metric`` in one run, to select a learning rate.

    If the run diverged or has no finite value, the value is inf or -inf, whichever is worse. Final loss and final
    excess without a modality are averaged over the trained modalities.
    """
    worst = math.inf if selection_metric(metric).worst == "high" else -math.inf
    names = [f"{metric}/{m}" for m in trained_modalities(run)] if metric in _AVERAGED else [metric]
    value = float(np.mean([metric_value(run, name) for name in names])) if names else math.nan
    return worst if run.status.status == "diverged" or not math.isfinite(value) else value


def selection_metric(name: str) -> Metric:
    """Return the metric that selects a learning rate.

    Raises:
        UserError: the metric is unknown, needs a modality, or is computed from several runs.
    """
    needs_modality = name in METRICS and METRICS[name].by_modality
    if needs_modality and name not in _AVERAGED:
        raise UserError(f"lr.metric is {name}, which needs a modality: write for example {name}/text")
    metric, _ = find_metric(f"{name}/text" if needs_modality else name)
    if isinstance(metric, FamilyMetric):
        raise UserError(f"lr.metric is {name}, which needs several runs: name a metric of a single run")
    return metric


def choose(runs: Sequence[Run], metric: str = RATE_METRIC) -> BestRate | None:
    """Return the learning rate with the best mean over seeds, from the finished selection runs of one arm.

    Among learning rates with equal means, return the lowest; None if no mean is finite.
    """
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        if run.status.finished:
            by_rate.setdefault(learning_rate(run), []).append(value_of(run, metric))
    if not by_rate:
        return None
    high = selection_metric(metric).worst == "high"
    means = {rate: float(np.mean(by_rate[rate])) for rate in sorted(by_rate)}
    best = min(means, key=lambda rate: means[rate] if high else -means[rate])
    if not math.isfinite(means[best]):
        return None
    return BestRate(best, means, {rate: tuple(by_rate[rate]) for rate in means}, high)


def distinguishable(first: BestRate, second: BestRate, verdict_values: Sequence[Sequence[float]]) -> bool:
    """Return whether the selection runs show that the best learning rates of two arms differ.

    If the arms exchanged their learning rates, the metric of each would get worse by `BestRate.loss`. The test
    compares the sum of the two losses with its standard error. The spread over seeds is pooled over the selection
    runs and ``verdict_values``.

    Args:
        first: the choice of one arm.
        second: the choice of the other arm.
        verdict_values: for each arm, the values of the selection metric in its verdict runs.
    """
    if first.rate == second.rate:
        return True
    loss = first.loss(second.rate) + second.loss(first.rate)
    cells = [np.array(v) for c in (first, second) for v in c.values.values()]
    cells += [np.array(v) for v in verdict_values]
    cells = [cell[np.isfinite(cell)] for cell in cells]
    df = sum(len(cell) - 1 for cell in cells if len(cell) > 1)
    if not df:
        return False
    variance = sum(float(((cell - cell.mean()) ** 2).sum()) for cell in cells if len(cell) > 1) / df
    used = [len(c.values.get(rate, ())) for c in (first, second) for rate in (first.rate, second.rate)]
    if not all(used):
        return False
    error = math.sqrt(variance * sum(1 / n for n in used))
    rates = len(first.means.keys() | second.means.keys())
    return loss > quantile_t(1 - ERROR / (rates * (rates - 1)), df) * error


def metric_of(study: Study, arm: StudyArm) -> str:
    """Return the metric that chose the learning rate of an arm."""
    return study.rate_metrics.get(arm.name) or study.rate_metrics.get("") or RATE_METRIC


def chosen(study: Study, arm: StudyArm) -> BestRate | None:
    """Return the learning rate that the selection runs of an arm choose; None if none has finished."""
    return choose(study.selection(arm), metric_of(study, arm))


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
    controls = {_backend(study, study.arms[name]): name for name in study.named("ranking") if name in study.arms}
    logit = METRICS["largest_attention_logit"]
    # By arm and seed: the final loss, and the logarithm of the largest logit.
    losses = {name: {r.seed: value_of(r, metric_of(study, arm)) for r in study.finished(name)}
              for name, arm in study.arms.items()}  # fmt: skip
    logits = {name: {r.seed: logit.on_scale(logit.measure(r, None)) for r in study.finished(name)}
              for name in study.arms}  # fmt: skip
    choices = {name: choice for name, arm in study.arms.items() if (choice := chosen(study, arm)) and losses[name]}
    spreads = [
        pooled_spread({name: list(filter(math.isfinite, values[name].values())) for name in choices})
        for values in (losses, logits)
    ]
    rows: list[Ranked] = []
    control_rows: list[Ranked] = []
    unfinished: list[str] = []
    for name, arm in study.arms.items():
        control = controls.get(_backend(study, arm), "")
        if name not in choices or control not in choices:
            unfinished.append(name)
            continue
        is_control = name == control
        difference, logit_ratio = (
            None if is_control else _effect(values[name], values[control], spread)
            for values, spread in zip((losses, logits), spreads, strict=True)
        )
        limit = choices[control].means[choices[control].rate] + TRAINS_NATS
        row = Ranked(
            arm=name,
            control=control,
            rate=choices[name].rate,
            at_edge=choices[name].at_edge,
            loss=float(np.mean(list(losses[name].values()))),
            difference=difference,
            logit=math.exp(float(np.mean(list(logits[name].values())))),
            logit_ratio=logit_ratio,
            **_measured(study, arm, None if is_control else study.arms[control], limit),
        )
        (control_rows if is_control else rows).append(row)
    if not rows:
        return None
    rows.sort(key=lambda row: (row.difference.value if row.difference else math.inf, row.sensitivity))
    return Ranking(tuple(rows), tuple(control_rows), tuple(unfinished), pareto_front(rows))


def _measured(study: Study, arm: StudyArm, control: StudyArm | None, limit: float) -> dict[str, Any]:
    """Return the fields of `Ranked` that need the runs of the arm, and of its control if it has one. An arm trains at
    a learning rate if no loss exceeds ``limit``."""
    verdict, selection = study.finished(arm.name), _selection(study, arm)
    runs, metric = [*verdict, *selection], metric_of(study, arm)
    against = [*study.finished(control.name), *_selection(study, control)] if control else []
    rates = sorted({learning_rate(run) for run in selection})
    trains = {
        rate: all(value_of(run, metric) <= limit for run in selection if learning_rate(run) == rate) for rate in rates
    }
    return {
        "seeds": len(verdict),
        "trains": trains,
        "sensitivity": _sensitivity(selection),
        "growth": {m: _growth(verdict, m) for m in study.modalities},
        "failed": sum(run.status.status == "diverged" for run in runs),
        "runs": len(runs),
        "time": time_ratio(runs, against) if control else None,
        "parameters": _parameters(verdict, against) if control else None,
    }


def _selection(study: Study, arm: StudyArm) -> list[Run]:
    return [run for run in study.selection(arm) if run.status.finished]


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
    measure, seeds = FAMILY_METRICS["lr_sensitivity"].measure, sorted({run.seed for run in runs})
    return float(np.mean([measure([r for r in runs if r.seed == seed]) for seed in seeds]))


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
