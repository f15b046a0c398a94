"""Initial, best and final losses of a run, in nats per token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mmqk.lab.runs import Run, Series

LOSS_WINDOW = 50
LEARNED_NATS = 0.1
# Modalities of each kind of sequence in data.mix; the other kinds (dial, tokens) can have any modalities.
MODALITIES_OF = {
    "pair": ("text", "image"),
    "text": ("text",),
    "image": ("image",),
    "interleaved": ("text", "image"),
}


@dataclass(frozen=True)
class FinalLoss:
    """A loss at the end of a run, in nats per token.

    Attributes:
        value: infinite if the last loss was not finite, NaN if none was measured.
        held_out: whether it is the held-out loss at the last step; if not, the mean of the last 50 training losses.
    """

    value: float
    held_out: bool


def final_loss(run: Run, modality: str, series: str = "loss") -> FinalLoss:
    """Return the final loss of a modality: the held-out loss if the run completed and measured this loss at its last
    step, otherwise the mean of the last 50 training losses.

    With ``series`` "excess", return the excess loss.
    """
    steps, values = run.series(f"val_{series}/{modality}")
    if len(steps) and 0 < steps[-1] == run.status.step and run.status.status == "completed":
        return FinalLoss(math.inf if math.isnan(values[-1]) else float(values[-1]), True)
    training = run.series(f"{series}/{modality}")[1][-LOSS_WINDOW:]
    if not len(training):
        return FinalLoss(math.nan, False)
    return FinalLoss(float(np.where(np.isnan(training), math.inf, training).mean()), False)


def log_z_series(run: Run, modality: str | None = None) -> Series:
    """Return the mean log Z of the output softmax on held-out data at each evaluation, in nats."""
    return run.series(f"val_log_z/{modality}")


def final_log_z(run: Run, modality: str | None = None) -> float:
    """Return the last value of `log_z_series`; infinite if that value is not finite, NaN if there is none."""
    values = log_z_series(run, modality)[1]
    return math.nan if not len(values) else float(values[-1]) if math.isfinite(values[-1]) else math.inf


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
    training = run.series(f"loss/{modality}")[1]
    training = training[np.isfinite(training)]
    window = min(LOSS_WINDOW, len(training))
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
