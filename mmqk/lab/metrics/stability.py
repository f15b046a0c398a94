"""Spikes and divergence, from the losses of a run.

The rules are those of `mmqk.store.alarms`, which training also applies.
"""

from __future__ import annotations

import math

import numpy as np

from mmqk.lab.metrics.losses import has_floor, trained_modalities
from mmqk.lab.metrics.metric import planned_steps, warmup_steps
from mmqk.lab.runs.load import Run
from mmqk.store import DivergenceRule
from mmqk.store.alarms.series import SPIKE_FEWEST, Spike


def spike_score(run: Run, modality: str | None = None) -> float:
    """Return the percentage of steps whose loss is a spike (OLMo 2, arXiv 2501.00656, section 3); without a modality,
    use the loss over all targets.

    A spike is at least 7 standard deviations above the mean of up to 1000 values before it. NaN with 100 steps or
    fewer: OLMo 2 gives no rule for fewer than 1000 values.
    """
    return _spike_score(run, _loss(modality))


def grad_norm_spike_score(run: Run, modality: str | None = None) -> float:
    """Return `spike_score` of the global gradient norm; NaN if a modality is given."""
    return math.nan if modality else _spike_score(run, "grad_norm")


def _spike_score(run: Run, name: str) -> float:
    rule, spikes, values = Spike(), 0, _finite(run, name).tolist()
    for value in values:
        rule.update(0, name, value)
        spikes += rule.on
    checked = len(values) - SPIKE_FEWEST
    return 100 * spikes / checked if checked > 0 else math.nan


def _finite(run: Run, name: str) -> np.ndarray:
    values = run.series(name)[1]
    return values[np.isfinite(values)]


def _loss(modality: str | None) -> str:
    return f"loss/{modality}" if modality else "loss"


def divergence_step(run: Run) -> int | None:
    """Return the optimizer step at which the run diverged, None if it did not.

    This is the first step at which `DivergenceRule` fires on the training excess loss of the trained modalities (on
    the loss if there is no floor), or the step at which the run ended as diverged, whichever comes first. For a fork
    only the second step counts, because the rule needs the losses of its parent.
    """
    if run.fork:
        return run.status.step if run.status.status == "diverged" else None
    rule, steps = DivergenceRule(warmup_steps(run)), []
    by_step: dict[int, dict[str, float]] = {}
    for modality in trained_modalities(run):
        name = "excess" if has_floor(run, modality) else "loss"
        at, values = run.series(f"{name}/{modality}")
        for step, value in zip(at.tolist(), values.tolist(), strict=True):
            by_step.setdefault(step, {})[modality] = value
    for step in sorted(by_step):
        if rule.update(step, by_step[step]) is not None:
            steps.append(step)
            break
    if run.status.status == "diverged":
        steps.append(run.status.step)
    return min(steps, default=None)


def diverged(run: Run, modality: str | None = None) -> float:
    """Return 1 if the run diverged, 0 if it completed, NaN if it did neither."""
    if divergence_step(run) is not None:
        return 1.0
    return 0.0 if run.status.status == "completed" else math.nan


def time_of_divergence(run: Run, modality: str | None = None) -> float:
    """Return `divergence_step` as a share of the configured run length; 1 for a run that completed without
    divergence.

    The mean over runs is the restricted mean time to divergence. NaN if the run did not diverge but was stopped
    early.
    """
    step = divergence_step(run)
    if step is not None:
        return step / planned_steps(run) if planned_steps(run) else math.nan
    return 1.0 if run.status.status == "completed" else math.nan

