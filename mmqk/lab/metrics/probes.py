"""Series of a run from its probes: attention logits, attention entropy, norms; their growth rates, and the order in
which they grew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from mmqk.lab.runs import EMPTY, Run, Series

BySeries = Callable[[Run, str | None], Series]

LAST_PROBES = 3
# The window of a slope starts at this share of the run, like the window of the growth alarm. Earlier in the run,
# norms also grow in healthy runs.
SLOPE_FROM_SHARE = 0.2
# The window of an early slope, as shares of the run. In the Chameleon paper (arXiv 2405.09818, Fig. 5a), the
# norms of the compared runs already differ at its end.
EARLY = (0.0, 0.25)
SLOPE_STEPS = 1000
FEWEST_PROBES = 3


def end_of(series: Series, worst: float) -> float:
    """Return the median of the last three probes; ``worst`` if the last one is not finite, NaN if there are none.

    The probe of step 0, the untrained model, is left out, unless it is the only one. The last probes of a run that
    diverged are those before it was stopped.
    """
    steps, values = series
    values = (values[steps > 0] if (steps > 0).any() else values)[-LAST_PROBES:]
    if not len(values):
        return math.nan
    return float(np.median(np.where(np.isfinite(values), values, worst))) if np.isfinite(values[-1]) else worst


def combined(statistic: str, reduce: Callable[..., Any] = np.mean) -> BySeries:
    """Return a function that reduces a statistic over layers, modalities and heads, with equal weight, at each
    probe."""

    def series(run: Run, modality: str | None = None) -> Series:
        return run.combined(statistic, reduce, modality)

    return series


def root_mean_square(table: np.ma.MaskedArray, axis: int) -> np.ndarray:
    # Do not use ** here, because it would mask infinite values.
    return np.sqrt(np.asarray((table * table).mean(axis=axis)))


def norm_product_series(run: Run, modality: str | None = None) -> Series:
    """Return the product of the query norm and the key norm at each probe. Each norm is a mean over tokens, then a
    geometric mean over layers and modalities."""

    def geometric_mean(table: np.ma.MaskedArray, axis: int) -> np.ma.MaskedArray:
        logs = np.ma.array(np.log(table.filled(1.0)), mask=np.ma.getmaskarray(table))
        return np.ma.array(np.exp(logs.mean(axis=axis)))

    (steps, q), (_, k) = (run.combined(name, geometric_mean, modality) for name in ("q_norm", "k_norm"))
    return steps, q * k


def norms_over_alignment(run: Run, modality: str | None = None) -> Series:
    """Return query power times key power divided by their alignment at each probe, as the geometric mean over layers
    and modality pairs.

    The mean squared logit is the product of these three factors. So if one run has larger logits and a larger value
    of this metric than another run, the norms explain more than half of the difference on a log scale.
    """
    parts = [run.combined(f"logit_{part}", np.mean, modality) for part in ("q_power", "k_power", "alignment")]
    (steps, q_power), (_, k_power), (_, alignment) = parts
    return steps, np.exp(q_power + k_power - alignment)


def deviation_series(variance: str) -> BySeries:
    """Return a function that computes the square root of a logit variance at each probe. The variance is an average
    over heads, layers and modalities with equal weight."""

    def series(run: Run, modality: str | None = None) -> Series:
        steps, values = run.combined(variance, np.mean, modality)
        return steps, np.sqrt(np.maximum(values, 0.0))

    return series


def mass_other_series(run: Run, modality: str | None = None) -> Series:
    """Return the attention mass of queries on keys of other modalities at each probe, averaged over layers and query
    modalities."""
    sums: dict[tuple[str, int | None], dict[int, float]] = {}
    for name, tag in run.tags.items():
        if tag.statistic != "attn_mass" or tag.head is not None or tag.pair is None:
            continue
        query, key = tag.pair
        if query == key or modality not in (None, query):
            continue
        of_layer = sums.setdefault((query, tag.layer), {})
        for step, value in zip(*(part.tolist() for part in run.series(name)), strict=True):
            of_layer[step] = of_layer.get(step, 0.0) + value
    steps = sorted(set().union(*sums.values()))
    means = [np.mean([of_layer[step] for of_layer in sums.values() if step in of_layer]) for step in steps]
    return np.array(steps, dtype=np.int64), np.array(means, dtype=np.float64)


def weight_growth_series(run: Run, modality: str | None = None) -> Series:
    """Return the growth rate of ‖W_q‖² + ‖W_k‖² in each window of the radial budget, per 1,000 steps.

    Growth and squared norms are sums over layers. With a modality, the growth is the part from the losses of this
    modality; without one, it is the total growth, after weight decay.
    """
    part = "growth_total" if modality is None else "growth"
    steps, window = run.series("budget_window")
    grown, power = (
        sum(run.combined(f"w_{matrix}_{name}", np.sum, of)[1] for matrix in "qk")
        for name, of in ((part, modality), ("sq", None))
    )
    if not len(steps) or not np.size(grown):
        return EMPTY
    return steps, SLOPE_STEPS * grown / power / window


def norm_slope(
    run: Run, modality: str | None = None, *, statistic: str, start: float = SLOPE_FROM_SHARE, end: float = 1.0
) -> float:
    """Return the growth rate of a norm: the least-squares slope of its logarithm against the step, per 1,000 steps.

    Args:
        run: the run.
        modality: modality of the tokens; None for all modalities, with equal weight.
        statistic: a norm such as ``q_norm``, which is averaged over layers and modalities, or ``attn_logit_absmax``,
            for the maximum over layers and heads.
        start: start of the window as a share of the configured run length; the window never includes warm-up steps.
        end: end of the window as a share of the configured run length.

    Returns:
        The slope; 0.69 means that the norm doubles every 1,000 steps. Infinite if a value in the window is not
        finite, NaN if the window has fewer than three probes or a value that is not positive.
    """
    steps, values = run.combined(statistic, np.max if statistic == "attn_logit_absmax" else np.mean, modality)
    length = run.planned_steps
    inside = (steps >= max(start * length, run.warmup_steps)) & (steps <= end * length)
    steps, values = steps[inside], values[inside]
    if len(steps) < FEWEST_PROBES:
        return math.nan
    if not np.isfinite(values).all():
        return math.inf
    if not (values > 0).all():
        return math.nan
    return float(stats.linregress(steps / SLOPE_STEPS, np.log(values)).slope)


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
    limit. Series that crossed at the same step are sorted by their ratio, the largest first. Series of single heads
    and those with fewer than two values are left out.
    """
    grown = []
    for name, tag in run.tags.items():
        steps, values = run.series(name)
        steps, values = steps[steps >= run.warmup_steps], values[steps >= run.warmup_steps]
        if tag.statistic not in (*GROWING, *FALLING) or tag.head is not None or len(steps) < 2:
            continue
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
