"""The values of a claim's metric by arm and seed, the times of failures, and the best learning rate of each arm.

In tests of times to failure, a run that did not fail is censored at its last step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from mmqk.lab.effects import pooled_spread, quantile_t
from mmqk.lab.metrics import METRICS, FamilyMetric, Metric, find_metric, metric_value
from mmqk.lab.metrics.families import Measured, learning_rate
from mmqk.lab.metrics.outcomes import failure_step, is_trained, trained_modalities
from mmqk.lab.runs import Run, once_per_run
from mmqk.lab.study import RATE_METRIC, Compared, Group, Study, StudyArm, group
from mmqk.store import UserError

TIME = "time_of_failure"  # the metric that has a log-rank test


def measure(groups: Mapping[str, Group], name: str) -> pd.DataFrame:
    """Return the metric ``name`` for every group and seed.

    Returns:
        One row per group and seed. ``raw`` is the measured value, and ``value`` the value on the metric's scale; for
        a failed run it is the worst finite value of all groups, and NaN without one; a family keeps its bound.
        ``towards`` is 1 if the true value is higher than ``value``, -1 if it is lower, and 0 if it was measured.
        ``missing`` names a run without a value and the reason, if it is known.
    """
    metric, modality = find_metric(name)
    rows, worst = [], []
    for key, members in groups.items():
        for seed, runs in sorted(members.runs.items()):
            if isinstance(metric, FamilyMetric):
                measured = metric.measured(runs, modality, [arm.point for arm in members.arms])
            else:
                measured = Measured(metric_value(runs[0], name))
            value = metric.on_scale(measured.value)
            towards = measured.towards or _bound(metric, runs, measured.value)
            if towards and isinstance(metric, Metric):
                worst.append(metric.on_scale(metric.worst_seen(runs[0], modality)))
            missing = f"“{members.label}” seed {seed}" if math.isnan(value) and not towards else ""
            missing += f" ({measured.why})" if missing and measured.why else ""
            rows.append((key, seed, measured.value, value, towards, missing))
    table = pd.DataFrame(rows, columns=["group", "seed", "raw", "value", "towards", "missing"])
    finite = [value for value in (*table["value"], *worst) if math.isfinite(value)] or [math.nan]
    replaced = np.isinf(table["value"]) if isinstance(metric, FamilyMetric) else table["towards"] != 0
    table.loc[replaced & (table["towards"] > 0), "value"] = max(finite)
    table.loc[replaced & (table["towards"] < 0), "value"] = min(finite)
    return table


def by_seed(table: pd.DataFrame, name: str) -> dict[int, float]:
    """Return the values of a group by seed, without those that are NaN."""
    found = table[(table["group"] == name) & table["value"].notna()]
    return dict(zip(found["seed"].tolist(), found["value"].tolist(), strict=True))


def _bound(metric: Metric | FamilyMetric, runs: Iterable[Run], value: float) -> int:
    """Return 1 if the true value is higher than the value that replaces it, -1 if lower, 0 if it was measured."""
    if math.isinf(value):
        return 1 if value > 0 else -1
    if isinstance(metric, FamilyMetric) or metric.counts_failures:
        return 0
    failed = any(run.status.status == "diverged" for run in runs)
    return 0 if not failed else 1 if metric.worst == "high" else -1


def spread_outcomes(compared: Compared, table: pd.DataFrame) -> dict[str, list[float]]:
    """Return the outcomes from which the spread over seeds is computed: the outcomes of the compared groups and of
    all other arms of the same block at the same point. Values that are bounds are left out.

    An arm that does not train the modality of the metric is left out. Of several arms whose runs are identical until
    a fork, only the first is used.
    """
    study, claim = compared.study, compared.claim
    tables = {name: table for name in compared.groups}
    counted = {*compared.groups, *(arm.name for arm in compared.arms)}
    treatment = compared.treatment.arms[0]
    metric, modality = find_metric(claim.metric)
    if isinstance(metric, FamilyMetric):
        others = list(study.families.values())
    else:
        others = [arm for arm in study.arms.values() if arm.point == treatment.point]
    origins_used = {_origin(run) for run in compared.runs}
    for name in (arm.name for arm in others if arm.block == treatment.block and arm.name not in counted):
        other = group(study, claim, name)
        origins = {_origin(run) for run in other.all}
        trained = not modality or all(is_trained(run, modality) for run in other.all)
        if other.arms and trained and not origins & origins_used:
            origins_used |= origins
            tables[name] = measure({name: other}, claim.metric)
    return {name: list(by_seed(of[of["towards"] == 0], name).values()) for name, of in tables.items()}


def _origin(run: Run) -> str:
    """Return the name of the run at the start of a chain of forks; for a run that is not a fork, its own name."""
    while run.parent is not None:
        run = run.parent
    return str((run.fork or {}).get("parent") or run.name)


def middle(values: Iterable[float]) -> float:
    """Return the median of the values that are not NaN; NaN if all of them are."""
    numbers = [value for value in values if not math.isnan(value)]
    return statistics.median(numbers) if numbers else math.nan


def times_to_failure(runs: Iterable[Run]) -> tuple[list[float], list[bool]]:
    """Return, for each run, the step of the failure (the last step if there was none), and whether it failed."""
    steps = [(failure_step(run), run.last_step) for run in runs]
    return [float(last if step is None else step) for step, last in steps], [step is not None for step, _ in steps]


def kaplan_meier(times: Sequence[float], failed: Sequence[bool]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (times, share of runs that survive beyond each time), starting at time 0 (Kaplan and Meier 1958)."""
    curve = stats.ecdf(_censored(times, failed)).sf
    return np.concatenate([[0.0], curve.quantiles]), np.concatenate([[1.0], curve.probabilities])


def log_rank(
    times: Sequence[float], failed: Sequence[bool], others: Sequence[float], others_failed: Sequence[bool]
) -> float:
    """Return the two-sided p-value of the log-rank test of equal survival (Mantel 1966); NaN if no run failed."""
    if not any(failed) and not any(others_failed):
        return math.nan
    return float(stats.logrank(_censored(times, failed), _censored(others, others_failed)).pvalue)


def _censored(times: Sequence[float], failed: Sequence[bool]) -> stats.CensoredData:
    return stats.CensoredData.right_censored(np.asarray(times, dtype=float), ~np.asarray(failed, dtype=bool))


# The best learning rate of each arm, from selection runs.
#
# Runs with the role "selection" choose the learning rate, and no verdict uses them. Two equal arms can choose different
# learning rates by chance, and most metrics depend on the learning rate: a verdict would then depend on chance. So arms
# at different learning rates are compared only if the selection runs show that their best learning rates differ.

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
    cells = enumerate([*first.values.values(), *second.values.values(), *verdict_values])
    spread = pooled_spread({str(i): list(filter(math.isfinite, cell)) for i, cell in cells})
    used = [len(c.values.get(rate, ())) for c in (first, second) for rate in (first.rate, second.rate)]
    if spread is None or not all(used):
        return False
    error = spread.sd * math.sqrt(sum(1 / n for n in used))
    rates = len(first.means.keys() | second.means.keys())
    return loss > quantile_t(1 - ERROR / (rates * (rates - 1)), spread.df) * error


def chosen(study: Study, arm: StudyArm) -> BestRate | None:
    """Return the learning rate that the selection runs of an arm choose; None if none has finished."""
    return choose(study.selection(arm), study.rate_metrics[arm.name])
