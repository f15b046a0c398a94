"""The order in which statistics of failing runs left the range of the healthy runs of the control arm."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mmqk.lab.metrics.departure import FEWEST_HEALTHY, PROBED, STEPPED, Departure, departures
from mmqk.lab.metrics.outcomes import failure_step
from mmqk.lab.runs import Run
from mmqk.lab.verdicts.assess import EVENTS
from mmqk.lab.verdicts.study import Study

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
        surviving: number of the runs in `FailureOrder.surviving` in which the statistic left the range, and number of
            those in which it could be compared.
        healthy: the same two numbers for the healthy runs, each compared with the others.
    """

    statistic: str
    modality: str
    layer: int | None
    steps: dict[str, int]
    before: dict[str, int]
    surviving: tuple[int, int]
    healthy: tuple[int, int]


@dataclass(frozen=True)
class FailureOrder:
    """The failing runs of an arm beside the healthy runs of its control.

    Attributes:
        treatment: name of the arm with failed runs.
        control: name of the arm with healthy runs.
        failing: failed runs of the treatment.
        surviving: runs without a failure, from all arms that claims about failures compare, except the control.
        others: failed runs of the other arms, which no row counts.
        healthy: runs of the control without a failure.
        rows: statistics, sorted by the number of failing runs in which they left the range, then by the number of
            steps before the failure.
    """

    treatment: str
    control: str
    failing: tuple[Run, ...]
    surviving: tuple[Run, ...]
    others: tuple[Run, ...]
    healthy: tuple[Run, ...]
    rows: tuple[OrderRow, ...]


def failure_order(study: Study) -> FailureOrder | None:
    """Return the order for the first claim about failures (`LATE`) with a failed run in one arm and at least 4
    healthy runs in the other; None if there is no such claim.
    """
    claims = [c for c in study.claims if c.metric in LATE and len(c.compared) == 2]
    pairs = [tuple(study.arms_of(name, c.at)[0].name for name in c.compared) for c in claims]
    arms = dict.fromkeys(arm for pair in pairs for arm in pair)
    failed = {run.name: failure_step(run) for arm in arms for run in study.finished(arm)}

    def runs(arm: str, fails: bool) -> tuple[Run, ...]:
        return tuple(run for run in study.finished(arm) if (failed[run.name] is not None) == fails)

    either_way = [order for pair in pairs for order in (pair, pair[::-1])]
    found = [(a, b) for a, b in either_way if runs(a, True) and len(runs(b, False)) > FEWEST_HEALTHY]
    if not found:
        return None
    treatment, control = found[0]
    failing, healthy = runs(treatment, True), runs(control, False)
    surviving = tuple(run for arm in arms if arm != control for run in runs(arm, False))
    others = tuple(run for arm in arms if arm != treatment for run in runs(arm, True))
    left = {run.name: departures(run, healthy) for run in (*failing, *surviving)}
    left |= {run.name: departures(run, [h for h in healthy if h is not run]) for run in healthy}
    rows = []
    for key in sorted({key for run in failing for key, found in left[run.name].items() if found}, key=_place):
        first = {run.name: departure for run in failing if (departure := left[run.name].get(key))}
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
    rows.sort(key=lambda row: (-len(row.steps), -statistics.median(row.before.values())))
    return FailureOrder(treatment, control, failing, surviving, others, healthy, tuple(rows))


def _place(key: tuple[str, str]) -> tuple[int, str]:
    return [*PROBED, *STEPPED].index(key[0]), key[1]


def _count(
    left: dict[str, dict[tuple[str, str], Departure | None]], key: tuple[str, str], runs: Iterable[Run]
) -> tuple[int, int]:
    found = [left[run.name][key] for run in runs if key in left[run.name]]
    return sum(one is not None for one in found), len(found)
