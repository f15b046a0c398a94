"""Losses of a run in nats per token, and how it ended.

A run diverged if it has the alarm `divergence`. A lasting rise of a loss is a failure too. A fork includes the losses
of its parent up to the step of the fork, if the parent was loaded with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmqk.lab.runs import Run, Series

LOSS_WINDOW = 50
LEARNED_NATS = 0.1
FEWEST_EVALUATIONS = 3
# Modalities of each kind of sequence in data.mix; the other kinds (dial, tokens) can have any modalities.
MODALITIES_OF = {"pair": ("text", "image"), "text": ("text",), "image": ("image",), "interleaved": ("text", "image")}


class FinalLoss(NamedTuple):
    """A loss at the end of a run, in nats per token.

    Attributes:
        value: infinite if the last loss was not finite, NaN if none was measured.
        held_out: whether it is the held-out loss at the last step; if not, the mean training loss of the last 50
            steps.
    """

    value: float
    held_out: bool


def final_loss(run: Run, modality: str, series: str = "loss") -> FinalLoss:
    """Return the final loss of a modality: the held-out loss if the run completed and measured this loss at its last
    step, otherwise the mean training loss of the last 50 steps.

    With ``series`` "excess", return the excess loss.
    """
    steps, values = run.series(f"val_{series}/{modality}")
    if len(steps) and 0 < steps[-1] == run.status.step and run.status.status == "completed":
        return FinalLoss(math.inf if math.isnan(values[-1]) else float(values[-1]), True)
    at, losses = run.series(f"{series}/{modality}")
    if not len(losses):
        return FinalLoss(math.nan, False)
    training = losses[-_values_of(at) :]
    return FinalLoss(float(np.where(np.isnan(training), math.inf, training).mean()), False)


def _values_of(steps: NDArray[np.int64]) -> int:
    """Return how many values of a series are of `LOSS_WINDOW` steps; at least 1. A thin pack has one value for several
    steps."""
    return max(1, LOSS_WINDOW // int(np.median(np.diff(steps)))) if len(steps) > 1 else 1


def log_z_series(run: Run, modality: str | None = None) -> Series:
    """Return the mean log Z of the output softmax on held-out data at each evaluation, in nats."""
    return run.series(f"val_log_z/{modality}")


def final_log_z(run: Run, modality: str | None = None) -> float:
    """Return the last value of `log_z_series`; infinite if that value is not finite, NaN if there is none."""
    values = log_z_series(run, modality)[1]
    return math.nan if not len(values) else float(values[-1]) if math.isfinite(values[-1]) else math.inf


def loss_rise(run: Run, modality: str | None = None) -> float:
    """Return how far the held-out loss ended above its lowest value, in nats; infinite if its last value is not
    finite, NaN with fewer than `FEWEST_EVALUATIONS` values after step 0."""
    steps, values = run.history(f"val_loss/{modality}")
    values = values[steps > 0]
    if len(values) < FEWEST_EVALUATIONS:
        return math.nan
    return float(values[-1] - np.nanmin(values)) if math.isfinite(values[-1]) else math.inf


def grad_norm(run: Run, modality: str | None = None) -> float:
    """Return the median gradient norm, before clipping, of the steps after warm-up; infinite if the last one is not
    finite, NaN if there is none."""
    steps, values = run.series("grad_norm")
    values = values[steps > run.warmup_steps]
    if not len(values):
        return math.nan
    return float(np.median(values)) if np.isfinite(values[-1]) else math.inf


def initial_loss(run: Run, modality: str, series: str = "loss") -> float:
    """Return the initial loss (or excess loss) of a modality: on held-out data at step 0, else at the first training
    step."""
    steps, values = run.series(f"val_{series}/{modality}")
    if len(steps) and steps[0] == 0:
        return float(values[0])
    first = run.series(f"{series}/{modality}")[1][:1]
    return float(first[0]) if len(first) else math.nan


def unigram_entropy(run: Run, modality: str) -> float:
    """Return the held-out loss of a model that knows only token frequencies and the places of special tokens; NaN
    if not measured."""
    values = run.series(f"val_unigram/{modality}")[1][:1]
    return float(values[0]) if len(values) else math.nan


def best_loss(run: Run, modality: str) -> float:
    """Return the lowest of the held-out losses after step 0 and of the means over 50 successive training steps."""
    steps, held_out = run.series(f"val_loss/{modality}")
    at, training = run.series(f"loss/{modality}")
    training = training[np.isfinite(training)]
    window = min(_values_of(at), len(training))
    means = np.convolve(training, np.ones(window) / window, mode="valid") if window else training
    losses = np.concatenate([held_out[(steps > 0) & np.isfinite(held_out)], means])
    return float(losses.min()) if len(losses) else math.nan


def learned(run: Run, modality: str) -> bool:
    """Return whether the best loss is more than 0.1 nat below the unigram loss (if not measured: below the initial
    loss)."""
    reference = unigram_entropy(run, modality)
    if math.isnan(reference):
        reference = initial_loss(run, modality)
    return best_loss(run, modality) < reference - LEARNED_NATS


def is_trained(run: Run, modality: str) -> bool:
    """Return whether the run trains this modality: the modality has a loss, a share of the data mix and a weight
    above 0.

    The special tokens around an image are text, but a mix of images alone does not train text. Sequences of the kinds
    dial and tokens can have any modalities, so a mix with one of these kinds counts as containing every modality.
    """
    if not len(run.series(f"loss/{modality}")[0]):
        return False
    mix = run.setting("data.mix")
    if mix is not None:
        kinds = [kind for kind, share in mix.items() if share > 0]
        if not any(modality in MODALITIES_OF.get(kind, (modality,)) for kind in kinds):
            return False
    return weight_of(run, modality) > 0


def trained_modalities(run: Run) -> tuple[str, ...]:
    """Return the modalities that the run trains (`is_trained`), text first."""
    names = {tag.modality for tag in run.tags.values() if tag.statistic == "loss" and tag.modality}
    return tuple(sorted((m for m in names if is_trained(run, m)), key=lambda m: (m != "text", m)))


def has_floor(run: Run, modality: str) -> bool:
    """Return whether the run has an excess loss, which needs the floor of the data."""
    return bool(len(run.series(f"excess/{modality}")[0]) or len(run.series(f"val_excess/{modality}")[0]))


def weight_of(run: Run, modality: str) -> float:
    """Return the weight of the loss of a modality; 1 by default."""
    return float(run.setting(f"loss.weights.{modality}", 1.0))


def divergence_step(run: Run) -> int | None:
    """Return the optimizer step at which the run diverged, None if it did not.

    This is the step of its first alarm `divergence` or the step at which it ended as diverged, whichever comes first.
    For a fork only the second step counts, because the rule of the alarm needs the losses of its parent.
    """
    steps = [] if run.fork else [alarm.step for alarm in run.alarms if alarm.name == "divergence"]
    if run.status.status == "diverged":
        steps.append(run.status.step)
    return min(steps, default=None)


def diverged(run: Run, modality: str | None = None) -> float:
    """Return 1 if the run diverged, 0 if it completed, NaN if it did neither."""
    if divergence_step(run) is not None:
        return 1.0
    return 0.0 if run.status.status == "completed" else math.nan


def time_of_failure(run: Run, modality: str | None = None) -> float:
    """Return `failure_step` as a share of the configured run length; 1 for a run that completed without failure.

    The mean over runs is the restricted mean time to failure. NaN if the run did not fail but was stopped early.
    """
    step = failure_step(run)
    if step is not None:
        return step / run.planned_steps if run.planned_steps else math.nan
    return 1.0 if run.status.status == "completed" else math.nan


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


STALLED_NATS = 0.1


@dataclass(frozen=True)
class Outcome:
    """How one run ended.

    Attributes:
        finished: whether the run completed or diverged; otherwise the other fields have no meaning.
        diverged: step of the divergence; None if the run did not diverge.
        above_best: final loss minus the final loss of the best run on the same data, in nats, by modality; infinite
            if the run diverged.
        unlearned: trained modalities that the run did not learn (`learned`).
    """

    finished: bool
    diverged: int | None
    above_best: dict[str, float]
    unlearned: tuple[str, ...]

    @property
    def kind(self) -> Literal["diverged", "stalled", "regime not reached", "well", "not finished"]:
        """The first outcome that applies, in this order: not finished, diverged, regime not reached, stalled,
        well."""
        if not self.finished:
            return "not finished"
        if self.diverged is not None:
            return "diverged"
        if self.unlearned:
            return "regime not reached"
        return "stalled" if self.stalled else "well"

    @property
    def stalled(self) -> tuple[str, ...]:
        """Modalities whose final loss is more than 0.1 nat above that of the best run on the same data."""
        return tuple(m for m, nats in self.above_best.items() if nats > STALLED_NATS)


def outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """Return the outcome of each run.

    Each run is compared with the best run on the same data, over all seeds, by the final held-out loss of each
    modality. If the floor is known, the excess loss is compared; it differs from the loss by a constant.
    """
    steps = [divergence_step(run) for run in runs]
    ends = [
        {
            m: final_loss(run, m, "excess" if has_floor(run, m) else "loss").value if step is None else math.inf
            for m in trained_modalities(run)
        }
        for run, step in zip(runs, steps, strict=True)
    ]
    of_data = [json.dumps(run.identity.get("data", run.setting("data")), sort_keys=True, default=str) for run in runs]
    best: dict[tuple[str, str], float] = {}
    for run, data, end in zip(runs, of_data, ends, strict=True):
        for modality, nats in end.items():
            if run.status.status == "completed" and math.isfinite(nats):
                best[data, modality] = min(nats, best.get((data, modality), math.inf))
    results = []
    for run, step, data, end in zip(runs, steps, of_data, ends, strict=True):
        above = {m: nats - best.get((data, m), math.nan) for m, nats in end.items()}
        unlearned = tuple(m for m in end if not learned(run, m))
        results.append(Outcome(step is not None or run.status.finished, step, above, unlearned))
    return results
