"""Metrics of a run from its probes: attention logits, attention entropy, norms, and their growth rates."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from mmqk.analysis.metrics.metric import BySeries, Metric, alone, planned_steps, warmup_steps
from mmqk.analysis.runs.load import Run, Series

LAST_PROBES = 3
# As in the growth alarm: in the first fifth of a run norms grow in healthy runs too.
SLOPE_FROM_SHARE = 0.2
# End of the window of the early slope: Chameleon's norms already differ by then.
EARLY_SHARE = 0.25
SLOPE_STEPS = 1000
FEWEST_PROBES = 3


def _end(series: Series, worst: float) -> float:
    """Median of the last three probes; ``worst`` if the last one is not finite, NaN without probes."""
    values = series[1][-LAST_PROBES:]
    if not len(values):
        return math.nan
    return (
        float(np.median(np.where(np.isfinite(values), values, worst))) if np.isfinite(values[-1]) else worst
    )


def logit_series(run: Run, modality: str | None = None) -> Series:
    """Largest absolute attention logit over layers, heads and modality pairs, by probe."""
    return run.combined("attn_logit_absmax", np.max, modality)


def growth_series(run: Run, modality: str | None = None) -> Series:
    """`logit_series` over its first value."""
    steps, values = logit_series(run, modality)
    return steps, values / values[:1] if len(values) else values


def entropy_series(run: Run, modality: str | None = None) -> Series:
    """Attention entropy of the layer with the lowest value, in nats, by probe."""
    return run.combined("attn_entropy", np.min, modality)


def norm_series(statistic: str) -> BySeries:
    """Mean of a norm by probe: over the tokens of each layer and modality, then over these with equal weight."""

    def series(run: Run, modality: str | None = None) -> Series:
        return run.combined(statistic, np.mean, modality)

    return series


def norms_over_alignment(run: Run, modality: str | None = None) -> Series:
    """Power of the queries times that of the keys over their alignment, by probe; geometric mean over layers, pairs.

    The mean squared logit is the product of the three. Between two runs of which one has larger logits, a ratio above
    1 means that norms explain more than half of the growth.
    """
    parts = [run.combined(f"logit_{part}", np.mean, modality) for part in ("q_power", "k_power", "alignment")]
    (steps, q_power), (_, k_power), (_, alignment) = parts
    return steps, np.exp(q_power + k_power - alignment)


def largest_attention_logit(run: Run, modality: str | None = None) -> float:
    """`logit_series` at the end of the run, the median of the last three probes.

    For a run that diverged, the end is where it was stopped.
    """
    return _end(logit_series(run, modality), math.inf)


def attention_entropy(run: Run, modality: str | None = None) -> float:
    """`entropy_series` at the end of the run, the median of the last three probes."""
    return _end(entropy_series(run, modality), -math.inf)


def norm_slope(
    run: Run, statistic: str, modality: str | None = None, start: float = SLOPE_FROM_SHARE, end: float = 1.0
) -> float:
    """Growth rate of a norm: least-squares slope of its logarithm over the step, per 1,000 steps.

    Args:
        run: the run.
        statistic: a norm such as ``q_norm``, averaged as in `norm_series`, or ``attn_logit_absmax``, as the maximum
            over layers and heads.
        modality: modality of the tokens; None for all with equal weight.
        start: start of the window as a share of the configured run length; never within warm-up.
        end: end of the window as a share.

    Returns:
        0.69 if the norm doubles every 1,000 steps. Infinite if a value in the window is not finite, NaN with fewer
        than three probes or with a value that is not positive.
    """
    series = logit_series if statistic == "attn_logit_absmax" else norm_series(statistic)
    steps, values = series(run, modality)
    length = planned_steps(run)
    inside = (steps >= max(start * length, warmup_steps(run))) & (steps <= end * length)
    steps, values = steps[inside], values[inside]
    if len(steps) < FEWEST_PROBES:
        return math.nan
    if not np.isfinite(values).all():
        return math.inf
    if not (values > 0).all():
        return math.nan
    return float(stats.linregress(steps / SLOPE_STEPS, np.log(values)).slope)


def probed(label: str, series: BySeries) -> Metric:
    """A metric: the end of a series of probes, on the log scale."""

    def measure(run: Run, modality: str | None = None) -> float:
        return _end(series(run, modality), math.inf)

    return Metric(label, "", "log", "high", measure, series)


def slope_of(label: str, statistic: str, start: float = SLOPE_FROM_SHARE, end: float = 1.0) -> Metric:
    """A metric: `norm_slope` in a window."""

    def measure(run: Run, modality: str | None = None) -> float:
        return norm_slope(run, statistic, modality, start, end)

    return Metric(label, "per 1,000 steps", "linear", "high", measure, alone(measure))
