"""Rules over series with one value per step: spikes of loss and gradient norm, and stalled losses."""

from __future__ import annotations

import math

from mmqk.store.alarms.alarm import Alarm
from mmqk.store.alarms.rule import Rule
from mmqk.store.alarms.window import RunningMoments, Window
from mmqk.store.formatting import plain

# Spike score of OLMo 2 (arXiv 2501.00656, section 3): values at least 7 standard deviations above the rolling mean
# of the last 1000 values. The paper does not define the standard deviation; here it is computed over these 1000
# values.
SPIKE_WINDOW = 1000
SPIKE_STDS = 7.0
# Number of values that are needed before a spike can be reported (no published source).
SPIKE_FEWEST = 100

# Spike rate of Qwen (arXiv 2608.30320, section 3.3): the loss exceeds its 201-step rolling median by more than 0.1.
MEDIAN_WINDOW = 201
ABOVE_MEDIAN_NATS = 0.1
# Second threshold, in standard deviations, because the losses of a healthy run may scatter by more than 0.1 nat. The
# larger threshold applies (no published source).
ABOVE_MEDIAN_STDS = 6.0

# A run that improves by less than 0.05 nat in a fifth of its length has stalled (no published source).
STALL_MEDIAN = 50
STALL_SHARE = 0.2
STALL_FEWEST_STEPS = 200
STALL_STEPS_OPEN_END = 1000
STALL_NATS = 0.05
# A loss at most this far above its floor is not stalled. The divergence rule also uses 0.1 nat.
STALL_ABOVE_NATS = 0.1


class Spike(Rule):
    """Rule: a value is at least 7 standard deviations above the mean of the last 1000 values before it (OLMo 2).

    The standard deviation is the sample standard deviation of these 1000 values. The rule needs at least 100 values
    that are not all equal. Values that are not finite are skipped.
    """

    STATE = ("window", "on")

    def __init__(self) -> None:
        self.window = RunningMoments(SPIKE_WINDOW)

    def update(self, step: int, tag: str, value: float) -> Alarm | None:
        """Add a value; return an alarm if a spike begins."""
        if not math.isfinite(value):
            return None
        mean, std, count = 0.0, 0.0, len(self.window)
        if count >= SPIKE_FEWEST:
            mean, std = self.window.mean, self.window.std
        self.window.push(value)
        threshold = mean + SPIKE_STDS * std
        if not self.begins(std > 1e-9 * abs(mean) and value >= threshold):
            return None
        sentence = (
            f"{tag} {plain(value, 4)} is {(value - mean) / std:.1f} standard deviations above the mean"
            f" {plain(mean, 4)} of the last {count} steps"
        )
        return Alarm("spike", step, tag, value, threshold, sentence)


class SpikeOfMedian(Rule):
    """Rule: a loss is more than 0.1 nat above the median of the last 201 losses, itself included (Qwen).

    The rule needs a full window. The window ends at the newest value, whereas that of `spike_rate` is centered. If 6
    standard deviations, estimated from the quartiles of the window, are more than 0.1 nat, they are the threshold (no
    published source). With small batches, Qwen's threshold would raise an alarm at every fifth step.
    """

    STATE = ("window", "on")

    def __init__(self) -> None:
        self.window = Window(MEDIAN_WINDOW)

    def update(self, step: int, tag: str, value: float) -> Alarm | None:
        """Add a value; return an alarm if a spike begins."""
        if not math.isfinite(value):
            return None
        self.window.push(value)
        if not self.window.full:
            return None
        median = self.window.median
        above = max(ABOVE_MEDIAN_NATS, ABOVE_MEDIAN_STDS * self.window.spread)
        if not self.begins(value > median + above):
            return None
        sentence = (
            f"{tag} {plain(value, 4)} is {value - median:.2f} above the median {plain(median, 4)} of the last"
            f" {MEDIAN_WINDOW} steps"
        )
        return Alarm("spike_median", step, tag, value, median + above, sentence)


class Stall(Rule):
    """Rule: a loss no longer improves, and is still above a ceiling that any learning model falls below.

    An alarm begins if the median of the last 50 values is above a ceiling and has not fallen by 0.05 nat during the
    last N steps. N is a fifth of the run, at least 200, and 1000 in a run without a set length. Steps of the warm-up
    do not count.

    The ceiling is an excess loss of 0.1 nat if the floor is known. Otherwise it is the modality's unigram loss minus
    0.1 nat, because a model reaches the unigram loss without using the context. A constant loss below its ceiling
    counts as converged. Without a ceiling there is no alarm.
    """

    STATE = ("window", "level", "since", "on")

    def __init__(self, warmup_steps: int, max_steps: int):
        self.warmup_steps = warmup_steps
        self.patience = (
            max(STALL_FEWEST_STEPS, round(STALL_SHARE * max_steps)) if max_steps else STALL_STEPS_OPEN_END
        )
        self.window = Window(STALL_MEDIAN)
        self.level: float | None = None
        self.since = 0

    def update(self, step: int, tag: str, value: float, ceiling: float | None) -> Alarm | None:
        """Add a value and its ceiling; return an alarm if a stall begins."""
        if not math.isfinite(value):
            return None
        self.window.push(value)
        if step <= self.warmup_steps or not self.window.full:
            return None
        median = self.window.median
        if self.level is None or median < self.level - STALL_NATS:
            self.level, self.since, self.on = median, step, False
        if self.on or ceiling is None or median <= ceiling or step - self.since < self.patience:
            return None
        self.on = True
        sentence = (
            f"{tag} {median:.2f} has improved by less than {STALL_NATS} nat since step {self.since} and is still"
            f" above the {ceiling:.2f} that a learning model reaches"
        )
        return Alarm("stall", step, tag, median, ceiling, sentence)
