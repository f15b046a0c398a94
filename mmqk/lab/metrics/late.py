"""Late failure: a run improves for at least half of the steps before it fails.

A fork includes the losses of its parent up to the step of the fork, if the parent was loaded with it.
"""

from __future__ import annotations

import math

import numpy as np

from mmqk.lab.metrics.losses import trained_modalities
from mmqk.lab.metrics.metric import planned_steps
from mmqk.lab.metrics.stability import divergence_step
from mmqk.lab.runs.load import Run, Series

WINDOW_STEPS = 500
ABOVE_OWN_BEST_NATS = 0.1
# A loss that is high only in the last window may recover.
FEWEST_WINDOWS_ABOVE = 2
LATE_SHARE = 0.5


def window_means(run: Run, modality: str) -> Series:
    """Return (last step, mean training loss) of each complete window of 500 steps. Steps at which this loss was not
    measured do not count in the mean."""
    steps, values = run.history(f"loss/{modality}")
    windows = (steps - 1) // WINDOW_STEPS
    complete = [w for w in np.unique(windows) if w >= 0 and (w + 1) * WINDOW_STEPS <= run.last_step]
    means = [float(values[windows == w].mean()) for w in complete]
    return np.array([(w + 1) * WINDOW_STEPS for w in complete], dtype=np.int64), np.array(means)


def rise_step(run: Run, modality: str | None = None) -> int | None:
    """Return the step at which the loss of the modality rose for good; None if it did not. Without a modality, this
    is the earliest step of all trained modalities.

    A window of 500 steps is high if its mean loss is more than 0.1 nat above the lowest mean of the earlier windows.
    A loss rose for good if the run ends with two or more high windows in a row. The step is the last one of the first
    of these windows.
    """
    candidates = []
    for name in _measured(run, modality):
        steps, means = window_means(run, name)
        if not len(means):
            continue
        best = np.minimum.accumulate(means)
        above = means > best + ABOVE_OWN_BEST_NATS
        trailing = int(np.argmin(above[::-1]))  # above[0] is always False
        if trailing >= FEWEST_WINDOWS_ABOVE:
            candidates.append(int(steps[-trailing]))
    return min(candidates, default=None)


def failure_step(run: Run) -> int | None:
    """Return the step at which the run failed: it diverged (`divergence_step`) or a loss rose for good (`rise_step`),
    whichever is earlier; None if neither happened."""
    return min((s for s in (divergence_step(run), rise_step(run)) if s is not None), default=None)


def late_failure(run: Run, modality: str | None = None) -> float:
    """Return 1 if the run failed (`failure_step`) and had improved for at least half of the steps before the failure,
    else 0.

    The improvement ends with the window of 500 steps that has the lowest mean loss before the failure; with several
    trained modalities, the earliest of these windows counts. NaN if the run did not fail but was stopped early.
    """
    return _late(run, failure_step(run))


def late_rise(run: Run, modality: str | None = None) -> float:
    """Return 1 if the loss of the modality (without a modality, any trained loss) rose for good (`rise_step`) or a
    value was not finite, and the loss had improved for at least half of the steps before, else 0; as in
    `late_failure`.

    NaN if a divergence of a finite loss or something else stopped the run: it might have recovered.
    """
    step = rise_step(run, modality)
    if step is None and run.status.status == "diverged":
        series = [run.series(tag)[1][-1:] for tag in ("grad_norm", *(f"loss/{m}" for m in trained_modalities(run)))]
        if not run.setting("alarm.stop_diverged", True) or not np.isfinite(np.concatenate(series)).all():
            step = run.status.step
    return _late(run, step, modality)


def _measured(run: Run, modality: str | None) -> tuple[str, ...]:
    return (modality,) if modality else trained_modalities(run)


def _late(run: Run, step: int | None, modality: str | None = None) -> float:
    if step is None:
        return 0.0 if run.status.status == "completed" else math.nan
    best = []
    for name in _measured(run, modality):
        steps, means = window_means(run, name)
        before = means[steps <= step]
        best.append(int(steps[int(np.nanargmin(before))]) if np.isfinite(before).any() else 0)
    return float(min(best, default=0) >= LATE_SHARE * step)


def time_of_failure(run: Run, modality: str | None = None) -> float:
    """Return `failure_step` as a share of the configured run length; 1 for a run that completed without failure.

    The mean over runs is the restricted mean time to failure. NaN if the run did not fail but was stopped early.
    """
    step = failure_step(run)
    if step is not None:
        return step / planned_steps(run) if planned_steps(run) else math.nan
    return 1.0 if run.status.status == "completed" else math.nan
