"""Rules over series with one value per probe: growing norms and attention logits, collapsing attention."""

from __future__ import annotations

import math
import statistics

from mmqk.store.alarms.alarm import Alarm
from mmqk.store.alarms.rule import Rule
from mmqk.store.formatting import plain

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
