"""The best learning rate of each arm, from selection runs.

Runs with the role "selection" choose the learning rate, and no verdict uses them. Two equal arms can choose different
learning rates by chance, and most metrics depend on the learning rate: a verdict would then depend on chance. So arms
at different learning rates are compared only if the selection runs show that their best learning rates differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmqk.lab.effects import quantile_t
from mmqk.lab.metrics import METRICS, FamilyMetric, Metric, find_metric, metric_value
from mmqk.lab.metrics.families import learning_rate
from mmqk.lab.metrics.outcomes import trained_modalities
from mmqk.lab.runs import Run, once_per_run
from mmqk.lab.study import RATE_METRIC, Study, StudyArm
from mmqk.store import UserError

# Probability that the test declares two equally good learning rates different, in total over all pairs of learning
# rates that two arms may choose.
ERROR = 0.01
# Metrics that need a modality; named without one, they are averaged over the trained modalities.
_AVERAGED = ("final_loss", "final_excess")


@dataclass(frozen=True)
class BestRate:
    """The chosen learning rate of an arm.

    Attributes:
        rate: the best learning rate.
        means: mean of the metric over seeds, by learning rate; if a run diverged, inf or -inf, whichever is worse.
        values: the metric of each seed, by learning rate.
        high_is_bad: whether a higher value of the metric is worse.
    """

    rate: float
    means: Mapping[float, float]
    values: Mapping[float, tuple[float, ...]]
    high_is_bad: bool

    @property
    def at_edge(self) -> bool:
        """Whether the best learning rate is the lowest or highest one that was tried."""
        return self.rate in (min(self.means), max(self.means))

    def loss(self, rate: float) -> float:
        """Return how much worse a learning rate is than the best; infinite if it was not tried or a run diverged."""
        bad = self.means.get(rate, math.inf if self.high_is_bad else -math.inf)
        return (bad - self.means[self.rate]) * (1 if self.high_is_bad else -1)


@once_per_run
def value_of(run: Run, metric: str) -> float:
    """Return the value of ``metric`` in one run, to select a learning rate.

    If the run diverged or has no finite value, the value is inf or -inf, whichever is worse. Final loss and final
    excess without a modality are averaged over the trained modalities.
    """
    worst = math.inf if selection_metric(metric).worst == "high" else -math.inf
    names = [f"{metric}/{m}" for m in trained_modalities(run)] if metric in _AVERAGED else [metric]
    value = float(np.mean([metric_value(run, name) for name in names])) if names else math.nan
    return worst if run.status.status == "diverged" or not math.isfinite(value) else value


def selection_metric(name: str) -> Metric:
    """Return the metric that selects a learning rate.

    Raises:
        UserError: the metric is unknown, needs a modality, or is computed from several runs.
    """
    needs_modality = name in METRICS and METRICS[name].by_modality
    if needs_modality and name not in _AVERAGED:
        raise UserError(f"lr.metric is {name}, which needs a modality: write for example {name}/text")
    metric, _ = find_metric(f"{name}/text" if needs_modality else name)
    if isinstance(metric, FamilyMetric):
        raise UserError(f"lr.metric is {name}, which needs several runs: name a metric of a single run")
    return metric


def choose(runs: Sequence[Run], metric: str = RATE_METRIC) -> BestRate | None:
    """Return the learning rate with the best mean over seeds, from the finished selection runs of one arm.

    Among learning rates with equal means, return the lowest; None if no mean is finite.
    """
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        if run.status.finished:
            by_rate.setdefault(learning_rate(run), []).append(value_of(run, metric))
    if not by_rate:
        return None
    high = selection_metric(metric).worst == "high"
    means = {rate: float(np.mean(by_rate[rate])) for rate in sorted(by_rate)}
    best = min(means, key=lambda rate: means[rate] if high else -means[rate])
    if not math.isfinite(means[best]):
        return None
    return BestRate(best, means, {rate: tuple(by_rate[rate]) for rate in means}, high)


def distinguishable(first: BestRate, second: BestRate, verdict_values: Sequence[Sequence[float]]) -> bool:
    """Return whether the selection runs show that the best learning rates of two arms differ.

    If the arms exchanged their learning rates, the metric of each would get worse by `BestRate.loss`. The test
    compares the sum of the two losses with its standard error. The spread over seeds is pooled over the selection
    runs and ``verdict_values``.

    Args:
        first: the choice of one arm.
        second: the choice of the other arm.
        verdict_values: for each arm, the values of the selection metric in its verdict runs.
    """
    if first.rate == second.rate:
        return True
    loss = first.loss(second.rate) + second.loss(first.rate)
    cells = [np.array(v) for c in (first, second) for v in c.values.values()]
    cells += [np.array(v) for v in verdict_values]
    cells = [cell[np.isfinite(cell)] for cell in cells]
    df = sum(len(cell) - 1 for cell in cells if len(cell) > 1)
    if not df:
        return False
    variance = sum(float(((cell - cell.mean()) ** 2).sum()) for cell in cells if len(cell) > 1) / df
    used = [len(c.values.get(rate, ())) for c in (first, second) for rate in (first.rate, second.rate)]
    if not all(used):
        return False
    error = math.sqrt(variance * sum(1 / n for n in used))
    rates = len(first.means.keys() | second.means.keys())
    return loss > quantile_t(1 - ERROR / (rates * (rates - 1)), df) * error


def metric_of(study: Study, arm: StudyArm) -> str:
    """Return the metric that chose the learning rate of an arm."""
    return study.rate_metrics.get(arm.name) or study.rate_metrics.get("") or RATE_METRIC


def chosen(study: Study, arm: StudyArm) -> BestRate | None:
    """Return the learning rate that the selection runs of an arm choose; None if none has finished."""
    return choose(study.selection(arm), metric_of(study, arm))
