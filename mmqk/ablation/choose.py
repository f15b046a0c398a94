"""Which learning rate is best for an arm, from runs that decide nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mmqk.store import UserError


@dataclass(frozen=True)
class ChosenRate:
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


def choose(arm: str, metric: str, tried: Mapping[Path, float]) -> ChosenRate:
    """The best learning rate, by the rule with which verdicts check it (`analysis.verdicts.learning_rates`).

    Where every run diverged it is the smallest.

    Args:
        tried: finished run folders, and the learning rate of each.

    Raises:
        UserError: there is no such metric, or no run has a finite one.
    """
    from mmqk.analysis.runs.load import load_runs
    from mmqk.analysis.verdicts.learning_rates import choose as best_of

    runs = [
        replace(run, point={"optim.lr": lr})
        for path, lr in tried.items()
        for run in load_runs(path)
        if run.path.resolve() == path.resolve()
    ]
    found = best_of(runs, metric)
    if found is None and all(run.status.status == "diverged" for run in runs):
        return ChosenRate(arm, min(tried.values()), metric, dict.fromkeys(sorted(tried.values()), math.nan))
    if found is None:
        raise UserError(
            f"no run that should choose the learning rate of {arm} ended with a finite {metric}: name another"
            " lr.metric, such as final_loss, or lower learning rates"
        )
    return ChosenRate(arm, found.rate, metric, found.means)


def check_metric(name: str) -> None:
    """Refuse a metric that cannot choose.

    Raises:
        UserError: it is unknown, or a number of several runs.
    """
    from mmqk.analysis.metrics import FamilyMetric, find_metric

    try:
        found = find_metric(name)[0]
    except UserError:
        if "/" in name:
            raise
        found = find_metric(f"{name}/text")[0]  # it needs a modality: the mean over them
    if isinstance(found, FamilyMetric):
        raise UserError(f"lr.metric is {name}, a number of several runs: name one of a single run")
