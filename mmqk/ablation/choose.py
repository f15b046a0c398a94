"""Which learning rate is best for an arm, from runs that decide nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmqk.store import UserError


@dataclass(frozen=True)
class Choice:
    """A learning rate and what it was chosen by: the mean of a metric over seeds at each one that was tried."""

    arm: str
    lr: float
    metric: str
    values: Mapping[float, float]

    @property
    def edge(self) -> str:
        """A sentence when the best learning rate is an end of the grid, beyond which a better one may lie."""
        ends = {min(self.values): "smallest", max(self.values): "largest"}
        if len(self.values) < 2 or self.lr not in ends:
            return ""
        return f"{self.arm}: its best learning rate, {self.lr:g}, is the {ends[self.lr]} of the grid: widen lr.grid"

    def record(self) -> dict[str, Any]:
        """As ablation.json holds it; a value that is not finite is null."""
        values = {f"{lr:.12g}": v if math.isfinite(v) else None for lr, v in self.values.items()}
        return {**asdict(self), "values": values}


def choose(arm: str, metric: str, tried: Mapping[float, Sequence[Path]]) -> Choice:
    """The best learning rate: by the mean over seeds, at the end of the metric that is not its worst.

    A run that has no such number, or none that is finite, ranks worst. The smaller of two equal ones is chosen.

    Args:
        tried: finished run folders, one a seed, by learning rate.

    Raises:
        UserError: there is no such metric, or no run has it.
    """
    values = {lr: _mean([_measure(metric, path) for path in paths]) for lr, paths in sorted(tried.items())}
    if all(math.isnan(value) for value in values.values()):
        raise UserError(
            f"no run that should choose the learning rate of {arm} has a {metric}: name another lr.metric, such as"
            " final_loss"
        )
    sign = -1.0 if _metric(metric).worst == "low" else 1.0
    best = min(values, key=lambda lr: (sign * values[lr] if math.isfinite(values[lr]) else math.inf, lr))
    return Choice(arm, best, metric, values)


def check_metric(name: str) -> None:
    """Refuse a metric that is none.

    Raises:
        UserError: it is unknown.
    """
    _metric(name)


def _metric(name: str) -> Any:
    from mmqk.analysis.metrics import find_metric

    try:
        return find_metric(name)[0]
    except UserError:
        if "/" in name:
            raise
        return find_metric(f"{name}/text")[0]  # it needs a modality: the mean over them


def _measure(name: str, folder: Path) -> float:
    from mmqk.analysis.runs import load_runs

    run = next(run for run in load_runs(folder) if run.path.resolve() == folder.resolve())
    metric = _metric(name)
    modality = name.partition("/")[2]
    if modality or not metric.by_modality:
        return float(metric.measure(run, modality or None))
    modalities = sorted({t.modality for t in run.tags.values() if t.statistic == "loss" and t.modality})
    return _mean([float(metric.measure(run, m)) for m in modalities])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
