"""Assess one claim from its runs alone.

The module `judge` then corrects for the family of the claim and makes the checks that need other claims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from mmqk.lab.counts import AnyEffect, Counts
from mmqk.lab.effects import Effect, Spread, auroc, paired_effect, pooled_spread, sign_flip
from mmqk.lab.formatting import capital, listed, plural
from mmqk.lab.grid.claims import Claim
from mmqk.lab.metrics import Metric, find_metric, metric_value
from mmqk.lab.metrics.outcomes import diverged, outcomes
from mmqk.lab.runs import Run
from mmqk.lab.study import Compared, share_history
from mmqk.lab.verdicts import effect_tested, say
from mmqk.lab.verdicts.checks import Check, checks_of, within_bound
from mmqk.lab.verdicts.measure import TIME, by_seed, measure, middle, spread_outcomes

FEWEST_FLIPPED = 6
# A smaller standard error, relative to the effect, is rounding: the runs of each arm have equal values.
SMALLEST_ERROR = 1e-9
MOST_NAMED = 2

Judgment = Literal["reproduced", "contradicted", "inconclusive", "not run"]


@dataclass(frozen=True)
class Adjusted:
    """The corrected level and p-value of a claim.

    Attributes:
        method: "Holm" or "Benjamini-Hochberg".
        claims: number of claims that share the level.
        alpha: two-sided level of the interval that decides this claim.
        p: adjusted p-value; the claim is decided if it is at most 0.05 (Holm) or 0.10 (Benjamini-Hochberg).
    """

    method: str
    claims: int
    alpha: float
    p: float


@dataclass(frozen=True)
class Verdict:
    """The verdict of one claim. `assess` sets the fields up to ``bounds``, `mmqk.lab.verdicts.judge.judge` the
    others.

    Attributes:
        compared: the claim and the compared runs.
        effect: treatment relative to control on the metric's scale: a log ratio or a difference. For a claim that
            counts runs, it is a difference of shares; for a prediction, the AUROC. None if it was not measured.
        spread: spread over seeds within arms.
        medians: median of the metric over the finished runs, by arm or family; for a claim that counts runs, the
            share of counted runs.
        checks: the checks that need no other claim; `judge` adds those that do.
        notes: sentences for the page.
        open: why the runs cannot decide the claim, whatever the effect is; empty if they can.
        bounded: why the unknown values of failed runs prevent a verdict; empty if they do not.
        holds: whether the effect lies on the claimed side of the smallest effect of interest.
        p: two-sided p-value of the hypothesis that the true effect is the smallest effect of interest, before the
            correction; NaN if it cannot be computed.
        sign_flip: p-value of the exact sign-flip test, with 6 seeds or more; else NaN.
        counts: (counted runs, all runs) by arm or family, for a claim that counts runs.
        bounds: number of failed runs that get the worst finite value; if above 0, the effect is a bound.
        verdict: reproduced, contradicted, inconclusive or not run.
        adjusted: level and p-value corrected for the family; None for a claim that is not decided.
        why: why the claim is inconclusive, one sentence; empty for every other verdict.
        detectable: the true effect that the first test of these seeds detects with 80 % power; NaN if unknown. For
            an equivalence: the smallest min_effect with 80 % power at a true effect of 0.
    """

    compared: Compared
    effect: AnyEffect | None = None
    spread: Spread | None = None
    medians: Mapping[str, float] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    open: str = ""
    bounded: str = ""
    holds: bool = False
    p: float = math.nan
    sign_flip: float = math.nan
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    bounds: int = 0
    verdict: Judgment = "inconclusive"
    adjusted: Adjusted | None = None
    why: str = ""
    detectable: float = math.nan

    @property
    def claim(self) -> Claim:
        """The claim as registered."""
        return self.compared.claim

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the compared runs."""
        return tuple(run.name for run in self.compared.runs)

    @property
    def badge(self) -> str:
        """The verdict; "shown" for a claim that never gets one."""
        return self.verdict if self.claim.decided or self.verdict == "not run" else "shown"

    @property
    def p_in_family(self) -> float:
        """The p-value that the family correction uses: 1 if the runs cannot decide the claim."""
        decidable = not (self.open or self.bounded or math.isnan(self.p)) and all(c.passed for c in self.checks)
        return self.p if decidable else 1.0

    def as_record(self) -> dict[str, Any]:
        """Return the entry in verdicts.json; missing numbers are null."""
        effect, adjusted, claim = self.effect, self.adjusted, self.claim
        with_interval = effect if effect is not None and effect.has_interval else None
        return {
            "claim": claim.id,
            "verdict": self.verdict,
            "effect": None if effect is None else _rounded(effect.value),
            "interval": with_interval and [_rounded(with_interval.low), _rounded(with_interval.high)],
            "tested": effect_tested(claim),
            "threshold": None if math.isnan(claim.min_effect) else claim.min_effect * claim.sign,
            "runs": list(self.runs),
            "controls": [asdict(check) for check in self.checks],
            "note": " ".join(self.notes),
            "why": self.why,
            "status": claim.status,
            "test": claim.test if claim.decided else None,
            "p": _rounded(self.p),
            "sign_flip": _rounded(self.sign_flip),
            "detectable": _rounded(self.detectable),
            "counts": {name: list(of) for name, of in self.counts.items()} or None,
            "adjusted": adjusted
            and with_interval
            and {
                "method": adjusted.method,
                "claims": adjusted.claims,
                "level": _rounded(1 - adjusted.alpha),
                "interval": [_rounded(end) for end in with_interval.interval(adjusted.alpha)],
                "p": _rounded(adjusted.p),
            },
        }


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def assess(compared: Compared) -> Verdict:
    """Assess one claim from its runs."""
    claim, verdict = compared.claim, Verdict(compared)
    if claim.not_run or any(not members.runs for members in compared.groups.values()):
        return verdict
    if claim.decided and claim.test == "count":
        return _counted(compared)
    if claim.decided and claim.test == "prediction":
        return _predicted(compared)
    table = measure(compared.groups, claim.metric)
    verdict = replace(verdict, medians={n: middle(table["raw"][table["group"] == n]) for n in compared.groups})
    bounds = table["group"][table["towards"] != 0].value_counts(sort=False)
    notes = [say("bound", runs=plural(n, "run"), arm=compared.groups[str(name)].label) for name, n in bounds.items()]
    treatment, control = by_seed(table, claim.treatment), by_seed(table, claim.control)
    if not claim.decided:
        checks = tuple(filter(None, [within_bound(compared.runs)]))
        shown = paired_effect(treatment, control, None)
        # Without an effect there is no bound.
        return replace(verdict, effect=shown, checks=checks, notes=tuple(notes if shown else ()))
    # An arm without failures has no spread in time, so times of failures have no pooled spread.
    spread = None if claim.metric == TIME else pooled_spread(spread_outcomes(compared, table))
    effect = paired_effect(treatment, control, spread, share_history(compared.treatment, compared.control))
    checks, rate_notes = checks_of(compared)
    verdict = replace(verdict, effect=effect, spread=spread, checks=checks, notes=(*notes, *rate_notes))
    why = _not_as_registered(compared) or _not_measured(table, effect)
    verdict = replace(verdict, open=why, bounds=int(bounds.sum()))
    if verdict.open or effect is None:
        return verdict
    holds, nearest, p = _side(claim, effect)
    flipped = sign_flip(np.array(effect.differences) - nearest) if effect.n >= FEWEST_FLIPPED else math.nan
    return replace(verdict, bounded=_bound_hides(claim, table, effect, holds), holds=holds, p=p, sign_flip=flipped)


