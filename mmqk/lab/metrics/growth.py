"""The order in which the statistics of one run grew, by layer and modality."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mmqk.lab.metrics.metric import warmup_steps
from mmqk.lab.runs import Run
from mmqk.store import Tag

# Statistics that grow before a divergence; attention entropy falls.
GROWING = (
    "attn_logit_absmax", "q_norm", "k_norm", "v_norm", "attn_out_norm", "mlp_out_norm", "resid_norm", "final_norm",
)  # fmt: skip
FALLING = ("attn_entropy",)
FACTOR = 2.0


@dataclass(frozen=True)
class Growth:
    """One series that crossed its limit and stayed beyond it (see `growth_order`).

    Attributes:
        statistic: name of the statistic, as in docs/statistics.md.
        modality: modality of the tokens; "text-image" for text queries and image keys; empty if there is none.
        layer: the layer; None for the output of the last layer.
        step: the step from which the series stays beyond its limit.
        start: the reference value: the value of the series at the end of the warm-up.
        end: the last value of the series.
    """

    statistic: str
    modality: str
    layer: int | None
    step: int
    start: float
    end: float

    @property
    def ratio(self) -> float:
        """The factor by which the series grew or fell; infinite if a value is not finite."""
        small, large = (self.start, self.end) if self.statistic in GROWING else (self.end, self.start)
        ratio = large / small if small else math.inf
        return ratio if math.isfinite(ratio) else math.inf


def growth_order(run: Run) -> list[Growth]:
    """Return the series that crossed their limit and stayed beyond it, sorted by the step at which they crossed it.

    The limit is twice the reference value; for an attention entropy, half of it. The reference is the value at the
    first probe at or after the end of the learning-rate warm-up. If the run has no recorded warm-up, as with
    `mmqk.monitors.attach`, the reference is the value at the first probe. A value that is not finite is beyond every
    limit. Series that crossed at the same step are sorted by their ratio, the largest first.
    """
    grown = []
    for tag, steps, values in _after_warmup(run):
        start = float(values[0])
        if not start > 0 or not math.isfinite(start):
            continue
        with np.errstate(invalid="ignore"):
            beyond = values > FACTOR * start if tag.statistic in GROWING else values < start / FACTOR
        beyond |= ~np.isfinite(values)
        inside = np.flatnonzero(~beyond)
        index = int(inside[-1]) + 1 if len(inside) else 0
        if index < len(steps):
            end = float(values[-1])
            grown.append(Growth(tag.statistic, tag.modality or "", tag.layer, int(steps[index]), start, end))
    return sorted(grown, key=lambda growth: (growth.step, -growth.ratio))


def _after_warmup(run: Run) -> Iterator[tuple[Tag, np.ndarray, np.ndarray]]:
    """Yield the tag, steps and values, from the end of the warm-up on, of each series of `GROWING` and `FALLING` that
    has at least two values there. Series of single heads are left out."""
    for name, tag in run.tags.items():
        if tag.statistic in (*GROWING, *FALLING) and tag.head is None:
            steps, values = run.series(name)
            after = np.flatnonzero(steps >= warmup_steps(run))
            if len(after) >= 2:
                yield tag, steps[after], values[after]
