"""How near a run is to the failing runs of the zoo, by its loss, gradient norm and largest attention logit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from mmqk.store.metrics import parsed_tag

COMPARED = ("loss", "grad_norm", "attn_logit_absmax")
TENTHS = 10
FEWEST = 20  # values of a series

Shape = Mapping[str, Sequence[float]]


def shape(metrics: pd.DataFrame) -> dict[str, list[float]] | None:
    """Return what is compared of a run; None if one of the series is missing.

    The medians of ten equal parts of the run and the maximum, in logarithms: of the loss and the gradient norm
    relative to the first part, of the logit as they are; and the logarithm of the standard deviation of the steps of
    the loss and of the gradient norm.
    """
    parts: dict[str, list[float]] = {}
    edges = np.linspace(metrics.index[0], metrics.index[-1], TENTHS + 1)
    for name in COMPARED:
        tags = [t for t in metrics if parsed_tag(t).statistic == name and (name == COMPARED[2] or t == name)]
        values = metrics[[tag for tag in tags if parsed_tag(tag).head is None]].max(axis=1).dropna()
        logs = np.log(values[(values > 0) & np.isfinite(values)])
        levels = [logs[(logs.index >= a) & (logs.index <= b)].median() for a, b in itertools.pairwise(edges)]
        if len(logs) < FEWEST or np.isnan(levels).any():
            return None
        if name == COMPARED[2]:
            parts[name] = [*levels, logs.max()]
        else:
            parts[name] = [level - levels[0] for level in [*levels[1:], logs.max()]]
            parts[f"{name} noise"] = [math.log(logs.diff().std() + 1e-6)]
    return {name: [round(float(value), 4) for value in values] for name, values in parts.items()}


def distance(a: Shape, b: Shape) -> float:
    """Return the mean over the series of the root mean square of their differences."""
    return float(np.mean([np.sqrt(np.mean(np.subtract(a[name], b[name]) ** 2)) for name in a]))


def nearest(of: Shape, zoo: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return the failures of the zoo and the distance of the nearest run of each, the nearest first."""
    found: dict[str, float] = {}
    for run in zoo:
        found[run["failure"]] = min(found.get(run["failure"], math.inf), distance(of, run["shape"]))
    return sorted(found.items(), key=lambda item: item[1])
