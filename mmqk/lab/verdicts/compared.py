"""The metric of the arms that a claim compares, by seed and on the metric's scale; failed runs rank worst."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mmqk.lab.grid.claims import Claim
from mmqk.lab.metrics import FamilyMetric, Measured, Metric, find_metric, is_trained
from mmqk.lab.metrics.outcomes import divergence_step, failure_step
from mmqk.lab.runs import Run, once_per_run
from mmqk.lab.verdicts.study import Study, StudyArm


@dataclass(frozen=True)
class Group:
    """The runs of an arm or family that a claim names.

    Attributes:
        name: the name in the claim.
        label: the name on the page.
        arms: the arm, or the arms of the family.
        runs: finished verdict runs by seed; an arm has one run per seed.
        planned: number of planned runs.
    """

    name: str
    label: str
    arms: tuple[StudyArm, ...]
    runs: Mapping[int, tuple[Run, ...]]
    planned: int

    @property
    def all(self) -> tuple[Run, ...]:
        """All runs of the group, sorted by seed."""
        return tuple(run for seed in sorted(self.runs) for run in self.runs[seed])

    @property
    def seeds(self) -> int:
        """The number of planned seeds per arm; the largest number if the arms differ."""
        return max((len(arm.seeds) for arm in self.arms), default=0)


@dataclass
class Outcomes:
    """The values of a metric in the compared groups.

    Attributes:
        values: values on the metric's scale, by group and seed; a failed run has the worst finite value of all
            groups.
        raw: the measured values by group.
        bounds: for each value that is a bound, by group and seed: 1 if the true value is higher, -1 if it is lower.
        unmeasured: the runs without a value, with the reason if it is known.
    """

    values: dict[str, dict[int, float]] = field(default_factory=dict)
    raw: dict[str, list[float]] = field(default_factory=dict)
    bounds: dict[str, dict[int, int]] = field(default_factory=dict)
    unmeasured: list[str] = field(default_factory=list)

    def measured(self, name: str) -> list[float]:
        """Return the values of a group that are not bounds; the spread uses only these."""
        bounds = self.bounds.get(name, {})
        return [value for seed, value in self.values[name].items() if seed not in bounds]


def group(study: Study, claim: Claim, name: str) -> Group:
    """Return the group that a claim calls ``name``."""
    arms = study.arms_of(name, claim.at)
    by_seed: dict[int, tuple[Run, ...]] = {}
    for arm in arms:
        for run in study.finished(arm.name):
            by_seed[run.seed] = (*by_seed.get(run.seed, ()), run)
    return Group(name, study.label(name), arms, by_seed, sum(len(arm.seeds) for arm in arms))


@dataclass(frozen=True)
class Compared:
    """The groups that a claim compares, by name."""

    study: Study
    claim: Claim
    groups: Mapping[str, Group]

    @property
    def runs(self) -> list[Run]:
        """The runs of all groups."""
        return [run for members in self.groups.values() for run in members.all]

    @property
    def arms(self) -> list[StudyArm]:
        """The arms of all groups."""
        return [arm for members in self.groups.values() for arm in members.arms]

    @property
    def pair(self) -> tuple[Group, Group]:
        """The treatment and the control."""
        return self.groups[self.claim.treatment], self.groups[self.claim.control]


def compare(study: Study, claim: Claim) -> Compared:
    """Return the groups that a claim compares."""
    return Compared(study, claim, {name: group(study, claim, name) for name in claim.compared})


def share_history(treatment: Group, control: Group) -> bool:
    """Return whether the runs of each seed are equal until a fork: forks of one checkpoint, or a fork and its
    parent."""
    both = [
        (treatment.runs[seed], control.runs[seed]) for seed in treatment.runs.keys() & control.runs.keys()
    ]
    return bool(both) and all(len(a) == len(b) == 1 and _forked(a[0], b[0]) for a, b in both)


def _forked(a: Run, b: Run) -> bool:
    if a.fork and b.fork:
        return a.fork == b.fork
    fork, parent = (a.fork or b.fork or {}), (b if a.fork else a)
    return fork.get("parent") == parent.name


@once_per_run
def metric_value(run: Run, name: str) -> float:
    """Return a metric of a run."""
    metric, modality = find_metric(name)
    assert isinstance(metric, Metric)
    return metric.measure(run, modality)


def measure(groups: Mapping[str, Group], name: str) -> Outcomes:
    """Return the metric ``name`` for every group and seed."""
    metric, modality = find_metric(name)
    outcomes = Outcomes()
    observed: list[float] = []
    for key, members in groups.items():
        outcomes.values[key], outcomes.raw[key] = {}, []
        for seed, runs in sorted(members.runs.items()):
            if isinstance(metric, FamilyMetric):
                measured = metric.measured(runs, modality, [arm.point for arm in members.arms])
            else:
                measured = Measured(metric_value(runs[0], name))
            value = metric.on_scale(measured.value)
            outcomes.raw[key].append(measured.value)
            towards = measured.towards or _bound(metric, runs, measured.value)
            if towards:
                outcomes.bounds.setdefault(key, {})[seed] = towards
                observed.append(value)
                if isinstance(metric, Metric):
                    observed.append(metric.on_scale(metric.worst_seen(runs[0], modality)))
            elif math.isnan(value):
                why = f" ({measured.why})" if measured.why else ""
                outcomes.unmeasured.append(f"“{members.label}” seed {seed}{why}")
            else:
                outcomes.values[key][seed] = value
    observed += [value for by_seed in outcomes.values.values() for value in by_seed.values()]
    finite = [value for value in observed if math.isfinite(value)]
    if not finite:
        return outcomes
    for key, bounds in outcomes.bounds.items():
        for seed, towards in bounds.items():
            outcomes.values[key][seed] = max(finite) if towards > 0 else min(finite)
    return outcomes


def _bound(metric: Metric | FamilyMetric, runs: Iterable[Run], value: float) -> int:
    """Return 1 if the true value is higher than the value that replaces it, -1 if lower, 0 if it was measured."""
    if math.isinf(value):
        return 1 if value > 0 else -1
    if isinstance(metric, FamilyMetric) or metric.counts_failures:
        return 0
    failed = any(run.status.status == "diverged" for run in runs)
    return 0 if not failed else 1 if metric.worst == "high" else -1


def spread_outcomes(compared: Compared, outcomes: Outcomes) -> dict[str, list[float]]:
    """Return the outcomes from which the spread over seeds is computed: the outcomes of the compared groups and of
    all other arms of the same block at the same point.

    An arm that does not train the modality of the metric is left out. Of several arms whose runs are identical until
    a fork, only the first is used.
    """
    study, claim = compared.study, compared.claim
    by_name = {name: outcomes.measured(name) for name in compared.groups}
    counted = {*compared.groups, *(arm.name for arm in compared.arms)}
    treatment = compared.pair[0].arms[0]
    metric, modality = find_metric(claim.metric)
    if isinstance(metric, FamilyMetric):
        others = list(study.families.values())
    else:
        others = [arm for arm in study.arms.values() if arm.point == treatment.point]
    origins_used = {_origin(run) for run in compared.runs}
    for name in (arm.name for arm in others if arm.block == treatment.block and arm.name not in counted):
        other = group(study, claim, name)
        origins = {_origin(run) for run in other.all}
        trained = not modality or all(is_trained(run, modality) for run in other.all)
        if other.arms and trained and not origins & origins_used:
            origins_used |= origins
            by_name[name] = measure({name: other}, claim.metric).measured(name)
    return by_name


def _origin(run: Run) -> str:
    """Return the name of the run at the start of a chain of forks; for a run that is not a fork, its own name."""
    while run.parent is not None:
        run = run.parent
    return str((run.fork or {}).get("parent") or run.name)


def middle(values: Iterable[float]) -> float:
    """Return the median of the values that are not NaN; NaN if all of them are."""
    numbers = [value for value in values if not math.isnan(value)]
    return statistics.median(numbers) if numbers else math.nan


# Metrics that measure the time of an event, and the functions that return the step of the event.
EVENTS: dict[str, Callable[[Run], int | None]] = {
    "time_of_failure": failure_step,
    "time_of_divergence": divergence_step,
}


def times_to_failure(runs: Iterable[Run], metric: str) -> tuple[list[float], list[bool]]:
    """Return, for each run, the step of the event (the last step if there was none), and whether the event
    happened."""
    steps = [(EVENTS[metric](run), run.last_step) for run in runs]
    return [float(last if step is None else step) for step, last in steps], [step is not None for step, _ in steps]
