"""Two rules about the median of 50 losses: `DivergenceRule` ends a run, and `Rise` raises an alarm earlier."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any

from mmqk.store.metrics import parsed_tag, tag
from mmqk.store.rules import QUARTILES_TO_STD, Alarm, Rule, RuleOfEach

# Thresholds without a published source.
DIVERGENCE_WINDOW = 50
ABOVE_INITIAL_NATS = 0.1
ABOVE_BEST_NATS = 0.5

# Of the rules tried on the bench of failures (docs/bench.md), this one has no false alarm there. The bench alone
# would allow 2.1 standard errors; with 6, 7 of 150 series of 1,500 steps of noise around a constant have an alarm.
RISE_MEDIAN = 50
RISE_NOISE = 100
RISE_BACK = 200
RISE_ERRORS = 6.0


class Divergence(Rule):
    """Rule: the loss of a modality has diverged (`DivergenceRule` lists the conditions)."""

    STATE = ("initial", "above", "best", "window", "on")

    def __init__(self, warmup_steps: int):
        self.warmup_steps = warmup_steps
        self.initial: float | None = None
        self.best: float | None = None
        self.above = 0
        self.window: list[float] = []

    def update(self, step: int, tag: str, value: float, *more: Any) -> Alarm | None:
        """Add a loss; return an alarm if the divergence begins."""
        alarm = self.diverged(step, tag, value)
        return alarm if self.begins(alarm is not None) else None

    def diverged(self, step: int, tag: str, loss: float) -> Alarm | None:
        """Add a loss; return an alarm if the loss has diverged, now or earlier."""
        modality = parsed_tag(tag).modality

        def alarm(value: float, threshold: float, sentence: str) -> Alarm:
            return Alarm("divergence", step, tag, value, threshold, sentence)

        if not math.isfinite(loss):
            return alarm(loss, math.inf, f"{modality} loss became {loss}")
        if self.initial is None:
            self.initial = loss
        limit = self.initial + ABOVE_INITIAL_NATS
        if step > self.warmup_steps:
            self.above = self.above + 1 if loss > limit else 0
        if self.above >= DIVERGENCE_WINDOW:
            return alarm(
                loss,
                limit,
                f"{modality} loss {loss:.2f} was more than {ABOVE_INITIAL_NATS} nat above its initial"
                f" {self.initial:.2f} for {DIVERGENCE_WINDOW} steps",
            )
        self.window = [*self.window, loss][-DIVERGENCE_WINDOW:]
        if len(self.window) < DIVERGENCE_WINDOW:
            return None
        median = statistics.median(self.window)
        self.best = median if self.best is None else min(self.best, median)
        if median <= self.best + ABOVE_BEST_NATS:
            return None
        return alarm(
            median,
            self.best + ABOVE_BEST_NATS,
            f"{DIVERGENCE_WINDOW}-step median {median:.2f} of the {modality} loss was more than {ABOVE_BEST_NATS} nat"
            f" above its best {self.best:.2f}",
        )


class DivergenceRule(RuleOfEach[Divergence]):
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
        super().__init__(lambda: Divergence(warmup_steps))

    def reason(self, step: int, losses: Mapping[str, float]) -> str | None:
        """Add the losses of ``step``; return the reason as a sentence if the run has diverged, else None."""
        alarms = [self[name].diverged(step, tag("loss", name), float(loss)) for name, loss in losses.items()]
        return next((alarm.sentence for alarm in alarms if alarm is not None), None)


class Rise(Rule):
    """Rule: the median of the last 50 losses is more than 6 standard errors above the lowest of the last 200 medians.

    The standard error is that of a mean of 50 losses. It comes from the quartiles of the last 100 differences between
    successive losses, because a trend of the loss hardly changes these. Losses of the warm-up do not count.
    """

    STATE = ("window", "medians", "on")

    def __init__(self, warmup_steps: int):
        self.warmup_steps = warmup_steps
        self.window: list[float] = []
        self.medians: list[float] = []

    def update(self, step: int, tag: str, value: float, *more: Any) -> Alarm | None:
        """Add a loss; return an alarm if a rise begins."""
        if step <= self.warmup_steps or not math.isfinite(value):
            return None
        self.window = [*self.window, value][-RISE_NOISE - 1 :]
        if len(self.window) < RISE_MEDIAN:
            return None
        median = statistics.median(self.window[-RISE_MEDIAN:])
        self.medians = [*self.medians, median][-RISE_BACK:]
        lowest = min(self.medians)
        differences = sorted(b - a for a, b in itertools.pairwise(self.window))
        quarter = len(differences) // 4
        noise = (differences[-1 - quarter] - differences[quarter]) / QUARTILES_TO_STD
        threshold = lowest + RISE_ERRORS * noise / math.sqrt(RISE_MEDIAN)
        if not self.begins(median > threshold):
            return None
        sentence = (
            f"{RISE_MEDIAN}-step median {median:.3f} of {tag} is {median - lowest:.3f} nat above its lowest"
            f" {lowest:.3f}, more than the noise of the loss explains"
        )
        return Alarm("rise", step, tag, median, threshold, sentence)
