"""The values of a claim's metric by arm and seed, and the times of failures.

In tests of times to failure, a run that did not fail is censored at its last step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from mmqk.lab.metrics import FamilyMetric, Metric, find_metric, metric_value
from mmqk.lab.metrics.families import Measured
from mmqk.lab.metrics.outcomes import failure_step, is_trained
from mmqk.lab.runs import Run
from mmqk.lab.study import Compared, Group, group

TIME = "time_of_failure"  # the metric that has a log-rank test


def measure(groups: Mapping[str, Group], name: str) -> pd.DataFrame:
    """Return the metric ``name`` for every group and seed.

    Returns:
        One row per group and seed. ``raw`` is the measured value, and ``value`` the value on the metric's scale; for
        a failed run it is the worst finite value of all groups, and NaN without one. ``towards`` is 1 if the true
        value is higher than ``value``, -1 if it is lower, and 0 if it was measured. ``missing`` names a run without a
        value and the reason, if it is known.
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
    table.loc[table["towards"] > 0, "value"] = max(finite)
    table.loc[table["towards"] < 0, "value"] = min(finite)
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
