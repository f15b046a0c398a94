"""What the runs of the bench show about signs, alarms and remedies, for ``mmqk diagnose``: evidence.json, which
docs/experiments/bench_evidence.py writes; and how near a run is to the failing runs of the zoo.

For each run, the file has the first step of each sign and alarm, as logged and thinned, with the losses by modality
and without. `Rates` counts them for the statistics and the spacing of one log.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mmqk.bench.kinds import SIGNS, show_failure
from mmqk.bench.traces import LASTING
from mmqk.store import parse_tag

FILE = Path(__file__).with_name("evidence.json")
SPACINGS = (1, 10, 50)  # steps between two rows of a log


@cache
def evidence() -> dict[str, Any]:
    """Return the content of evidence.json."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


class Rates:
    """How often signs and alarms are right on the runs of a side, when they read a log like the given one.

    Args:
        side: "develop" or "judge".
        statistics: the statistics of the log.
        every: the steps between two rows of the log; the next smaller one of `SPACINGS` is used.
        split: whether the log has the losses by modality.
    """

    def __init__(self, side: str, statistics: Set[str], every: float, split: bool) -> None:
        spacing = max(n for n in SPACINGS if n <= max(1, every))
        runs = [run for run in evidence()["runs"] if run["side"] == side]
        self.kinds = [run["kind"] for run in runs]
        logs = [run["logs"].get(f"{spacing} {'modality' if split else 'whole'}", {}) for run in runs]
        alarms = [log.get("alarms", {}).items() for log in logs]
        self.alarms = [{key: late for key, late in of if key.split()[1] in statistics} for of in alarms]
        lasting = [any(key.split()[0] in LASTING for key in of) for of in self.alarms]
        signs = [log.get("signs", {}) for log in logs]
        self.first = [first_sign(of, statistics, alarmed) for of, alarmed in zip(signs, lasting, strict=True)]
        self.faults, self.healthy = sum(map(bool, self.kinds)), sum(not kind for kind in self.kinds)

    def sign(self, name: str) -> dict[str, int]:
        """Return how often a sign comes first: ``named``, in runs with a fault; ``right``, in runs of its kind;
        ``runs`` of its kind; and ``accused`` of all ``healthy`` runs."""
        kind = name.split()[0]
        named = [true for true, first in zip(self.kinds, self.first, strict=True) if first == name]
        return {
            "right": named.count(kind), "named": sum(map(bool, named)), "runs": self.kinds.count(kind),
            "accused": named.count(""), "healthy": self.healthy,
        }  # fmt: skip

    def right(self) -> int:
        """Return the number of runs whose first sign names their kind."""
        return sum(first.split()[:1] == [kind] for kind, first in zip(self.kinds, self.first, strict=True) if kind)

    def accused(self) -> int:
        """Return the number of healthy runs with a sign."""
        return sum(bool(first) for kind, first in zip(self.kinds, self.first, strict=True) if not kind)

    def alarm(self, name: str) -> dict[str, int]:
        """Return in how many runs with a fault an alarm begins after the fault (``hits`` of ``faults``), and how many
        of the ``healthy`` runs have one (``accused``)."""
        mine = [[late for key, late in of.items() if key.split()[0] == name] for of in self.alarms]
        hits = sum(any(late) for kind, late in zip(self.kinds, mine, strict=True) if kind)
        accused = sum(bool(late) for kind, late in zip(self.kinds, mine, strict=True) if not kind)
        return {"hits": hits, "faults": self.faults, "accused": accused, "healthy": self.healthy}


def first_sign(steps: Mapping[str, int], statistics: Set[str], alarmed: bool) -> str:
    """Return the name of the first of the signs that read these statistics; empty if they show no failure. Facts
    do not matter here: no run of the bench with the sign of warm-up has one."""
    order = [sign.name for sign in SIGNS]
    readable = [name for name in steps if set(name.split()[1:]) <= statistics]
    if not show_failure([name.split()[0] for name in readable], alarmed):
        return ""
    return min(readable, key=lambda name: (steps[name], order.index(name)), default="")


# The zoo ------------------------------------------------------------------------------------------------------------

SHAPED = ("loss", "grad_norm", "attn_logit_absmax")
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
    for name in SHAPED:
        tags = [t for t in metrics if parse_tag(t).statistic == name and (name == SHAPED[2] or t == name)]
        values = metrics[[tag for tag in tags if parse_tag(tag).head is None]].max(axis=1).dropna()
        logs = np.log(values[(values > 0) & np.isfinite(values)])
        levels = [logs[(logs.index >= a) & (logs.index <= b)].median() for a, b in itertools.pairwise(edges)]
        if len(logs) < FEWEST or np.isnan(levels).any():
            return None
        if name == SHAPED[2]:
            parts[name] = [*levels, logs.max()]
        else:
            parts[name] = [level - levels[0] for level in [*levels[1:], logs.max()]]
            parts[f"{name} noise"] = [math.log(logs.diff().std() + 1e-6)]
    return {name: [round(float(value), 4) for value in values] for name, values in parts.items()}


def nearest(of: Shape, zoo: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return the failures of the zoo and the distance of the nearest run of each, the nearest first. A distance is the
    mean over the series of the root mean square of their differences."""
    found: dict[str, float] = {}
    for run in zoo:
        far = [np.sqrt(np.mean(np.subtract(values, run["shape"][name]) ** 2)) for name, values in of.items()]
        found[run["failure"]] = min(found.get(run["failure"], math.inf), float(np.mean(far)))
    return sorted(found.items(), key=lambda item: item[1])
