"""Plain facts of a log that need few lines and no threshold from the bench: a loss of exactly 0, a loss that doubles
between two lines. They were written for the logs of tests/diagnose/logs; the bench says how often healthy runs show
them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

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
