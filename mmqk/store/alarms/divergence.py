"""Whether a run has diverged, from the loss of each modality."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from mmqk.store.alarms.alarm import Alarm
from mmqk.store.tags import tag

# All ours.
WINDOW = 50
ABOVE_INITIAL_NATS = 0.1
ABOVE_BEST_NATS = 0.5


class _Series:
    """What the rule remembers of one modality's loss."""

    def __init__(self) -> None:
        self.initial: float | None = None
        self.above = 0
        self.best: float | None = None
        self.window: deque[float] = deque(maxlen=WINDOW)


class DivergenceRule:
    """Whether a run has diverged, from the loss of each modality (nats a token, one value a step).

    Three ways to diverge, for any modality: the loss is not finite; it is more than 0.1 nat above its value
    at initialisation (the first one seen) for 50 consecutive steps after warm-up; the median of its last 50
    steps is more than 0.5 nat above the best such median of the run.

    A modality that a step does not have is left as it was. Give only modalities whose loss is trained: one
    that is switched off may rise without anything being wrong.

    Args:
        warmup_steps: steps of learning-rate warm-up, which the second way leaves out.
    """

    def __init__(self, warmup_steps: int):
        self.warmup_steps = warmup_steps
        self._series: dict[str, _Series] = {}

    def update(self, step: int, losses: Mapping[str, float]) -> str | None:
        """Take the losses of ``step``; the reason as a sentence if the run has diverged with it, or None."""
        found = self.alarms(step, losses)
        return found[0].sentence if found else None

    def alarms(self, step: int, losses: Mapping[str, float]) -> list[Alarm]:
        """Take the losses of ``step``; one alarm for each modality that has diverged with it."""
        found = []
        for modality, loss in losses.items():
            series = self._series.setdefault(modality, _Series())
            alarm = self._one(series, step, modality, float(loss))
            if alarm is not None:
                found.append(alarm)
        return found

    def _one(self, series: _Series, step: int, modality: str, loss: float) -> Alarm | None:
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
                f"{modality} loss {loss:.2f} was {ABOVE_INITIAL_NATS} nat above its initial {initial:.2f} for"
                f" {WINDOW} steps",
            )
        series.window.append(loss)
        if len(series.window) < WINDOW:
            return None
        median = statistics.median(series.window)
        series.best = median if series.best is None else min(series.best, median)
        if median > series.best + ABOVE_BEST_NATS:
            return alarm(
                median,
                series.best + ABOVE_BEST_NATS,
                f"{WINDOW}-step median {median:.2f} of the {modality} loss was {ABOVE_BEST_NATS} nat above "
                f"its best {series.best:.2f}",
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs, as plain data."""
        return {
            modality: {"initial": s.initial, "above": s.above, "best": s.best, "window": list(s.window)}
            for modality, s in self._series.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._series = {}
        for modality, saved in state.items():
            series = self._series[modality] = _Series()
            series.initial, series.above, series.best = saved["initial"], saved["above"], saved["best"]
            series.window.extend(saved["window"])
