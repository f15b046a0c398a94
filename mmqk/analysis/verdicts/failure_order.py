"""The order in which statistics of failing runs left the range of the healthy runs of the control arm."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mmqk.analysis.metrics.departure import FEWEST_HEALTHY, PROBED, STEPPED, Departure, departures
from mmqk.analysis.metrics.late import failure_step
from mmqk.analysis.runs.load import Run
from mmqk.analysis.verdicts.failures import EVENTS
from mmqk.analysis.verdicts.study import Study

LATE = ("late_failure", *EVENTS)


@dataclass(frozen=True)
class OrderRow:
    """One statistic of one modality.

    Attributes:
        statistic: name of the statistic.
        modality: modality of the tokens, or of the queries; empty if there is none.
        layer: the layer with the largest (smallest) value in most of the failing runs; None if there is no layer.
        steps: the step at which the statistic left the range, by name of the failing run; runs without an entry
            stayed inside.
        before: number of steps from leaving the range to the failure, by name of the failing run.
        surviving: number of the runs in `FailureOrder.surviving` in which the statistic left the range.
        healthy: number of healthy runs in which it left the range of the other healthy runs.
    """

    statistic: str
    modality: str
    layer: int | None
    steps: dict[str, int]
    before: dict[str, int]
    surviving: int
    healthy: int

    @property
    def step(self) -> float:
        """Median of ``steps`` over the failing runs in which the statistic left the range."""
        return statistics.median(self.steps.values())


@dataclass(frozen=True)
class FailureOrder:
    """The failing runs of an arm beside the healthy runs of its control.

    Attributes:
        treatment: name of the arm that fails.
        control: name of the control arm.
        failing: failed runs of the treatment.
        surviving: runs that did not fail, of all arms except the control that claims about failures compare.
        healthy: runs of the control without a failure.
        rows: statistics, sorted by the number of failing runs in which they left, then by the median step.
    """

    treatment: str
    control: str
    failing: tuple[Run, ...]
    surviving: tuple[Run, ...]
    healthy: tuple[Run, ...]
    rows: tuple[OrderRow, ...]


def failure_order(study: Study) -> FailureOrder | None:
    """Return the order for the first claim about failures (`LATE`) that compares two arms.

    None if there is no such claim, no run of its treatment failed, or its control has fewer than 4 healthy runs.
    """
    claims = [c for c in study.claims if c.metric in LATE and len(c.compared) == 2]
    if not claims:
        return None
    arms = list(dict.fromkeys(arm.name for c in claims for name in c.compared for arm in study.arms_of(name)))
    treatment, control = (study.arms_of(name)[0].name for name in claims[0].compared)
    failed = {run.name: failure_step(run) for arm in arms for run in study.finished(arm)}
    failing = tuple(run for run in study.finished(treatment) if failed[run.name] is not None)
    healthy = tuple(run for run in study.finished(control) if failed[run.name] is None)
    others = [arm for arm in arms if arm != control]
    surviving = tuple(run for arm in others for run in study.finished(arm) if failed[run.name] is None)
    if not failing or len(healthy) <= FEWEST_HEALTHY:
        return None
    left = {run.name: _by_key(departures(run, healthy)) for run in (*failing, *surviving)}
    left |= {run.name: _by_key(departures(run, [h for h in healthy if h is not run])) for run in healthy}
    rows = []
    for key in sorted({key for run in failing for key in left[run.name]}, key=_place):
        first = {run.name: left[run.name][key] for run in failing if key in left[run.name]}
        rows.append(
            OrderRow(
                *key,
                layer=Counter(d.layer for d in first.values()).most_common(1)[0][0],
                steps={name: d.step for name, d in first.items()},
                before={name: (failed[name] or 0) - d.step for name, d in first.items()},
                surviving=_count(left, key, surviving),
                healthy=_count(left, key, healthy),
            )
        )
    rows.sort(key=lambda row: (-len(row.steps), row.step))
    return FailureOrder(treatment, control, failing, surviving, healthy, tuple(rows))


def _by_key(left: Sequence[Departure]) -> dict[tuple[str, str], Departure]:
    return {(d.statistic, d.modality): d for d in left}


def _place(key: tuple[str, str]) -> tuple[int, str]:
    return [*PROBED, *STEPPED].index(key[0]), key[1]


def _count(left: dict[str, dict[tuple[str, str], Departure]], key: tuple[str, str], runs: Iterable[Run]) -> int:
    return sum(key in left[run.name] for run in runs)
