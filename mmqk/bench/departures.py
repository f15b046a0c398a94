"""Which series leaves its own range first: three values in a row beyond what its values before them allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mmqk.bench.kinds import SETTLED
from mmqk.bench.rules import WINDOW
from mmqk.bench.traces import Trace
from mmqk.store.metrics import parsed_tag
from mmqk.store.rules import QUARTILES_TO_STD

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
    tags = [(str(tag), parsed_tag(str(tag))) for tag in metrics]
    return [
        t
        for t, p in tags
        if p.statistic in COMPARED and p.head is None and not (p.statistic == "grad_norm" and p.modality)
    ]


def scores(series: pd.Series) -> tuple[pd.Series, pd.Series, pd.Series]:
    """Return, for each value, how many standard deviations it is above or below the median of the values before it,
    that median and the deviation (from quartiles); logarithms, unless the series is in nats or not positive."""
    window = WINDOW if len(series) >= FEW else SHORT
    finite = series.replace(np.inf, np.nan)
    before = finite.shift(1).rolling(window, min_periods=window // 4)
    middle = before.median()
    deviation = ((before.quantile(0.75) - before.quantile(0.25)) / QUARTILES_TO_STD).clip(lower=1e-3)
    return ((finite - middle) / deviation).mask(np.isinf(series), np.inf), middle, deviation


def scaled(metrics: pd.DataFrame, tag: str) -> pd.Series:
    """Return a series as it is compared, without empty rows."""
    series = metrics[tag].dropna()
    positive = parsed_tag(tag).statistic not in LINEAR and (series > 0).all()
    return np.log(series) if positive else series


def together(score: pd.Series) -> pd.Series:
    """Return by how much `IN_A_ROW` values exceed a threshold on one side, at the first of them."""
    sides = [one.rolling(IN_A_ROW).min().shift(1 - IN_A_ROW) for one in (score, -score)]
    return pd.concat(sides, axis=1).max(axis=1).mask(np.isinf(score), np.inf)


def thresholds(traces: Sequence[Trace]) -> dict[str, float]:
    """Return for each statistic the largest score of the healthy runs of the side "develop"."""
    found: dict[str, float] = {}
    for trace in traces:
        if trace.healthy and trace.side == "develop":
            for tag in compared(trace.metrics):
                score = together(scores(scaled(trace.metrics, tag))[0]).loc[SETTLED:].max()
                name = parsed_tag(tag).statistic
                found[name] = max(found.get(name, 0.0), round(float(score), 3))
    return found


def departures(metrics: pd.DataFrame, limits: Mapping[str, float]) -> list[Departure]:
    """Return the first departure of each series, in the order of their steps; at one step, the largest first."""
    found = []
    for tag in compared(metrics):
        series = scaled(metrics, tag)
        if parsed_tag(tag).statistic not in limits or len(series) < SHORT:
            continue
        score, middle, deviation = scores(series)
        limit = limits[parsed_tag(tag).statistic]
        outside = (together(score) > limit) & ((score.index >= SETTLED) | np.isinf(series))
        if not outside.any():
            continue
        at = outside.idxmax()
        side = 1 if score[at] > 0 else -1
        center, edge = float(middle[at]), float(middle[at] + side * limit * deviation[at])
        later = series.loc[at:]
        inside = side * later < side * edge
        calm = inside.rolling(IN_A_ROW).min().shift(1 - IN_A_ROW) == 1
        back = int(str(calm.idxmax())) if calm.any() else None
        logs = (metrics[tag].dropna() > 0).all() and parsed_tag(tag).statistic not in LINEAR
        center, edge = (float(np.exp(center)), float(np.exp(edge))) if logs else (center, edge)
        found.append(
            (-abs(float(score[at])) / limit, Departure(int(str(at)), tag, float(metrics[tag][at]), center, edge, back))
        )
    return [one for _, one in sorted(found, key=lambda pair: (pair[1].step, pair[0]))]
