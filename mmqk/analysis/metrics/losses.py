"""Losses of a run, in nats a token: where it began, how low it came, where it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mmqk.analysis.runs.load import Run

LOSS_WINDOW = 50
LEARNT_NATS = 0.1
# Modalities of each kind of sequence in data.mix; a kind that is not here (dial, tokens) names its own.
MODALITIES_OF = {
    "pair": ("text", "image"),
    "text": ("text",),
    "image": ("image",),
    "interleaved": ("text", "image"),
}


@dataclass(frozen=True)
class FinalLoss:
    """A loss at the end of a run, in nats a token.

    Attributes:
        value: infinite when it ended so, NaN when none was measured.
        held_out: on held-out data at the last step, or the mean of the last 50 training steps.
    """

    value: float
    held_out: bool


def final_loss(run: Run, modality: str, series: str = "loss") -> FinalLoss:
    """The loss of a modality at the end: held-out where the run completed and its last step measured it.

    With ``series`` "excess" it is the loss over that of a model that knows the source.
    """
    steps, values = run.series(f"val_{series}/{modality}")
    if len(steps) and 0 < steps[-1] == run.status.step and run.status.status == "completed":
        return FinalLoss(math.inf if math.isnan(values[-1]) else float(values[-1]), True)
    training = run.series(f"{series}/{modality}")[1][-LOSS_WINDOW:]
    if not len(training):
        return FinalLoss(math.nan, False)
    return FinalLoss(float(np.where(np.isnan(training), math.inf, training).mean()), False)


def initial_loss(run: Run, modality: str, series: str = "loss") -> float:
    """The loss (or "excess") of a modality at initialisation: held-out at step 0, or else the first training step."""
    steps, values = run.series(f"val_{series}/{modality}")
    if len(steps) and steps[0] == 0:
        return float(values[0])
    first = run.series(f"{series}/{modality}")[1][:1]
    return float(first[0]) if len(first) else math.nan


def unigram_entropy(run: Run, modality: str) -> float:
    """What token frequencies and the form of a sequence give, on held-out data; NaN when not measured."""
    values = run.series(f"val_unigram/{modality}")[1][:1]
    return float(values[0]) if len(values) else math.nan


def best_loss(run: Run, modality: str) -> float:
    """The lowest loss of the run, held-out after step 0 or a 50-step training mean: what it ever reached."""
    steps, held_out = run.series(f"val_loss/{modality}")
    training = run.series(f"loss/{modality}")[1]
    training = training[np.isfinite(training)]
    window = min(LOSS_WINDOW, len(training))
    means = np.convolve(training, np.ones(window) / window, mode="valid") if window else training
    seen = np.concatenate([held_out[(steps > 0) & np.isfinite(held_out)], means])
    return float(seen.min()) if len(seen) else math.nan


def learnt(run: Run, modality: str) -> bool:
    """Whether the run ever got 0.1 nat below what token frequencies and the form of a sequence give, or,
    where that was not measured, below the loss at initialisation."""
    floor = unigram_entropy(run, modality)
    if math.isnan(floor):
        floor = initial_loss(run, modality)
    return best_loss(run, modality) < floor - LEARNT_NATS


def is_trained(run: Run, modality: str) -> bool:
    """Whether the run trains this modality: it has a loss, the data mix holds it, its weight is above 0.

    The special tokens around an image belong to the text, but an image alone does not train it. Modalities of the
    dial and of token folders are whatever they were named, so that the loss alone tells.
    """
    if not len(run.series(f"loss/{modality}")[0]):
        return False
    mix = run.setting("data.mix")
    if isinstance(mix, Mapping):
        kinds = [kind for kind, share in mix.items() if share > 0]
        if not any(modality in MODALITIES_OF.get(kind, (modality,)) for kind in kinds):
            return False
    weight = run.setting(f"loss.weights.{modality}", 1.0)
    return not isinstance(weight, int | float) or weight > 0


def trained_modalities(run: Run) -> tuple[str, ...]:
    """Modalities that the run trains (`is_trained`), text first."""
    names = {tag.modality for tag in run.tags.values() if tag.statistic == "loss" and tag.modality}
    return tuple(sorted((m for m in names if is_trained(run, m)), key=lambda m: (m != "text", m)))


def has_floor(run: Run, modality: str) -> bool:
    """Whether the entropy of its data is known, so that there is an excess over it."""
    return bool(len(run.series(f"excess/{modality}")[0]) or len(run.series(f"val_excess/{modality}")[0]))


def weight_of(run: Run, modality: str) -> float:
    """Weight of a modality's loss."""
    weight = run.setting(f"loss.weights.{modality}", 1.0)
    return float(weight) if isinstance(weight, int | float) else 1.0
