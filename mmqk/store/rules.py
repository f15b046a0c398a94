"""An alarm, and the rules that raise alarms over one series of a run.

`Spike` (OLMo 2), `SpikeOfMedian` (Qwen) and `Stall` read losses and the gradient norm, with one value per step;
`Growth` and `Collapse` read norms, attention logits and attention entropies, with one value per probe.
The rules depend only on the logged numbers. Their state is plain data, and results after a resume from this state are
bit-identical.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mmqk.store.errors import UserError
from mmqk.store.formatting import plain
from mmqk.store.metrics import parse_tag


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
        modality = (parsed.modality or "").replace("-", " to ")
        layer = None if parsed.layer is None else f"layer {parsed.layer}"
        head = None if parsed.head is None else f"head {parsed.head}"
        return ", ".join(part for part in (modality, layer, head) if part)

    def line(self) -> str:
        """Return the alarm as one line: ``step 120: growth: ...``."""
        return f"step {self.step}: {self.name}: {self.sentence}"


class Rule:
    """A rule over one series.

    Attributes:
        STATE: names of the attributes that form the state; each is plain data.
        on: whether the condition held at the last value.
    """

    STATE: tuple[str, ...] = ("on",)
    on = False

    def update(self, step: int, tag: str, value: float, *more: Any) -> Alarm | None:
        """Add a value of the series, and what else the rule reads; return an alarm if one begins. A value that is not
        finite is skipped."""
        return self.add(step, tag, value, *more) if math.isfinite(value) else None

    def add(self, step: int, tag: str, value: float, *more: Any) -> Alarm | None:
        """Add a finite value; return an alarm if one begins."""
        raise NotImplementedError

    def begins(self, holds: bool) -> bool:
        """Return whether an alarm begins: the condition holds now and did not hold at the previous value."""
        began, self.on = holds and not self.on, holds
        return began

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, as plain data."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self.STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            UserError: the state was written by a version of mmqk whose rules had other attributes.
        """
        if set(state) != set(self.STATE):
            raise UserError(
                "the alarms in the checkpoint were written by another version of mmqk: go on with that version, or"
                " start the run again in a new folder."
            )
        for name in self.STATE:
            setattr(self, name, copy.deepcopy(state[name]))


R = TypeVar("R", bound=Rule)


