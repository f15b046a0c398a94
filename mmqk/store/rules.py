"""An alarm, and the rules that raise alarms over one series of a run.

`Spike` (OLMo 2), `SpikeOfMedian` (Qwen) and `Stall` read losses and the gradient norm, with one value per step;
`Growth` and `Collapse` read norms, attention logits and attention entropies, with one value per probe.
`DivergenceRule` reads the losses of all modalities and ends a run. The rules depend only on the logged numbers. Their
state is plain data, and results after a resume from this state are bit-identical.
"""

from __future__ import annotations

import copy
import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mmqk.store.formatting import plain
from mmqk.store.metrics import parse_tag, tag


@dataclass(frozen=True)
class Alarm:
    """An alarm: a series met the condition of a rule.

    Attributes:
        name: one of `NAMES`.
        step: optimizer step at which the alarm began; an alarm that continues is not repeated.
        tag: the series, with its modality and layer.
        value: the number that the rule compared: the value of the series, or a median of the series if the sentence
            names one.
        threshold: the limit that the value crossed.
        sentence: a description of the event.
    """

    name: str
    step: int
    tag: str
    value: float
    threshold: float
    sentence: str

    @property
    def where(self) -> str:
        """Return the modality and layer in words: ``image, layer 3``, ``text to image, layer 3``; an empty string for
        a series of the whole run."""
        parsed = parse_tag(self.tag)
        pair = parsed.pair
        modality = f"{pair[0]} to {pair[1]}" if pair else parsed.modality
        layer = None if parsed.layer is None else f"layer {parsed.layer}"
        head = None if parsed.head is None else f"head {parsed.head}"
        return ", ".join(part for part in (modality, layer, head) if part)

    def line(self) -> str:
        """Return the alarm as one line: ``step 120: growth: ...``."""
        return f"step {self.step}: {self.name}: {self.sentence}"


