"""Times to failure of the runs of a claim or an arm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from mmqk.lab.formatting import listed
from mmqk.lab.metrics import trained_modalities
from mmqk.lab.metrics.late import failure_step
from mmqk.lab.metrics.stability import divergence_step
from mmqk.lab.runs.load import Run
from mmqk.lab.stats.survival import log_rank
from mmqk.lab.verdicts.compared import Compared

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
    """Return sentences for a claim about the time of an event (`EVENTS`): the number of failed runs of each arm, the
    p-value of the log-rank test, and what the interval leaves out; empty for other claims. The test needs all
    planned runs, because a run that fails finishes first."""
    claim = compared.claim
    if claim.metric not in EVENTS or claim.test != "superiority" or not claim.decided:
        return []
    groups = [times_to_failure(group.all, claim.metric) for group in compared.pair]
    complete = all(len(group.all) == group.planned for group in compared.pair)
    p = log_rank(*groups[0], *groups[1]) if complete else math.nan
    counts = [
        f"{sum(failed)} of {len(failed)} in {group.label}"
        for group, (_, failed) in zip(compared.pair, groups, strict=True)
    ]
    test = f"; log-rank test of equal survival: p = {p:.2g}" if not math.isnan(p) else ""
    sentences = [f"Failed runs: {listed(counts)}{test}. A run without a failure has the time 1."]
    sentences += [
        f"No run of “{group.label}” failed, so its spread is 0, and the interval ignores the uncertainty of this arm."
        for group, (_, failed) in zip(compared.pair, groups, strict=True)
        if not any(failed)
    ]
    trained = [{m for run in group.all for m in trained_modalities(run)} for group in compared.pair]
    sentences += [
        f"“{group.label}” does not train the {listed(sorted(missing))} loss, so its runs cannot fail through it."
        for group, missing in zip(compared.pair, (trained[1] - trained[0], trained[0] - trained[1]), strict=True)
        if missing
    ]
    return sentences
