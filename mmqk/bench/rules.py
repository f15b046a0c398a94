"""Candidate alarm rules. A rule takes the metrics of a run and returns a score for each step, from that step and the
steps before it. An alarm begins where the score exceeds the threshold of the rule.

The metrics are a table with a row per optimizer step and a column per tag (docs/statistics.md). A statistic of the
probe has a value only every few steps; elsewhere it is NaN, and so may be a score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from mmqk.store.metrics import parse_tag
from mmqk.store.rules import QUARTILES_TO_STD

Rule = Callable[[pd.DataFrame], pd.Series]
WINDOW = 100  # steps before the current one
PROBES = 5


def columns(metrics: pd.DataFrame, *statistics: str) -> pd.DataFrame:
    """Return the series of some statistics over modalities and layers, without heads and without empty rows."""
    tags = [tag for tag in metrics if parse_tag(tag).statistic in statistics and parse_tag(tag).head is None]
    return metrics[tags].dropna(how="all")


def recent(values: Any, window: int) -> tuple[Any, Any]:
    """Return the median and the standard deviation (from quartiles) of the values before each value of a series or a
    table."""
    before = values.shift(1).rolling(window, min_periods=window // 4)
    return before.median(), (before.quantile(0.75) - before.quantile(0.25)) / QUARTILES_TO_STD


def above_recent(series: pd.DataFrame, window: int = WINDOW) -> pd.Series:
    """Return how many standard deviations a value is above the median of the values before it; the largest over the
    columns. A value that is not finite scores infinity."""
    middle, spread = recent(series, window)
    score = (series - middle) / spread.clip(lower=1e-9)
    return score.mask(~np.isfinite(series) & series.notna(), np.inf).max(axis=1)


def growth(series: pd.DataFrame) -> pd.Series:
    """Return the slope of the logarithm over the last `PROBES` probes, per 100 steps; the largest of the columns."""
    logs = series.where(series > 0).apply(np.log)
    steps = pd.Series(logs.index, index=logs.index)
    rate = logs.diff(PROBES - 1).div(steps.diff(PROBES - 1), axis=0)
    return 100 * rate.max(axis=1)


def of_first(series: pd.DataFrame) -> pd.Series:
    """Return the logarithm of a value over the median of the first three values after the warm-up; the largest of the
    columns."""
    first = series.iloc[PROBES : PROBES + 3].median()
    return (series / first).where(series > 0).apply(np.log).iloc[PROBES + 3 :].max(axis=1)


def loss(metrics: pd.DataFrame) -> pd.Series:
    """Baseline: the loss of a modality far above its recent losses."""
    return above_recent(columns(metrics, "loss"))


def grad_norm(metrics: pd.DataFrame) -> pd.Series:
    """Baseline: the gradient norm far above its recent values, in logarithms."""
    return above_recent(metrics[["grad_norm"]].dropna().apply(np.log))


def loss_or_grad_norm(metrics: pd.DataFrame) -> pd.Series:
    """Baseline: the larger of both."""
    return pd.concat([loss(metrics), grad_norm(metrics)], axis=1).max(axis=1)


def loss_cusum(metrics: pd.DataFrame) -> pd.Series:
    """Baseline: cumulative sum (Page 1954) of how far a loss is above its recent ones, less half a deviation."""
    excess = above_recent(metrics[["loss"]].dropna()).clip(-3, 3).fillna(0) - 0.5
    total = excess.cumsum()
    return total - total.cummin()


def loss_rise(metrics: pd.DataFrame) -> pd.Series:
    """Baseline: how far the median of the last 50 losses is above its lowest, nats; the larger of the modalities."""
    median = columns(metrics, "loss").rolling(50, min_periods=25).median()
    return (median - median.cummin()).max(axis=1)


def largest_logit(metrics: pd.DataFrame) -> pd.Series:
    """Logarithm of the largest absolute attention logit."""
    return columns(metrics, "attn_logit_absmax").apply(np.log).max(axis=1)


def logit_growth(metrics: pd.DataFrame) -> pd.Series:
    """Growth of the largest attention logit of a layer and pair of modalities."""
    return growth(columns(metrics, "attn_logit_absmax"))


def entropy(metrics: pd.DataFrame) -> pd.Series:
    """Fall of the attention entropy of a layer and modality since the warm-up, in logarithms."""
    return of_first(1 / columns(metrics, "attn_entropy").clip(lower=1e-6))


def attention_rank(metrics: pd.DataFrame) -> pd.Series:
    """Fall of the rank of a layer's attention since the warm-up, in logarithms."""
    return of_first(1 / columns(metrics, "attn_rank"))


def stable_rank(metrics: pd.DataFrame) -> pd.Series:
    """Fall of the stable rank of a W_q or W_k since the warm-up, in logarithms (MSign, arXiv 2602.01734)."""
    return of_first(1 / columns(metrics, "w_q_stable_rank", "w_k_stable_rank"))


def grad_over_v(metrics: pd.DataFrame) -> pd.Series:
    """Largest RMS of g / sqrt(v) of a matrix (StableAdamW, arXiv 2304.13013)."""
    names = ("w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down", "embed", "head")
    return columns(metrics, *(f"{name}_grad_over_v" for name in names)).max(axis=1)


def update_rms(metrics: pd.DataFrame) -> pd.Series:
    """Largest RMS of a parameter's update over the learning rate, above its recent values."""
    return above_recent(columns(metrics, "update_rms"), window=20)


def grad_share(metrics: pd.DataFrame) -> pd.Series:
    """Rise of a parameter's share of the squared gradient norm above its recent values."""
    norms = columns(metrics, "grad_norm").drop(columns="grad_norm", errors="ignore").dropna(how="all").pow(2)
    return above_recent(norms.div(norms.sum(axis=1), axis=0), window=20)


def log_z(metrics: pd.DataFrame) -> pd.Series:
    """Absolute log Z of a modality above its recent values."""
    return above_recent(columns(metrics, "log_z").abs())


def output_norm(metrics: pd.DataFrame) -> pd.Series:
    """Growth of the norm of the last layer's output, by modality."""
    return growth(columns(metrics, "final_norm"))


def stream_norm(metrics: pd.DataFrame) -> pd.Series:
    """Change of the norm of the residual stream of a layer and modality against recent probes, either way."""
    logs = columns(metrics, "resid_norm").apply(np.log)
    return pd.concat([above_recent(logs, 20), above_recent(-logs, 20)], axis=1).max(axis=1)


def loss_and_logit(metrics: pd.DataFrame) -> pd.Series:
    """Two statistics: a fifth of `loss_or_grad_norm` plus the last `logit_growth`."""
    both = pd.concat([loss_or_grad_norm(metrics) / 5, logit_growth(metrics).reindex(metrics.index).ffill()], axis=1)
    return both.sum(axis=1, min_count=1)


# What an alarm from the loss and the gradient norm alone can do: every other rule has to beat these.
BASELINES: tuple[Rule, ...] = (loss, grad_norm, loss_or_grad_norm, loss_cusum, loss_rise)
CANDIDATES: tuple[Rule, ...] = (
    largest_logit, logit_growth, entropy, attention_rank, stable_rank, grad_over_v, update_rms,
    grad_share, log_z, output_norm, stream_norm, loss_and_logit,
)  # fmt: skip
