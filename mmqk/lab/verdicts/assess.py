"""Assess one claim from its runs alone.

The module `verdicts` then corrects for the family of the claim and makes the checks that need other claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from mmqk.lab.formatting import capital, listed, plural
from mmqk.lab.grid.claims import Claim
from mmqk.lab.metrics import FamilyMetric, Measured, Metric, find_metric, is_trained, metric_value
from mmqk.lab.metrics.outcomes import divergence_step, failure_step, outcomes
from mmqk.lab.runs import Run
from mmqk.lab.stats.effects import Effect, Spread, auroc, paired_effect, pooled_spread
from mmqk.lab.stats.exact import AnyEffect, Counts, p_over_looks, sign_flip
from mmqk.lab.verdicts.controls import (
    Control,
    enough_seeds,
    only_declared_differences,
    rates,
    regime_reached,
    within_bound,
)
from mmqk.lab.verdicts.study import Compared, Group, Study, compare, group, share_history


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
    treatment = compared.pair[0].arms[0]
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


# Metrics that measure the time of an event, and the functions that return the step of the event.
EVENTS: dict[str, Callable[[Run], int | None]] = {
    "time_of_failure": failure_step,
    "time_of_divergence": divergence_step,
}


def times_to_failure(runs: Iterable[Run], metric: str) -> tuple[list[float], list[bool]]:
    """Return, for each run, the step of the event (the last step if there was none), and whether the event
    happened."""
    steps = [(EVENTS[metric](run), run.last_step) for run in runs]
    return [float(last if step is None else step) for step, last in steps], [step is not None for step, _ in steps]


FEWEST_FLIPPED = 6
# A smaller standard error, relative to the effect, is rounding: the runs of each arm have equal values.
SMALLEST_ERROR = 1e-9
MOST_NAMED = 2


@dataclass(frozen=True)
class Assessment:
    """One claim before the correction for its family and before the checks that need other claims.

    Attributes:
        claim: the claim as registered.
        compared: the compared runs.
        effect: treatment relative to control on the metric's scale: a log ratio or a difference. For a claim that
            counts runs, it is a difference of shares; for a prediction, the AUROC. None if it was not measured.
        spread: spread over seeds within arms.
        medians: median of the metric over the finished runs, by arm or family; for a claim that counts runs, the
            share of counted runs.
        controls: the checks that need no other claim.
        notes: sentences for the page.
        open: why the runs cannot decide the claim, whatever the effect is; empty if they can.
        bounded: why the unknown values of failed runs prevent a verdict; empty if they do not.
        holds: whether the effect lies on the claimed side of the smallest effect of interest.
        p: two-sided p-value of the hypothesis that the true effect is the smallest effect of interest, before the
            correction; NaN if it cannot be computed.
        sign_flip: p-value of the exact sign-flip test, with 6 seeds or more; else NaN.
        counts: (counted runs, all runs) by arm or family, for a claim that counts runs.
        bounds: number of failed runs that get the worst finite value; if above 0, the effect is a bound.
    """

    claim: Claim
    compared: Compared
    effect: AnyEffect | None = None
    spread: Spread | None = None
    medians: Mapping[str, float] = field(default_factory=dict)
    controls: tuple[Control, ...] = ()
    notes: tuple[str, ...] = ()
    open: str = ""
    bounded: str = ""
    holds: bool = False
    p: float = math.nan
    sign_flip: float = math.nan
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    bounds: int = 0

    @property
    def p_in_family(self) -> float:
        """The p-value that the family correction uses: corrected for all looks, and 1 if the runs cannot
        decide the claim."""
        if self.open or self.bounded or math.isnan(self.p) or not all(c.passed for c in self.controls):
            return 1.0
        return p_over_looks(self.p, self.claim.seeds, self.claim.max_seeds) if self.claim.stopping else self.p


def assess(study: Study, claim: Claim) -> Assessment:
    """Assess one claim from its runs."""
    compared = compare(study, claim)
    if claim.not_run or any(not members.runs for members in compared.groups.values()):
        return Assessment(claim, compared)
    if claim.decided and claim.test == "count":
        return _counted(compared)
    if claim.decided and claim.test == "prediction":
        return _predicted(compared)
    table = measure(compared.groups, claim.metric)
    medians = {name: middle(table["raw"][table["group"] == name]) for name in compared.groups}
    bounds = table["group"][table["towards"] != 0].value_counts(sort=False)
    notes = [
        f"{plural(n, 'run')} of “{compared.groups[str(name)].label}” diverged or ended without a finite value "
        "and got the worst finite value: the effect is a bound."
        for name, n in bounds.items()
    ]
    treatment, control = by_seed(table, claim.treatment), by_seed(table, claim.control)
    if not claim.decided:
        controls = tuple(filter(None, [within_bound(compared.runs)]))
        shown = paired_effect(treatment, control, None)
        # Without an effect there is no bound.
        return Assessment(claim, compared, shown, None, medians, controls, tuple(notes if shown else ()))
    # An arm without failures has no spread in time, so times of events have no pooled spread.
    spread = None if claim.metric in EVENTS else pooled_spread(spread_outcomes(compared, table))
    effect = paired_effect(treatment, control, spread, share_history(*compared.pair))
    controls, rate_notes = _controls(compared)
    open_ = _registered(compared) or _measured(table, effect)
    assessment = Assessment(
        claim, compared, effect, spread, medians, controls, (*notes, *rate_notes), open_, bounds=int(bounds.sum())
    )
    if open_ or effect is None:
        return assessment
    holds, nearest, p = _side(claim, effect)
    flipped = sign_flip(np.array(effect.differences) - nearest) if effect.n >= FEWEST_FLIPPED else math.nan
    return replace(assessment, bounded=_bounded(claim, table, effect, holds), holds=holds, p=p, sign_flip=flipped)


def _side(claim: Claim, effect: AnyEffect) -> tuple[bool, float, float]:
    """Return (whether the effect is on the claimed side, the nearest threshold, the p-value at that threshold)."""
    nearest = min(claim.thresholds, key=lambda threshold: abs(effect.value - threshold))
    if claim.test == "equivalence":
        # There is one one-sided test per threshold, and the nearer threshold gives the larger p-value.
        return abs(effect.value) < claim.min_effect, nearest, effect.p_at(nearest)
    return claim.sign * effect.value > claim.min_effect, nearest, effect.p_at(nearest)


def _registered(compared: Compared) -> str:
    """Return how the numbers of runs or seeds differ from the registered numbers; empty if they do not."""
    claim, groups = compared.claim, compared.groups.values()
    for members in groups:
        if len(members.all) < members.planned:
            return f"{len(members.all)} of {plural(members.planned, 'planned run')} of “{members.label}” finished."
    for members in groups if claim.seeds else ():
        if members.seeds < claim.seeds:
            return f"Registered for {plural(claim.seeds, 'seed')} per arm; “{members.label}” has {members.seeds}."
        if members.seeds > claim.max_seeds:
            return (
                f"Registered for at most {plural(claim.max_seeds, 'seed')} per arm; “{members.label}” has "
                f"{members.seeds}: to add seeds after seeing results, set stopping in the claim."
            )
    return ""


def _measured(table: pd.DataFrame, effect: Effect | None) -> str:
    """Return why the values give no interval; empty if they do."""
    if why := _without(list(filter(None, table["missing"]))):
        return why
    if effect is None:
        return "No compared run has a finite value." if table["towards"].any() else "The two arms share no seed."
    if not effect.has_interval:
        return "Too few seeds for an interval."
    if effect.of != "differences" and effect.error <= SMALLEST_ERROR * max(1.0, abs(effect.value)):
        return "All runs of an arm have the same value, so there is no spread for an interval: test counts of runs."
    return ""


def _without(unmeasured: Sequence[str], most: int = MOST_NAMED) -> str:
    """Return a sentence that names the first runs without a value; empty if all runs have a value."""
    more = [f"{len(unmeasured) - most} more"] if len(unmeasured) > most else []
    return f"Without a value: {listed([*unmeasured[:most], *more])}." if unmeasured else ""


def _bounded(claim: Claim, table: pd.DataFrame, effect: Effect, holds: bool) -> str:
    """Return why the unknown values of failed runs could change the verdict; empty if they could not."""
    # `towards` has the directions in which the true effect may differ from the bound. `away` is the direction from
    # the bound to the threshold.
    signs = table["group"].map({claim.treatment: 1, claim.control: -1})
    towards = set(signs * table["towards"]) - {0}
    if claim.test == "equivalence" and holds:
        return "The true effect may be larger, because values of failed runs are bounds." if towards else ""
    direction = 1 if effect.value > 0 else -1
    away = -direction if claim.test == "equivalence" else -claim.sign if holds else claim.sign
    if away not in towards:
        return ""
    smaller = holds or claim.test == "equivalence"
    return f"The true effect may be {'smaller' if smaller else 'larger'}, because values of failed runs are bounds."


def _controls(compared: Compared) -> tuple[tuple[Control, ...], list[str]]:
    """Return the checks that the claim does not turn off, and notes with the learning rates."""
    rate_controls, rate_note = rates(compared)
    checks = {
        "learned": regime_reached(compared),
        "declared": only_declared_differences(compared, bool(rate_note)),
        "seeds": enough_seeds(compared),
        "bound": within_bound(compared.runs),
    }
    made = [check for name, check in checks.items() if check and name not in compared.claim.unchecked]
    return (*made, *rate_controls), [rate_note] if rate_note else []


def _counted(compared: Compared) -> Assessment:
    """Assess a claim about the number of runs that diverge or reach a value."""
    claim = compared.claim
    counted = {name: [_counts(claim, run) for run in of.all] for name, of in compared.groups.items()}
    counts = {name: (of.count(True), len(of)) for name, of in counted.items()}
    unmeasured = [
        f"“{members.label}” seed {run.seed}"
        for name, members in compared.groups.items()
        for run, one in zip(members.all, counted[name], strict=True)
        if one is None
    ]
    effect = Counts(*counts[claim.treatment], *counts[claim.control])
    controls, rate_notes = _controls(compared)
    holds, _, p = _side(claim, effect)
    return Assessment(
        claim,
        compared,
        effect,
        medians={name: count / n for name, (count, n) in counts.items()},
        controls=controls,
        notes=tuple(rate_notes),
        open=_registered(compared) or _without(unmeasured),
        holds=holds,
        # Fisher's exact test must also reject equal shares. If min_effect is small, its p-value is the larger one.
        p=max(p, effect.fisher) if holds else p,
        counts=counts,
    )


def _predicted(compared: Compared) -> Assessment:
    """Assess the claim that a metric predicts which runs of an arm fail, by its AUROC over pairs of runs of one arm.

    A run fails if it diverged, stalled or did not learn a trained modality (`mmqk.lab.metrics.outcomes`); whether
    it stalled depends on the best of the compared runs. A metric that differs between arms but not within an arm,
    such as the learning rate, has an AUROC of 0.5.
    """
    claim, runs, groups = compared.claim, compared.runs, compared.groups.items()
    scores = {run.name: metric_value(run, claim.metric) for run in runs}
    failed = {run.name: end.kind != "well" for run, end in zip(runs, outcomes(runs), strict=True)}
    assessment = Assessment(
        claim,
        compared,
        medians={name: middle(scores[run.name] for run in of.all) for name, of in groups},
        controls=tuple(filter(None, [within_bound(runs)])),
        counts={name: (sum(failed[run.name] for run in of.all), len(of.all)) for name, of in groups},
    )
    if unmeasured := [f"{run.arm} seed {run.seed}" for run in runs if math.isnan(scores[run.name])]:
        return replace(assessment, open=_without(unmeasured, len(unmeasured)))
    effect = auroc([scores[run.name] for run in runs], [failed[run.name] for run in runs], [run.arm for run in runs])
    why = f"{capital(effect.why)}." if effect.why else ""
    if math.isnan(effect.value):
        return replace(assessment, open=why)
    holds, _, p = _side(claim, effect)
    return replace(assessment, effect=effect, open=_registered(compared) or why, holds=holds, p=p)


def _counts(claim: Claim, run: Run) -> bool | None:
    """Return whether the run diverged or its metric reached `at_least` of the claim; None if it was not measured.

    If the metric has an exact value for diverged runs, only this value decides whether a diverged run counts."""
    metric, _ = find_metric(claim.metric)
    exact = isinstance(metric, Metric) and metric.counts_failures and not math.isnan(claim.at_least)
    if run.status.status == "diverged" and not exact:
        return True
    if math.isnan(claim.at_least) or not isinstance(metric, Metric):
        return False
    value = metric_value(run, claim.metric)
    if math.isnan(value):
        return None
    return value >= claim.at_least if metric.worst == "high" else value <= claim.at_least