def _side(claim: Claim, effect: AnyEffect) -> tuple[bool, float, float]:
    """Return (whether the effect is on the claimed side, the nearest threshold, the p-value at that threshold)."""
    nearest = min(claim.thresholds, key=lambda threshold: abs(effect.value - threshold))
    if claim.test == "equivalence":
        # There is one one-sided test per threshold, and the nearer threshold gives the larger p-value.
        return abs(effect.value) < claim.min_effect, nearest, effect.p_at(nearest)
    return claim.sign * effect.value > claim.min_effect, nearest, effect.p_at(nearest)


def _not_as_registered(compared: Compared) -> str:
    """Return how the numbers of runs or seeds differ from the registered numbers; empty if they do not."""
    claim, groups = compared.claim, compared.groups.values()
    for of in groups:
        if len(of.all) < of.planned:
            return say("planned", finished=len(of.all), planned=plural(of.planned, "planned run"), arm=of.label)
    for of in groups if claim.seeds else ():
        if of.seeds != claim.seeds:
            return say("seeds", seeds=plural(claim.seeds, "seed"), arm=of.label, planned=of.seeds)
    return ""


def _not_measured(table: pd.DataFrame, effect: Effect | None) -> str:
    """Return why the values give no interval; empty if they do."""
    if why := _without(list(filter(None, table["missing"]))):
        return why
    if effect is None:
        return say("not finite" if table["towards"].any() else "no shared seed")
    if not effect.has_interval:
        return say("no interval")
    if effect.of != "differences" and effect.error <= SMALLEST_ERROR * max(1.0, abs(effect.value)):
        return say("no spread")
    return ""


