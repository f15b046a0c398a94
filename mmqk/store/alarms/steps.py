"""Rules over series with a value a step: spikes of loss and gradient norm, and a loss that has stalled."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mmqk.store.alarms.alarm import Alarm
from mmqk.store.alarms.window import RunningMoments, Window
from mmqk.store.formatting import plain

# Spike score of OLMo 2 (arXiv 2501.00656, section 3): values at least 7 standard deviations above the rolling mean
# of the last 1000 values. Which values the deviation is of is not said there: here the same ones (ours).
SPIKE_WINDOW = 1000
SPIKE_STDS = 7.0
# Ours: with fewer values nothing is a spike.
SPIKE_FEWEST = 100

# Spike rate of Qwen (arXiv 2608.30320, section 3.3): the loss exceeds its 201-step rolling median by more than 0.1.
MEDIAN_WINDOW = 201
ABOVE_MEDIAN_NATS = 0.1
# Ours: with batches so small that the loss of healthy steps scatters by 0.1 nat, a spike is this many deviations.
ABOVE_MEDIAN_STDS = 6.0

# Ours. A run that improves by less than 0.05 nat in a fifth of its length will not arrive.
STALL_MEDIAN = 50
STALL_SHARE = 0.2
STALL_FEWEST_STEPS = 200
STALL_STEPS_OPEN_END = 1000
STALL_NATS = 0.05
# As far above what it could know as counts for nothing (the rule of divergence has the same).
STALL_ABOVE_NATS = 0.1


class Spike:
    """A value at least 7 standard deviations above the mean of the last 1000 values before it (OLMo 2).

    The standard deviation is the sample one of the same values. It needs 100 of them, and some scatter: after
    values that are all equal there is no scale to judge by. Values that are not finite are left out.
    """

    def __init__(self) -> None:
        self.window = RunningMoments(SPIKE_WINDOW)
        self.on = False

    def update(self, step: int, tag: str, value: float) -> Alarm | None:
        """Take a value; an alarm where a spike begins."""
        if not math.isfinite(value):
            return None
        alarm, mean, std = None, 0.0, 0.0
        if len(self.window) >= SPIKE_FEWEST:
            mean, std = self.window.mean, self.window.std
        threshold = mean + SPIKE_STDS * std
        spikes = std > 1e-9 * abs(mean) and value >= threshold
        if spikes and not self.on:
            said = (
                f"{tag} {plain(value, 4)} is {(value - mean) / std:.1f} standard deviations above the mean"
                f" {plain(mean, 4)} of the last {len(self.window)} steps"
            )
            alarm = Alarm("spike", step, tag, value, threshold, said)
        self.on = spikes
        self.window.push(value)
        return alarm

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window.state_dict(), "on": self.on}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.window.load_state_dict(state["window"])
        self.on = state["on"]


class SpikeOfMedian:
    """A loss more than 0.1 nat above the median of its last 201 values, this one included (Qwen).

    Live the window can only trail; `spike_rate` centres it. It has to be full. Where healthy steps scatter by more
    than 0.1 nat the threshold is 6 deviations instead, by the window's quartiles (ours): with small batches the
    source's would ring at every fifth step.
    """

    def __init__(self) -> None:
        self.window = Window(MEDIAN_WINDOW)
        self.on = False

    def update(self, step: int, tag: str, value: float) -> Alarm | None:
        """Take a value; an alarm where a spike begins."""
        if not math.isfinite(value):
            return None
        self.window.push(value)
        if not self.window.full:
            return None
        median = self.window.median
        above = max(ABOVE_MEDIAN_NATS, ABOVE_MEDIAN_STDS * self.window.spread)
        began = value > median + above and not self.on
        self.on = value > median + above
        if not began:
            return None
        above_now = value - median
        said = (
            f"{tag} {plain(value, 4)} is {above_now:.2f} above the median {plain(median, 4)} of the last"
            f" {MEDIAN_WINDOW} steps"
        )
        return Alarm("spike_median", step, tag, value, median + above, said)

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window.state_dict(), "on": self.on}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.window.load_state_dict(state["window"])
        self.on = state["on"]


class Stall:
    """A loss that stays above what a model without context reaches, and no longer improves.

    The median of the last 50 values has not fallen by 0.05 nat in a fifth of the run (in 200 steps at least; in
    1000 where the run has no end), all after warm-up, and it lies above a ceiling: 0.1 nat of excess where the floor
    of the data is known, otherwise the unigram entropy of the modality less 0.1 nat, which takes no context to reach.
    A loss at rest below its ceiling has converged as far as anybody can tell. Without a ceiling there is no alarm.
    """

    def __init__(self, warmup_steps: int, max_steps: int):
        self.warmup_steps = warmup_steps
        self.patience = (
            max(STALL_FEWEST_STEPS, round(STALL_SHARE * max_steps)) if max_steps else STALL_STEPS_OPEN_END
        )
        self.window = Window(STALL_MEDIAN)
        self.level: float | None = None
        self.since = 0
        self.on = False

    def update(self, step: int, tag: str, value: float, ceiling: float | None) -> Alarm | None:
        """Take a value and what it should come below; an alarm where a stall begins."""
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
        said = (
            f"{tag} {median:.2f} has improved by less than {STALL_NATS} nat since step {self.since} and is still"
            f" above the {ceiling:.2f} that a model reaches which learns something"
        )
        return Alarm("stall", step, tag, median, ceiling, said)

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window.state_dict(), "level": self.level, "since": self.since, "on": self.on}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.window.load_state_dict(state["window"])
        self.level, self.since, self.on = state["level"], state["since"], state["on"]


def spike_score(values: Sequence[float]) -> float:
    """Spike score of OLMo 2: per cent of the values that are spikes (see `Spike`); nan without values to judge.

    The first `SPIKE_FEWEST` finite values are not judged and not counted (ours: the source does not state a shorter
    window than its 1000 values).
    """
    window, spikes, judged = RunningMoments(SPIKE_WINDOW), 0, 0
    for value in values:
        if not math.isfinite(value):
            continue
        if len(window) >= SPIKE_FEWEST:
            judged += 1
            spikes += window.std > 0 and value >= window.mean + SPIKE_STDS * window.std
        window.push(value)
    return 100 * spikes / judged if judged else math.nan


def spike_rate(losses: Sequence[float]) -> float:
    """Spike rate of Qwen: steps more than 0.1 above a centred 201-step median, per 10,000 steps; nan without any.

    Its threshold is the source's alone: on losses of small batches it counts noise.
    """
    half = MEDIAN_WINDOW // 2
    finite = [value for value in losses if math.isfinite(value)]
    inner = range(half, len(finite) - half)
    spikes = sum(
        finite[i] > statistics.median(finite[i - half : i + half + 1]) + ABOVE_MEDIAN_NATS for i in inner
    )
    return 1e4 * spikes / len(inner) if inner else math.nan
