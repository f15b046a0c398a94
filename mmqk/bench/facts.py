"""Plain facts of a log, and which series leaves its own range first.

A fact needs few lines and no threshold from the bench: a loss of exactly 0, a loss that doubles between two lines.
They were written for the logs of tests/diagnose/logs; the bench says how often healthy runs show them too. A series
leaves its range (a departure) with three values in a row beyond what its values before them allow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mmqk.bench.kinds import SETTLED
from mmqk.bench.rules import WINDOW, recent
from mmqk.store.metrics import parse_tag
from mmqk.store.rules import QUARTILES_TO_STD

TINY = 0.01  # nats: far below what text or image tokens leave
RISE, NATS = 2.0, 1.0  # a loss jumps if it is twice the value before it, and this much above it
LEAST_PROGRESS = 100  # losses


@dataclass(frozen=True)
class Rule:
    """A fact to look for: ``holds`` returns where it is true, which ``rows`` values in a row must be."""

    name: str
    statistic: str
    holds: Callable[[pd.Series], pd.Series]
    rows: int
    meaning: str


@dataclass(frozen=True)
class Fact:
    """A fact of a log: its first step, the value there and the one before it (None at the first line)."""

    name: str
    step: int
    series: str
    value: float
    before: float | None
    meaning: str


def _no_progress(values: pd.Series) -> pd.Series:
    """True at the last value if the last third is not below the first third, less a tenth for the warm-up, by more
    than the standard deviation of a single value (from quartiles)."""
    third, flat = len(values) // 3, False
    if len(values) >= LEAST_PROGRESS:
        first, last = values.iloc[len(values) // 10 : third], values.iloc[-third:]
        spread = (last.quantile(0.75) - last.quantile(0.25)) / QUARTILES_TO_STD
        flat = bool(first.median() - last.median() <= spread)
    return pd.Series(np.arange(len(values)) == (len(values) - 1 if flat else -1), values.index)


RULES = (
    Rule("zero loss", "loss", lambda x: x == 0, 2,
         "no target counts, all targets are masked, or the values are rounded"),
    Rule("tiny loss", "loss", lambda x: (x > 0) & (x < TINY), 3,
         "the targets are known from the input: prompt, padding or image tokens may count, or the data repeats"),
    Rule("zero gradient", "grad_norm", lambda x: x == 0, 2, "nothing is learned: no parameter has a gradient"),
    Rule("loss jumps", "loss", lambda x: (x >= RISE * x.shift()) & (x >= x.shift() + NATS), 1,
         "one interval between two lines changed the model or its data"),
    Rule("no progress", "loss", _no_progress, 1,
         "the loss did not fall in this log: the rate is too high or too low, or the log begins late in training"),
)  # fmt: skip


def facts(metrics: pd.DataFrame) -> list[Fact]:
    """Return the facts of a log, the first one first, from its table: a row per step, a column per tag."""
    found = []
    for rule in RULES:
        parts = "loss/" if rule.statistic == "loss" else None  # of a modality
        tags = [tag for tag in map(str, metrics) if tag == rule.statistic or (parts and tag.startswith(parts))]
        for tag in tags:
            values = metrics[tag].replace(np.inf, np.nan).dropna()
            held = rule.holds(values)[::-1].astype(int).rolling(rule.rows).min()[::-1] > 0
            if held.any():
                at = int(held.to_numpy().argmax())
                before = float(values.iloc[at - 1]) if at else None
                step, value = int(values.index[at]), float(values.iloc[at])
                found.append(Fact(rule.name, step, tag, value, before, rule.meaning))
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