class Rule:
    """A rule over one series.

    Attributes:
        STATE: names of the attributes that form the state. Each is plain data, or an object with a `state_dict`.
        on: whether the condition held at the last value.
    """

    STATE: tuple[str, ...] = ("on",)
    on = False

    def begins(self, holds: bool) -> bool:
        """Return whether an alarm begins: the condition holds now and did not hold at the previous value."""
        began, self.on = holds and not self.on, holds
        return began

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, as plain data."""
        values = {name: getattr(self, name) for name in self.STATE}
        return {
            k: v.state_dict() if hasattr(v, "state_dict") else copy.deepcopy(v) for k, v in values.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        for name in self.STATE:
            if hasattr(value := getattr(self, name), "load_state_dict"):
                value.load_state_dict(state[name])
            else:
                setattr(self, name, copy.deepcopy(state[name]))


# Ratio of the interquartile range to the standard deviation of a normal distribution.
QUARTILES_TO_STD = 1.349


class Window:
    """The last ``size`` values, in order of arrival and in sorted order."""

    def __init__(self, size: int):
        self.size = size
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    @property
    def full(self) -> bool:
        return len(self._order) == self.size

    def push(self, value: float) -> None:
        if self.full:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(value)
        insort(self._sorted, value)

    def quantile(self, share: float) -> float:
        """Return the quantile, interpolated linearly."""
        at = share * (len(self._sorted) - 1)
        low = math.floor(at)
        high = min(low + 1, len(self._sorted) - 1)
        return self._sorted[low] + (at - low) * (self._sorted[high] - self._sorted[low])

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def spread(self) -> float:
        """Return the standard deviation, estimated from the quartiles, which a few outliers do not change."""
        return (self.quantile(0.75) - self.quantile(0.25)) / QUARTILES_TO_STD

    def state_dict(self) -> list[float]:
        return list(self._order)

    def load_state_dict(self, state: list[float]) -> None:
        self._order, self._sorted = deque(state), sorted(state)


# Recompute the sums if the square of the value that leaves the window is this many times the sum of the remaining
# squares, because subtracting the square then loses precision.
RECOMPUTE_ABOVE = 1e6


class RunningMoments:
    """Mean and sample standard deviation of the last ``size`` values.

    They are computed from running sums of the differences from a reference value, which is replaced at intervals.
    """

    def __init__(self, size: int):
        self.size = size
        self._values: deque[float] = deque()
        self._about = self._sum = self._squares = 0.0
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._values)

    def push(self, value: float) -> None:
        gone = 0.0
        if len(self._values) == self.size:
            gone = self._values.popleft() - self._about
            self._sum -= gone
            self._squares -= gone * gone
        self._values.append(value)
        self._sum += value - self._about
        self._squares += (value - self._about) ** 2
        self._pushed += 1
        # Recompute at intervals: rounding errors accumulate, and the series moves away from the reference value.
        due = self._pushed % self.size == 0 or self._pushed == 1
        if due or gone * gone > RECOMPUTE_ABOVE * self._squares:
            self._about = value
            apart = [v - value for v in self._values]
            self._sum, self._squares = math.fsum(apart), math.fsum(a * a for a in apart)

    @property
    def mean(self) -> float:
        return self._about + self._sum / len(self._values)

    @property
    def std(self) -> float:
        n = len(self._values)
        return math.sqrt(max(0.0, self._squares - self._sum**2 / n) / (n - 1)) if n > 1 else 0.0

    def state_dict(self) -> dict[str, Any]:
        sums = [self._about, self._sum, self._squares]
        return {"values": list(self._values), "sums": sums, "pushed": self._pushed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = deque(state["values"])
        self._about, self._sum, self._squares = state["sums"]
        self._pushed = state["pushed"]


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

    The rule needs a full window, which ends at the newest value. If 6 standard deviations, estimated from the
    quartiles of the window, are more than 0.1 nat, they are the threshold (no published source). With small batches,
    Qwen's threshold would raise an alarm at every fifth step.
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


# Series of the growth rule. Norms of queries and keys before QK-Norm are left out, because QK-Norm removes their
# growth. Norms of sublayer outputs are left out, because the sum of the outputs is the residual stream.
LOGITS = "attn_logit_absmax"
NORMS = ("q_norm", "k_norm", "resid_norm", "final_norm")

# Thresholds without a published source. In the first fifth of a run every norm grows many times over, most of all in
# healthy runs, so the rule starts after the first fifth. The initial growth lasts about as many steps in a short run
# as in a long run, so the rule never starts before step 100. Logits below 50, the cap of Gemma 2 (arXiv 2408.00118),
# raise no alarm.
GROWTH_START_SHARE = 0.2
GROWTH_START_STEPS = 100
GROWTH_PROBES = 5
GROWTH_FIRST = 3
GROWTH_SHARE = 0.05
GROWTH_STEPS = 50
GROWTH_ERRORS = 4.0
GROWTH_FACTOR = 2.0
GROWTH_LOGIT = 50.0

# Threshold without a published source: at a tenth of the initial entropy, most queries attend to one or two keys.
COLLAPSE_SHARE = 0.1


class Growth(Rule):
    """Rule: a norm or largest logit has doubled since the rule's start, and will double again before the end of the
    run if it continues to grow at this rate.

    The rule starts at a fifth of the run, at the end of the warm-up or at step 100, whichever is latest. It fits a
    line by least squares to the logarithms of the last values: at least five probes, over at least a twentieth of the
    run and at least 50 steps. The slope must be more than four standard errors above 0. At the last probe, the value
    on the line must be at least twice the median of the first three probes after the start. A run of at most 150
    steps has no growth alarm, because the rule starts at step 100 and needs 50 steps. A run without a set length is
    assumed to continue for as many steps as have passed since the rule's start. Values that are not positive are
    skipped.
    """

    STATE = ("first", "points", "on")

    def __init__(self, warmup_steps: int, max_steps: int, fewest: float = 0.0):
        self.start = max(GROWTH_START_STEPS, warmup_steps, round(GROWTH_START_SHARE * max_steps))
        self.max_steps, self.fewest = max_steps, fewest
        self.span = max(GROWTH_STEPS, GROWTH_SHARE * max_steps)
        self.first: list[float] = []
        self.points: list[list[float]] = []  # step, logarithm of the value

    def update(self, step: int, tag: str, value: float) -> Alarm | None:
        """Add a value; return an alarm if growth begins."""
        if step < self.start or not math.isfinite(value) or value <= 0:
            return None
        if self.points and step - self.points[-1][0] < self.span / (4 * GROWTH_PROBES):
            return None  # skip a probe that follows the last point too closely
        if len(self.first) < GROWTH_FIRST:
            self.first.append(value)
        self.points.append([step, math.log(value)])
        while len(self.points) > GROWTH_PROBES and step - self.points[1][0] >= self.span:
            del self.points[0]
        slope, error, end = _line(self.points)
        left = self.max_steps - step if self.max_steps else step - self.start
        first = statistics.median(self.first)
        grown = math.exp(end) / first
        grows = (
            len(self.points) >= GROWTH_PROBES
            and step - self.points[0][0] >= self.span
            and slope > GROWTH_ERRORS * error
            and slope * left > math.log(GROWTH_FACTOR)
            and grown >= GROWTH_FACTOR
            and value >= self.fewest
        )
        if not self.begins(grows):
            return None
        doubling = math.log(2) / slope
        sentence = (
            f"{tag} {plain(value, 4)} is {grown:.1f} times what it was at step {self.start} and doubles every"
            f" {doubling:.0f} steps, with {left} to go"
        )
        return Alarm("growth", step, tag, value, GROWTH_FACTOR * first, sentence)


def _line(points: list[list[float]]) -> tuple[float, float, float]:
    """Return the slope of the least-squares line, its standard error (inf for fewer than three points), and the value
    of the line at the last point."""
    n = len(points)
    if n < 3:
        return 0.0, math.inf, points[-1][1]
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / xx
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, math.sqrt(rest / (n - 2) / xx), mean_y + slope * (points[-1][0] - mean_x)


class Collapse(Rule):
    """Rule: the attention entropy is below a tenth of its first value.

    Low entropy alone can be benign, if each query attends to a different key. It is a collapse only if the rank of
    the layer's attention has fallen too, so the alarm's sentence states whether it has, if the rank is measured.
    """

    STATE = ("first", "first_rank", "on")

    def __init__(self) -> None:
        self.first: float | None = None
        self.first_rank: float | None = None

    def update(self, step: int, tag: str, value: float, rank: float | None = None) -> Alarm | None:
        """Add an entropy and the rank of its layer; return an alarm if the entropy falls below the threshold."""
        if not math.isfinite(value):
            return None
        if self.first is None:
            self.first, self.first_rank = value, rank
        if not self.begins(value < COLLAPSE_SHARE * self.first):
            return None
        threshold = COLLAPSE_SHARE * self.first
        sentence = (
            f"attention entropy {tag} is {plain(value)} nats, below its threshold of {plain(threshold)} nats"
            f" ({COLLAPSE_SHARE:.0%} of its first value)"
        )
        if rank is not None and self.first_rank is not None:
            ranks = f"from {plain(self.first_rank)} to {plain(rank)}"
            sentence += (
                f"; the rank of the layer's attention fell too, {ranks}"
                if rank < self.first_rank
                else f"; this can be harmless, because the rank of the layer's attention did not fall ({ranks})"
            )
        return Alarm("collapse", step, tag, value, threshold, sentence)


# Thresholds without a published source.
DIVERGENCE_WINDOW = 50
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
        if series.above >= DIVERGENCE_WINDOW:
            return alarm(
                loss,
                initial + ABOVE_INITIAL_NATS,
                f"{modality} loss {loss:.2f} was more than {ABOVE_INITIAL_NATS} nat above its initial {initial:.2f}"
                f" for {DIVERGENCE_WINDOW} steps",
            )
        series.window = [*series.window, loss][-DIVERGENCE_WINDOW:]
        if len(series.window) < DIVERGENCE_WINDOW:
            return None
        median = statistics.median(series.window)
        series.best = median if series.best is None else min(series.best, median)
        if median > series.best + ABOVE_BEST_NATS:
            return alarm(
                median,
                series.best + ABOVE_BEST_NATS,
                f"{DIVERGENCE_WINDOW}-step median {median:.2f} of the {modality} loss was more than"
                f" {ABOVE_BEST_NATS} nat above its best {series.best:.2f}",
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, as plain data."""
        return {modality: asdict(series) for modality, series in self._series.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._series = {modality: _Series(**saved) for modality, saved in state.items()}
