"""The rule that decides from the loss of each modality whether a run has diverged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mmqk.store.alarms.alarm import Alarm
from mmqk.store.tags import tag

# Thresholds without a published source.
WINDOW = 50
ABOVE_INITIAL_NATS = 0.1
ABOVE_BEST_NATS = 0.5


@dataclass
class _Series:
    """State of the rule for one modality's loss."""

    initial: float | None = None
    above: int = 0
    best: float | None = None
    window: list[float] = field(default_factory=list)


class DivergenceRule:
    """Decides from the loss of each modality (nats per token, one value per step) whether a run has diverged.

    A run has diverged if one of these conditions holds for any modality:

    - The loss is not finite.
    - The loss is more than 0.1 nat above its first value for 50 consecutive steps after warm-up.
    - The median loss of the last 50 steps is more than 0.5 nat above the lowest such median of the run.

    A step that has no loss of a modality does not change the modality's state. Pass only trained modalities,
    because an untrained loss may rise in a healthy run.

    Args:
        warmup_steps: steps of learning-rate warm-up, which the second condition skips.
    """

    def __init__(self, warmup_steps: int):
        self.warmup_steps = warmup_steps
        self._series: dict[str, _Series] = {}

    def update(self, step: int, losses: Mapping[str, float]) -> str | None:
        """Add the losses of ``step``; return the reason as a sentence if the run has diverged, else None."""
        alarms = self.alarms(step, losses)
        return alarms[0].sentence if alarms else None

    def alarms(self, step: int, losses: Mapping[str, float]) -> list[Alarm]:
        """Add the losses of ``step``; return one alarm for each modality that has diverged."""
        alarms = (self._one(step, modality, float(loss)) for modality, loss in losses.items())
        return [alarm for alarm in alarms if alarm is not None]

    def _one(self, step: int, modality: str, loss: float) -> Alarm | None:
        series = self._series.setdefault(modality, _Series())

        def alarm(value: float, threshold: float, sentence: str) -> Alarm:
            return Alarm("divergence", step, tag("loss", modality), value, threshold, sentence)

        if not math.isfinite(loss):
            return alarm(loss, math.inf, f"{modality} loss became {loss}")
        if series.initial is None:
            series.initial = loss
        initial = series.initial
        if step > self.warmup_steps:
            series.above = series.above + 1 if loss > initial + ABOVE_INITIAL_NATS else 0
        if series.above >= WINDOW:
            return alarm(
                loss,
                initial + ABOVE_INITIAL_NATS,
                f"{modality} loss {loss:.2f} was more than {ABOVE_INITIAL_NATS} nat above its initial {initial:.2f}"
                f" for {WINDOW} steps",
            )
        series.window = [*series.window, loss][-WINDOW:]
        if len(series.window) < WINDOW:
            return None
        median = statistics.median(series.window)
        series.best = median if series.best is None else min(series.best, median)
        if median > series.best + ABOVE_BEST_NATS:
            return alarm(
                median,
                series.best + ABOVE_BEST_NATS,
                f"{WINDOW}-step median {median:.2f} of the {modality} loss was more than {ABOVE_BEST_NATS} nat above "
                f"its best {series.best:.2f}",
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, as plain data."""
        return {modality: asdict(series) for modality, series in self._series.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._series = {modality: _Series(**saved) for modality, saved in state.items()}