def _without(unmeasured: Sequence[str], most: int = MOST_NAMED) -> str:
    """Return a sentence that names the first runs without a value; empty if all runs have a value."""
    more = [f"{len(unmeasured) - most} more"] if len(unmeasured) > most else []
    return say("without a value", runs=listed([*unmeasured[:most], *more])) if unmeasured else ""


def _bound_hides(claim: Claim, table: pd.DataFrame, effect: Effect, holds: bool) -> str:
    """Return why the unknown values of failed runs could change the verdict; empty if they could not."""
    # `towards` has the directions in which the true effect may differ from the bound. `away` is the direction from
    # the bound to the threshold.
    signs = table["group"].map({claim.treatment: 1, claim.control: -1})
    towards = set(signs * table["towards"]) - {0}
    if claim.test == "equivalence" and holds:
        return say("larger") if towards else ""
    direction = 1 if effect.value > 0 else -1
    away = -direction if claim.test == "equivalence" else -claim.sign if holds else claim.sign
    if away not in towards:
        return ""
    return say("smaller" if holds or claim.test == "equivalence" else "larger")


def _counted(compared: Compared) -> Verdict:
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
    checks, rate_notes = checks_of(compared)
    holds, _, p = _side(claim, effect)
    # Fisher's exact test must also reject equal shares. If min_effect is small, its p-value is the larger one.
    p = max(p, effect.fisher) if holds else p
    medians = {name: count / n for name, (count, n) in counts.items()}
    why = _not_as_registered(compared) or _without(unmeasured)
    return Verdict(compared, effect, None, medians, checks, rate_notes, why, holds=holds, p=p, counts=counts)


def _predicted(compared: Compared) -> Verdict:
    """Assess the claim that a metric predicts which runs of an arm fail, by its AUROC over pairs of runs of one arm.

    A run fails if it diverged, stalled or did not learn a trained modality (`mmqk.lab.metrics.outcomes`); whether
    it stalled depends on the best of the compared runs. A metric that differs between arms but not within an arm,
    such as the learning rate, has an AUROC of 0.5.
    """
    claim, runs, groups = compared.claim, compared.runs, compared.groups.items()
    scores = {run.name: metric_value(run, claim.metric) for run in runs}
    failed = {run.name: end.kind != "well" for run, end in zip(runs, outcomes(runs), strict=True)}
    medians = {name: middle(scores[run.name] for run in of.all) for name, of in groups}
    counts = {name: (sum(failed[run.name] for run in of.all), len(of.all)) for name, of in groups}
    checks = tuple(filter(None, [within_bound(runs)]))
    verdict = Verdict(compared, medians=medians, checks=checks, counts=counts)
    if unmeasured := [f"{run.arm} seed {run.seed}" for run in runs if math.isnan(scores[run.name])]:
        return replace(verdict, open=_without(unmeasured, len(unmeasured)))
    effect = auroc([scores[run.name] for run in runs], [failed[run.name] for run in runs], [run.arm for run in runs])
    why = f"{capital(effect.why)}." if effect.why else ""
    if math.isnan(effect.value):
        return replace(verdict, open=why)
    holds, _, p = _side(claim, effect)
    return replace(verdict, effect=effect, open=_not_as_registered(compared) or why, holds=holds, p=p)


def _counts(claim: Claim, run: Run) -> bool | None:
    """Return whether the run diverged or its metric reached `at_least` of the claim; None if it was not measured.

    If the metric has an exact value for diverged runs, only this value decides whether a diverged run counts."""
    metric, _ = find_metric(claim.metric)
    exact = isinstance(metric, Metric) and metric.counts_failures and not math.isnan(claim.at_least)
    if diverged(run) == 1 and not exact:
        return True
    if math.isnan(claim.at_least) or not isinstance(metric, Metric):
        return False
    value = metric_value(run, claim.metric)
    if math.isnan(value):
        return None
    return value >= claim.at_least if metric.worst == "high" else value <= claim.at_least
