"""Select the best learning rate of an arm from its selection runs, which do not count in the verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mmqk.store import UserError


@dataclass(frozen=True)
class ChosenRate:
    """A selected learning rate, and the mean of the metric over seeds at each learning rate tried."""

    arm: str
    lr: float
    metric: str
    values: Mapping[float, float]

    @property
    def edge(self) -> str:
        """A warning if the best learning rate is the smallest or largest one tried, otherwise empty."""
        ends = {min(self.values): "smallest", max(self.values): "largest"}
        if len(self.values) < 2 or self.lr not in ends:
            return ""
        return f"{self.arm}: its best learning rate, {self.lr:g}, is the {ends[self.lr]} of the grid: widen lr.grid"

    def record(self) -> dict[str, Any]:
        """Return the entry in ablation.json; a value that is not finite is null."""
        values = {f"{lr:.12g}": v if math.isfinite(v) else None for lr, v in self.values.items()}
        return {**asdict(self), "values": values}


def choose(arm: str, metric: str, tried: Mapping[Path, float]) -> ChosenRate:
    """Return the best learning rate by the rule of `mmqk.lab.verdicts.learning_rates`. If every run diverged,
    return the smallest learning rate.

    Args:
        tried: the learning rate of each finished run, by run folder.

    Raises:
        UserError: the metric is unknown, or no run has a finite value.
    """
    from mmqk.lab.runs.load import load_runs
    from mmqk.lab.verdicts.learning_rates import choose as best_of

    runs = [
        replace(run, point={"optim.lr": lr})
        for path, lr in tried.items()
        for run in load_runs(path)
        if run.path.resolve() == path.resolve()
    ]
    best = best_of(runs, metric)
    if best is None and all(run.status.status == "diverged" for run in runs):
        return ChosenRate(arm, min(tried.values()), metric, dict.fromkeys(sorted(tried.values()), math.nan))
    if best is None:
        raise UserError(
            f"no selection run of {arm} ended with a finite {metric}: name another lr.metric, such as final_loss, or"
            " lower learning rates"
        )
    return ChosenRate(arm, best.rate, metric, best.means)
