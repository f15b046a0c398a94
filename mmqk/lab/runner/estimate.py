"""Estimate the time of the unfinished runs from the finished ones."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from mmqk.lab.runner.task import Task, TaskOutcome
from mmqk.store import clock
from mmqk.store.formatting import plural


def time_left(outcomes: Mapping[Task, TaskOutcome], jobs: int) -> str:
    """Return a sentence with the estimated time to train the unfinished runs, if ``jobs`` runs train at the same
    time.

    The time per step is the median over the finished runs of the arm. If the arm has no finished run, it is the
    median over the finished runs of the family, or else over all finished runs of the grid. The time includes
    probes and validation, but not the startup. For a fork, only the steps after the fork count.
    """
    open_runs = [
        task for task, outcome in outcomes.items() if not outcome.finished and outcome.status != "never"
    ]
    if not open_runs:
        return "nothing to train"
    seconds = 0.0
    borrowed = 0
    for task in open_runs:
        pace = _pace(outcomes, task)
        if pace is None:
            return f"time to train {plural(len(open_runs), 'run')}: unknown, because no run of this grid has finished"
        of_step, of_family = pace
        seconds += of_step * max(0, task.max_steps - max(outcomes[task].step, task.first))
        borrowed += not of_family
    from_others = f" ({plural(borrowed, 'run')} estimated from the speed of other arms)" if borrowed else ""
    at_once = f", {jobs} at a time" if jobs > 1 else ""
    left = clock(seconds / min(jobs, len(open_runs)))
    return f"time to train {plural(len(open_runs), 'run')}{at_once}: about {left} (minutes:seconds){from_others}"


def _pace(outcomes: Mapping[Task, TaskOutcome], task: Task) -> tuple[float, bool] | None:
    """Return the seconds per step, and whether they were measured on runs of the task's own arm or family. Return
    None if no run has finished."""
    paces = [
        (t, o.seconds / (o.step - t.first))
        for t, o in outcomes.items()
        if o.finished and o.step > t.first and o.seconds > 0
    ]
    of_arm = [pace for t, pace in paces if t.arm == task.arm]
    family = task.entry.get("family", task.arm)
    of_family = of_arm or [pace for t, pace in paces if t.entry.get("family", t.arm) == family]
    alike = of_family or [pace for _, pace in paces]
    return (median(alike), bool(of_family)) if alike else None
