"""Each arm at the learning rate that is best for it: how it was chosen, and whether the choice can be trusted.

Runs with the role "selection" choose and do nothing else. Two arms that are the same may still choose different rates
by chance, and most of what is measured depends on the rate: a verdict would then be one about luck. So arms at
different rates are compared only where the selection runs tell these rates apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmqk.analysis.metrics import FamilyMetric, find_metric, is_trained
from mmqk.analysis.runs.load import Run
from mmqk.analysis.stats.effects import quantile_t
from mmqk.analysis.verdicts.study import RATE, RATE_METRIC, Arm, Study, modalities_of
from mmqk.store import UserError

# Of calling two rates different that are not, over all pairs of rates that two arms may choose.
ERROR = 0.01


@dataclass(frozen=True)
class BestRate:
    """The learning rate of an arm.

    Attributes:
        rate: the best one.
        means: the metric by rate, the mean over seeds, infinite at its bad end where a run diverged.
        values: the metric by rate, of every seed.
        high_is_bad: which way is better.
    """

    rate: float
    means: Mapping[float, float]
    values: Mapping[float, tuple[float, ...]]
    high_is_bad: bool

    @property
    def at_edge(self) -> bool:
        """Whether a better one may lie outside of what was tried."""
        return self.rate in (min(self.means), max(self.means))

    def loss(self, rate: float) -> float:
        """How much worse a rate is than the best, infinite where it diverged or was not tried."""
        bad = self.means.get(rate, math.inf if self.high_is_bad else -math.inf)
        return (bad - self.means[self.rate]) * (1 if self.high_is_bad else -1)


def value_of(run: Run, metric: str) -> float:
    """The metric by which rates are chosen; a metric by modality that names none is the mean over what is trained.

    Infinite at the metric's bad end for a run that diverged or has no finite value.
    """
    known: dict[str, float] = run.__dict__.setdefault("_chosen_by", {})
    if metric not in known:
        known[metric] = _value(run, metric)
    return known[metric]


def _value(run: Run, metric: str) -> float:
    base, _, modality = metric.partition("/")
    named = [metric]
    if not modality and base in ("final_loss", "final_excess"):
        named = [f"{base}/{m}" for m in modalities_of([run]) if is_trained(run, m)]
    values, worst = [], math.inf
    for name in named:
        found, of = find_metric(name)
        if isinstance(found, FamilyMetric):
            raise UserError(f"lr.metric is {metric}, a number of several runs: name one of a single run")
        worst = math.inf if found.worst == "high" else -math.inf
        values.append(found.measure(run, of))
    value = float(np.mean(values)) if values else math.nan
    return worst if run.status.status == "diverged" or not math.isfinite(value) else value


def choose(runs: Sequence[Run], metric: str = RATE_METRIC) -> BestRate | None:
    """The best learning rate of finished selection runs of one arm; None without any that ended with a number.

    The mean over seeds counts; of rates that are equal, the lowest.
    """
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        if run.status.finished:
            rate = float(run.point.get(RATE, run.setting(RATE, math.nan)))
            by_rate.setdefault(rate, []).append(value_of(run, metric))
    if not by_rate:
        return None
    high = _high_is_bad(metric)
    means = {rate: float(np.mean(by_rate[rate])) for rate in sorted(by_rate)}
    best = min(means, key=lambda rate: means[rate] if high else -means[rate])
    if not math.isfinite(means[best]):
        return None
    return BestRate(best, means, {rate: tuple(by_rate[rate]) for rate in means}, high)


def _high_is_bad(metric: str) -> bool:
    base, _, modality = metric.partition("/")
    by_modality = base in ("final_loss", "final_excess")
    return find_metric(f"{base}/text" if by_modality and not modality else metric)[0].worst == "high"


def distinguishable(first: BestRate, second: BestRate, verdict_values: Sequence[Sequence[float]]) -> bool:
    """Whether selection runs show that the best rates of two arms are different ones.

    What both arms would lose together by exchanging rates, against its standard error. The spread over seeds is
    pooled over the selection runs and ``verdict_values``, the same metric of each arm's verdict runs.

    Args:
        first: the choice of one arm.
        second: that of the other.
        verdict_values: the metric by seed, of each arm.
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


def metric_of(study: Study, arm: Arm) -> str:
    """What the learning rate of an arm was chosen by."""
    return study.rate_metrics.get(arm.name) or study.rate_metrics.get("") or RATE_METRIC


def chosen(study: Study, arm: Arm) -> BestRate | None:
    """The choice of an arm; None when no runs chose."""
    return choose(study.selection(arm), metric_of(study, arm))
