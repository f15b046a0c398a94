"""What is looked for in the metrics of a run: candidate alarm rules, plain facts, and series that leave their range.

The metrics are a table with a row per optimizer step and a column per tag (docs/statistics.md). A statistic of the
probe has a value only every few steps; elsewhere it is NaN, and so may be a score.

- A candidate rule returns a score for each step, from that step and the steps before it. An alarm begins where the
  score exceeds the threshold of the rule.
- A fact needs few lines and no threshold from the bench: a loss of exactly 0, a loss that doubles between two lines.
  Facts were written for the logs of tests/diagnose/logs; the bench says how often healthy runs show them too.
- A series leaves its range (a departure) with three values in a row beyond what its values before them allow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mmqk.store.metrics import parse_tag
from mmqk.store.rules import QUARTILES_TO_STD

Rule = Callable[[pd.DataFrame], pd.Series]
WINDOW = 100  # steps before the current one
PROBES = 5
SETTLED = 60  # first step of the readings that compare a value with earlier ones


def columns(metrics: pd.DataFrame, *statistics: str) -> pd.DataFrame:
    """Return the series of some statistics over modalities and layers, without heads and without empty rows."""
    tags = [tag for tag in metrics if parse_tag(tag).statistic in statistics and parse_tag(tag).head is None]
    return metrics[tags].dropna(how="all")


def recent(values: Any, window: int) -> tuple[Any, Any]:
    """Return the median and the standard deviation (from quartiles) of the values before each value of a series or a
    table."""
    before = values.shift(1).rolling(window, min_periods=window // 4)
    return before.median(), (before.quantile(0.75) - before.quantile(0.25)) / QUARTILES_TO_STD


def noise(values: Any) -> Any:
    """Return, for each value of a series or a table, the standard deviation of one value, from the median difference
    between neighbors among the last 50; a trend or a level that changes hardly adds to it."""
    return 1.4826 / 2**0.5 * values.diff().abs().rolling(50, min_periods=2).median()


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

# Plain facts --------------------------------------------------------------------------------------------------------

TINY = 0.01  # nats: far below what text or image tokens leave
RISE, NATS, BEFORE = 2.0, 1.0, 5  # a loss jumps if it is twice the median of 5 before it, and this much above it
LEAST_PROGRESS = 100  # losses
LEARNED = 3.0  # nats: about the unigram loss of bytes, the smallest vocabulary
# Chosen after logs of healthy fine-tunings were seen, as LEARNED and BEFORE: errors, and what they may hide of a loss.
ERRORS, HIDDEN = 4.0, 0.1


@dataclass(frozen=True)
class Fact:
    """A fact of a log: its first step, the value there and the one before it (None at the first line)."""

    name: str
    step: int
    series: str
    value: float
    before: float | None
    meaning: str


def _jumps(values: pd.Series) -> pd.Series:
    """True where a value and the `IN_A_ROW` - 1 after it (fewer at the end) are at least `RISE` times the median of
    the `BEFORE` values before it, and `NATS` and `ERRORS` standard deviations (`noise`) above."""
    before = values.shift().rolling(BEFORE, min_periods=1).median()
    lowest = values[::-1].rolling(IN_A_ROW, min_periods=1).min()[::-1]
    return (lowest >= RISE * before) & (lowest >= before + (ERRORS * noise(values).shift()).clip(NATS).fillna(NATS))


def _no_progress(values: pd.Series) -> pd.Series:
    """True at the last value if the median of the last third is not below that of the values before by more than
    `ERRORS` standard errors (from quartiles), unless these are more than `HIDDEN` of the loss.

    The values before are the first third less a tenth, in which a model learns the unigram loss; or this tenth, if the
    loss falls below `LEARNED`. A log that begins after more steps than it has is not compared.
    """
    tenth, third, flat = len(values) // 10, len(values) // 3, False
    if len(values) >= LEAST_PROGRESS and 2 * values.index[0] <= values.index[-1]:
        last = values.iloc[-third:]
        first = values.iloc[:tenth] if last.median() < LEARNED else values.iloc[tenth:third]
        spread = (last.quantile(0.75) - last.quantile(0.25)) / QUARTILES_TO_STD
        error = 1.25 * spread * (1 / len(first) + 1 / len(last)) ** 0.5
        flat = bool(first.median() - last.median() <= ERRORS * error < HIDDEN * last.median())
    return pd.Series(np.arange(len(values)) == (len(values) - 1 if flat else -1), values.index)


LOSS = "loss(/.*)?"  # also of a modality
# By name: a pattern of series, where it is true, how many values in a row must be, and what it means.
FACTS: dict[str, tuple[str, Callable[[pd.Series], pd.Series], int, str]] = {
    "zero loss": (LOSS, lambda x: x == 0, 2, "no target counts, all targets are masked, or the values are rounded"),
    "tiny loss": (LOSS, lambda x: (x > 0) & (x < TINY), 3,
        "the targets are known from the input: prompt, padding or image tokens may count, or the data repeats"),
    "zero gradient": ("grad_norm", lambda x: x == 0, 2, "nothing is learned: no parameter has a gradient"),
    "loss jumps": (LOSS, _jumps, 1,
        "one interval between two lines changed the model or its data"),
    "no progress": (LOSS, _no_progress, 1,
        "the loss is no lower at the end than early on: the learning rate does not fit, or all is learned"),
}  # fmt: skip


def facts(metrics: pd.DataFrame) -> list[Fact]:
    """Return the facts of a log, the first one first, from its table: a row per step, a column per tag. Of several
    series, the first one that shows a fact counts."""
    found = []
    for name, (series, holds, rows, meaning) in FACTS.items():
        for tag in [tag for tag in map(str, metrics) if re.fullmatch(series, tag)]:
            values = metrics[tag].replace(np.inf, np.nan).dropna()
            held = holds(values)[::-1].astype(int).rolling(rows).min()[::-1] > 0
            if held.any():
                at = int(held.to_numpy().argmax())
                before = float(values.iloc[at - 1]) if at else None
                found.append(Fact(name, int(values.index[at]), tag, float(values.iloc[at]), before, meaning))
                break
    return sorted(found, key=lambda fact: fact.step)


# Departures ---------------------------------------------------------------------------------------------------------

# Compared statistics, of the whole run, by modality or by layer. Norms of weights change so smoothly that their range
# is too narrow to leave.
COMPARED = (
    "loss", "grad_norm", "log_z", "attn_logit_absmax", "attn_entropy", "q_norm", "k_norm_max", "resid_norm",
    "final_norm",
)  # fmt: skip
LINEAR = ("loss", "log_z")  # the others are compared as logarithms
IN_A_ROW = 3
FEW, SHORT = 200, 20  # a series with fewer values is compared with this many before it


@dataclass(frozen=True)
class Departure:
    """A series and the first step at which it left its range: its value there, the median and the limits of the range,
    and the first of `IN_A_ROW` steps at which it was back; None if it never was."""

    step: int
    tag: str
    value: float
    before: float
    limit: float
    back: int | None


def compared(metrics: pd.DataFrame) -> list[str]:
    """Return the series that are compared."""
    tags = {str(tag): parse_tag(str(tag)) for tag in metrics}
    parts = [tag for tag, of in tags.items() if of.statistic == "grad_norm" and of.modality]  # of a parameter
    return [tag for tag, of in tags.items() if of.statistic in COMPARED and of.head is None and tag not in parts]


def scores(series: pd.Series) -> tuple[pd.Series, pd.Series, pd.Series]:
    """Return, for each value, how many standard deviations it is above or below the median of the values before it,
    that median and the deviation (from quartiles); logarithms, unless the series is in nats or not positive."""
    finite = series.replace(np.inf, np.nan)
    middle, deviation = recent(finite, WINDOW if len(series) >= FEW else SHORT)
    deviation = deviation.clip(lower=1e-3)
    return ((finite - middle) / deviation).mask(np.isinf(series), np.inf), middle, deviation


def scaled(metrics: pd.DataFrame, tag: str) -> tuple[pd.Series, Callable[[float], Any]]:
    """Return a series as it is compared, without empty rows, and the function that turns it back."""
    series = metrics[tag].dropna()
    positive = parse_tag(tag).statistic not in LINEAR and (series > 0).all()
    return (np.log(series), np.exp) if positive else (series, float)


def together(score: pd.Series) -> pd.Series:
    """Return by how much `IN_A_ROW` values exceed a threshold on one side, at the first of them."""
    sides = [one.rolling(IN_A_ROW).min().shift(1 - IN_A_ROW) for one in (score, -score)]
    return pd.concat(sides, axis=1).max(axis=1).mask(np.isinf(score), np.inf)


def departures(metrics: pd.DataFrame, limits: Mapping[str, float]) -> list[Departure]:
    """Return the first departure of each series, in the order of their steps; at one step, the largest first."""
    found = []
    for tag in compared(metrics):
        series, unscaled = scaled(metrics, tag)
        if parse_tag(tag).statistic not in limits or len(series) < SHORT:
            continue
        score, middle, deviation = scores(series)
        limit = limits[parse_tag(tag).statistic]
        outside = (together(score) > limit) & ((score.index >= SETTLED) | np.isinf(series))
        if not outside.any():
            continue
        at = int(str(outside.idxmax()))
        side = 1 if score[at] > 0 else -1
        edge = middle[at] + side * limit * deviation[at]
        calm = (side * series.loc[at:] < side * edge).rolling(IN_A_ROW).min().shift(1 - IN_A_ROW) == 1
        back = int(str(calm.idxmax())) if calm.any() else None
        left = Departure(at, tag, float(metrics[tag][at]), float(unscaled(middle[at])), float(unscaled(edge)), back)
        found.append((left.step, -abs(score[at]) / limit, left))
    return [left for *_, left in sorted(found, key=lambda entry: entry[:2])]
