"""Times to failure of the runs of a claim or an arm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from mmqk.analysis.formatting import listed
from mmqk.analysis.metrics.late import failure_step
from mmqk.analysis.metrics.stability import divergence_step
from mmqk.analysis.runs.load import Run
from mmqk.analysis.stats.survival import log_rank
from mmqk.analysis.verdicts.compared import Compared

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


def about_survival(compared: Compared) -> list[str]:
    """Return a sentence with the number of failed runs of each arm and the p-value of the log-rank test, for a claim
    about the time of an event (`EVENTS`); empty for other claims."""
    claim = compared.claim
    if claim.metric not in EVENTS or claim.test != "superiority" or not claim.decided:
        return []
    groups = [times_to_failure(group.all, claim.metric) for group in compared.pair]
    p = log_rank(*groups[0], *groups[1])
    counts = [
        f"{sum(failed)} of {len(failed)} in {group.label}"
        for group, (_, failed) in zip(compared.pair, groups, strict=True)
    ]
    test = f"; log-rank test of equal survival: p = {p:.2g}" if not math.isnan(p) else ""
    return [f"Failed runs: {listed(counts)}{test}."]