class RuleOfEach(defaultdict[str, R]):
    """One rule for each series, by name; its factory returns the rule of a series that is new."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all rules for a resume, as plain data."""
        return {name: rule.state_dict() for name, rule in self.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.clear()
        for name, saved in state.items():
            self[name].load_state_dict(saved)


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
# Ratio of the interquartile range to the standard deviation of a normal distribution.
QUARTILES_TO_STD = 1.349

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
    that are not all equal.
    """

    STATE = ("values", "sum", "squares", "on")

    def __init__(self) -> None:
        self.values: list[float] = []
        # Sums of the values and of their squares, in units of 2**-100 and 2**-200: unlike floats, integers have no
        # rounding errors, which would accumulate and which one huge value would make large.
        self.sum = self.squares = 0

    def add(self, step: int, tag: str, value: float, *more: Any) -> Alarm | None:
        mean, std, count = 0.0, 0.0, len(self.values)
        if count >= SPIKE_FEWEST:
            mean, std = self.moments()
        self._add(value, 1)
        self.values.append(value)
        if len(self.values) > SPIKE_WINDOW:
            self._add(self.values.pop(0), -1)
        threshold = mean + SPIKE_STDS * std
        if not self.begins(std > 1e-9 * abs(mean) and value >= threshold):
            return None
        sentence = (
            f"{tag} {plain(value, 4)} is {(value - mean) / std:.1f} standard deviations above the mean"
            f" {plain(mean, 4)} of the last {count} steps"
        )
        return Alarm("spike", step, tag, value, threshold, sentence)

    def moments(self) -> tuple[float, float]:
        """Return the mean and the sample standard deviation of the values in the window, of which there are at least
        two."""
        n = len(self.values)
        variance = (n * self.squares - self.sum**2) // (n * (n - 1))
        return self.sum / (n << 100), math.isqrt(variance) / (1 << 100)

    def _add(self, value: float, sign: int) -> None:
        top, bottom = value.as_integer_ratio()
        units = (top << 100) // bottom
        self.sum += sign * units
        self.squares += sign * units * units


class SpikeOfMedian(Rule):
    """Rule: a loss is more than 0.1 nat above the median of the last 201 losses, itself included (Qwen).

    The rule needs a full window, which ends at the newest value. If 6 standard deviations, estimated from the
    quartiles of the window, are more than 0.1 nat, they are the threshold (no published source). With small batches,
    Qwen's threshold would raise an alarm at every fifth step.
    """

    STATE = ("window", "on")

    def __init__(self) -> None:
        self.window: list[float] = []

    def add(self, step: int, tag: str, value: float, *more: Any) -> Alarm | None:
        self.window = [*self.window, value][-MEDIAN_WINDOW:]
        if len(self.window) < MEDIAN_WINDOW:
            return None
        ordered, quarter = sorted(self.window), MEDIAN_WINDOW // 4
        low, median, high = ordered[quarter], ordered[2 * quarter], ordered[3 * quarter]
        above = max(ABOVE_MEDIAN_NATS, ABOVE_MEDIAN_STDS * (high - low) / QUARTILES_TO_STD)
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
        self.patience = max(STALL_FEWEST_STEPS, round(STALL_SHARE * max_steps)) if max_steps else STALL_STEPS_OPEN_END
        self.window: list[float] = []
        self.level: float | None = None
        self.since = 0

    def add(self, step: int, tag: str, value: float, ceiling: float | None = None, *more: Any) -> Alarm | None:
        self.window = [*self.window, value][-STALL_MEDIAN:]
        if step <= self.warmup_steps or len(self.window) < STALL_MEDIAN:
            return None
        median = statistics.median(self.window)
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
# growth. Norms inside the residual stream are left out: in 7 of 9 healthy runs of the bench of failures they double.
LOGITS = "attn_logit_absmax"
NORMS = ("q_norm", "k_norm", "final_norm")

# Thresholds without a published source. In the first fifth of a run every norm grows many times over, most of all in
# healthy runs, so the rule starts after the first fifth. The initial growth lasts about as many steps in a short run
# as in a long run, so the rule never starts before step 100. Logits below 100 raise no alarm: with 50, the cap of
# Gemma 2 (arXiv 2408.00118), 5 of 9 healthy runs of the bench had one, with 100 none.
GROWTH_START_SHARE = 0.2
GROWTH_START_STEPS = 100
GROWTH_PROBES = 5
GROWTH_FIRST = 3
GROWTH_SHARE = 0.05
GROWTH_STEPS = 50
GROWTH_ERRORS = 4.0
GROWTH_FACTOR = 2.0
GROWTH_LOGIT = 100.0

# Threshold without a published source: most queries attend to one or two keys. On the bench of failures 4 of 14
# healthy runs fell below a tenth of the initial entropy, and none below a sixteenth.
COLLAPSE_SHARE = 1 / 16


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

    def add(self, step: int, tag: str, value: float, *more: Any) -> Alarm | None:
        if step < self.start or value <= 0:
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
    """Rule: the attention entropy is below a sixteenth of its first value.

    Low entropy alone can be benign, if each query attends to a different key. It is a collapse only if the rank of
    the layer's attention has fallen too, so the alarm's sentence states whether it has, if the rank is measured.
    """

    STATE = ("first", "first_rank", "on")

    def __init__(self) -> None:
        self.first: float | None = None
        self.first_rank: float | None = None

    def add(self, step: int, tag: str, value: float, rank: float | None = None, *more: Any) -> Alarm | None:
        if self.first is None:
            self.first, self.first_rank = value, rank
        if not self.begins(value < COLLAPSE_SHARE * self.first):
            return None
        threshold = COLLAPSE_SHARE * self.first
        sentence = (
            f"attention entropy {tag} is {plain(value)} nats, below its threshold of {plain(threshold)} nats"
            f" ({COLLAPSE_SHARE:.1%} of its first value)"
        )
        if rank is not None and self.first_rank is not None:
            ranks = f"from {plain(self.first_rank)} to {plain(rank)}"
            sentence += (
                f"; the rank of the layer's attention fell too, {ranks}"
                if rank < self.first_rank
                else f"; this can be harmless, because the rank of the layer's attention did not fall ({ranks})"
            )
        return Alarm("collapse", step, tag, value, threshold, sentence)
