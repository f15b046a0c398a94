"""The verdict of each claim.

reproduced      both intervals lie beyond min_effect, and all checks but the positive control passed
contradicted    both intervals lie below min_effect, and all checks and the positive control passed
not run         an arm has no finished run, or the claim sets not_run, the reason why no run of the grid tests it
inconclusive    every other case, and every claim with the status shown, which `Verdict.badge` calls "shown"

An equivalence is reproduced if the interval lies between -min_effect and min_effect, and contradicted if it lies
beyond one of them; both verdicts need a positive control that passed.

The level of both intervals is corrected for the other claims of the family. Confirmatory claims share a level of 5 %
by the Holm correction (Scandinavian Journal of Statistics 6, 1979). Exploratory claims have a false discovery rate of
10 % by the Benjamini-Hochberg procedure (JRSS B 57, 1995), and their intervals have the confidence that corresponds to
this rate (Benjamini and Yekutieli, JASA 100, 2005), but at least 95 %.

The second interval is shifted for the skewness of the two arms (`Effect.shifted`); counts and predictions have none. A
run that diverged, or whose last value is not finite, ranks worst: it gets the worst finite value of the compared runs
at any step, and does not count in the spread. The effect is then a bound, and a verdict is given only if the bound
supports it. A claim stays inconclusive if a finished run has no value. `docs/evidence.md` describes the rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

import numpy as np
from scipy import stats

from mmqk.lab.counts import AnyEffect, Counts, clopper_pearson
from mmqk.lab.effects import Auroc, Effect, Spread
from mmqk.lab.formatting import listed, plural
from mmqk.lab.grid.claims import FAMILY_LEVEL, LEANS, Claim
from mmqk.lab.grid.decidable import by_family
from mmqk.lab.metrics.outcomes import trained_modalities
from mmqk.lab.runs import Run
from mmqk.lab.study import Compared, Group, Study, compare
from mmqk.lab.verdicts import interval_text, p_text, say
from mmqk.lab.verdicts.assess import Adjusted, Judgment, Verdict, assess
from mmqk.lab.verdicts.checks import Check, reaches
from mmqk.lab.verdicts.measure import TIME, log_rank, times_to_failure
from mmqk.store.formatting import plain

# Smaller relative differences in trained targets are not reported: different sequences already cause them.
ALIKE = 0.01
# The rate of false discoveries among the exploratory claims of a family.
DISCOVERY_LEVEL = 0.10


def judge(study: Study) -> list[Verdict]:
    """Return the verdicts of the study's claims in the order of the grid. A claim whose status is ``control`` gets no
    verdict."""
    claims = [claim for claim in study.claims if claim.status != "control"]
    assessed = {claim.id: assess(compare(study, claim)) for claim in claims}
    adjusted = _adjust(claims, assessed)
    verdicts: dict[str, Verdict] = {}
    # A claim may name other claims as its controls, and these may come later in the grid.
    for id in TopologicalSorter({claim.id: claim.leans_on for claim in claims}).static_order():
        if id in assessed:
            verdicts[id] = _judge(assessed[id], adjusted.get(id), verdicts)
    return [verdicts[claim.id] for claim in claims]


def _adjust(claims: list[Claim], assessed: Mapping[str, Verdict]) -> dict[str, Adjusted]:
    """Return the corrected level of every decided claim. Claims that the runs cannot decide also count in the
    correction of their family."""
    adjusted: dict[str, Adjusted] = {}
    for status, method, rule in (
        ("confirmatory", "Holm", holm),
        ("exploratory", "Benjamini-Hochberg", benjamini_hochberg),
    ):
        for members in by_family(claims, status).values():
            shared = rule([assessed[claim.id].p_in_family for claim in members])
            for claim, (level, p) in zip(members, shared, strict=True):
                adjusted[claim.id] = Adjusted(method, len(members), level, p)
    return adjusted


def holm(p_values: Sequence[float]) -> list[tuple[float, float]]:
    """Return (level, adjusted p-value) of each p-value, in order; a hypothesis is rejected if p is at most its level.

    Hypotheses after the step at which the procedure stops get the level of that step.
    """
    order = np.argsort(p_values, kind="stable")
    p, left = np.asarray(p_values)[order], np.arange(len(p_values), 0, -1)
    rejected = np.append(p <= FAMILY_LEVEL / left, False).argmin()
    levels = FAMILY_LEVEL / np.maximum(left, len(p) - rejected)
    adjusted = np.maximum.accumulate(np.minimum(1.0, left * p))
    back = np.argsort(order)
    return list(zip(levels[back].tolist(), adjusted[back].tolist(), strict=True))


def benjamini_hochberg(p_values: Sequence[float]) -> list[tuple[float, float]]:
    """Return (level, adjusted p-value) of each p-value, in order; the level is at most 5 %."""
    adjusted = stats.false_discovery_control(p_values).tolist() if len(p_values) else []
    discoveries = max(1, sum(p <= DISCOVERY_LEVEL for p in adjusted))
    level = min(FAMILY_LEVEL, DISCOVERY_LEVEL * discoveries / max(1, len(adjusted)))
    return [(level, p) for p in adjusted]


def _judge(one: Verdict, adjusted: Adjusted | None, judged: Mapping[str, Verdict]) -> Verdict:
    claim, study, groups = one.claim, one.compared.study, one.compared.groups.values()
    notes = [sentence(claim.note)] if claim.note else []
    if claim.not_run:
        return replace(one, verdict="not run", notes=(sentence(claim.not_run), *notes))
    if missing := [f"“{members.label}”" for members in groups if not members.runs]:
        return replace(one, verdict="not run", notes=(*notes, say("no runs", arms=listed(missing, "or"))))
    notes += [*about_targets(groups), *one.notes]
    if adjusted is None:
        shown = say("shown", seeds=plural(max(len(members.runs) for members in groups), "seed"))
        return replace(one, notes=(shown, *notes))
    one = replace(one, adjusted=adjusted, checks=(*one.checks, *_named_controls(study, claim, judged)))
    why = _inconclusive(one, adjusted)
    verdict: Judgment = "inconclusive" if why else "reproduced" if one.holds else "contradicted"
    if verdict == "contradicted" or (verdict == "reproduced" and claim.test == "equivalence"):
        # Another kind of control does not show that the runs can detect an effect on the claim's metric.
        named = [control for control in study.claims if control.id == claim.positive_control]
        weak = [control for control in named if control.status == "control" or control.metric != claim.metric]
        notes += [say("weak control", id=control.id, metric=claim.metric) for control in weak]
    if claim.not_checked:
        notes.insert(0, say("not checked", checks=listed(claim.not_checked)))
    notes += [why] if why else []
    notes += [*about_effect(one.effect, one.spread, one.sign_flip), *about_survival(one.compared)]
    detectable = _detectable(claim, one.effect, adjusted)
    return replace(one, verdict=verdict, why=why, detectable=detectable, notes=tuple(notes))


def _inconclusive(one: Verdict, adjusted: Adjusted) -> str:
    """Return why the claim is inconclusive; empty if its effect, the corrected level and the checks decide it."""
    claim, effect = one.claim, one.effect
    if one.open or effect is None:
        return one.open
    if one.p > adjusted.alpha:
        if isinstance(effect, Counts) and one.p == effect.fisher:
            return say("equal shares")
        low, high = effect.interval(0.05)
        inside = any(low <= threshold <= high for threshold in claim.thresholds)
        return say("includes" if inside else "includes at level")
    if isinstance(effect, Effect) and not _excludes(claim, effect.shifted(adjusted.alpha), one.holds):
        low_text, high_text = interval_text(claim, *effect.shifted(adjusted.alpha))
        return say("second test", low=low_text, high=high_text)
    positive = next((c for c in one.checks if c.name.startswith("positive control")), None)
    if failed := [c.name for c in one.checks if not c.passed and c is not positive]:
        return say("failed", names=", ".join(failed))
    if one.bounded:
        return one.bounded
    if (one.holds and claim.test != "equivalence") or (positive is not None and positive.passed):
        return ""
    lies = "within" if one.holds else "outside" if claim.test == "equivalence" else "short of"
    return say(f"{lies}, {'no control' if positive is None else 'failed control'}")


def _excludes(claim: Claim, interval: tuple[float, float], holds: bool) -> bool:
    """Return whether the interval lies on the side of the smallest effect of interest that ``holds`` names."""
    low, high = sorted(claim.sign * end for end in interval)
    if claim.test == "equivalence":
        inside = -claim.min_effect < low and high < claim.min_effect
        return inside if holds else high < -claim.min_effect or low > claim.min_effect
    return low > claim.min_effect if holds else high < claim.min_effect


def _named_controls(study: Study, claim: Claim, judged: Mapping[str, Verdict]) -> list[Check]:
    """Return the results of the controls that the claim names: other claims, or entries with the status control.

    A claim passes as a control if it was reproduced and is not an equivalence, which shows no effect.
    """
    checks = []
    for key in LEANS:
        name, other = key.replace("_", " "), getattr(claim, key)
        if other in judged:
            verdict, equal = judged[other].verdict, judged[other].claim.test == "equivalence"
            detail = "an equivalence shows no effect" if verdict == "reproduced" and equal else verdict
            checks.append(Check(f"{name} {other}", verdict == "reproduced" and not equal, detail))
        checks += [reaches(study, c, name) for c in study.claims if c.id == other and c.status == "control"]
    return checks


def _detectable(claim: Claim, effect: AnyEffect | None, adjusted: Adjusted) -> float:
    if isinstance(effect, Counts):
        return effect.detectable(claim.thresholds[0], adjusted.alpha, 0.8)
    if effect is None or isinstance(effect, Auroc) or not effect.has_interval:
        return math.nan
    if claim.test == "equivalence":
        # Both ends of the interval must lie within ±min_effect. At a true effect of 0, 90 % power for each end gives
        # 80 % for both.
        return effect.beyond(adjusted.alpha, 0.9)
    return claim.sign * (claim.min_effect + effect.beyond(adjusted.alpha))


# Notes ----------------------------------------------------------------------------------------------------


def sentence(text: str) -> str:
    """Return a text with a full stop."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def about_effect(effect: AnyEffect | None, spread: Spread | None, sign_flip: float) -> list[str]:
    """Return notes with the numbers that the interval is computed from, and with the tests that decide nothing."""
    if isinstance(effect, Counts):
        treatment, control = (
            f"{count} of {n} ({100 * low:.0f} to {100 * high:.0f} %)"
            for count, n in ((effect.a, effect.n_treatment), (effect.b, effect.m))
            for low, high in [clopper_pearson(count, n)]
        )
        return [say("counted", treatment=treatment, control=control, p=p_text(effect.fisher, "= "))]
    if isinstance(effect, Auroc):
        return [say("pairs", pairs=effect.pairs, failures=effect.failures, survivors=effect.survivors)]
    if effect is None or not effect.has_interval:
        return []
    notes = [say("interval from", of=effect.of, df=plain(effect.df))]
    if spread is not None:
        by_arm = ", ".join(plain(sd, 2) for sd in spread.by_arm.values())
        notes.append(say("spread", by_arm=by_arm, pooled=plain(spread.sd, 2), p=spread.p_equal))
    if math.isfinite(sign_flip):
        notes.append(say("sign flip", p=p_text(sign_flip, "= ")))
    return notes


def trained_targets(run: Run) -> float:
    """Return the mean number of trained targets per optimizer step over all ranks, counted in the sequences of the
    run.

    NaN if the run did not count them. Modalities that are not trained do not count.
    """
    counts = [run.data.get(modality, {}).get("targets", math.nan) for modality in trained_modalities(run)]
    return float(run.setting("data.batch_size", math.nan) * sum(counts)) if counts else math.nan


def about_targets(groups: Iterable[Group]) -> list[str]:
    """Return a note with the trained targets per step of each arm, if the arms differ in these numbers or in the
    trained modalities. Empty if a run did not count its targets."""
    counts: dict[str, float] = {}
    trained = set()
    for members in groups:
        numbers = [trained_targets(run) for run in members.all]
        if not numbers or not all(math.isfinite(count) and count > 0 for count in numbers):
            return []
        counts[members.label] = sum(numbers) / len(numbers)
        trained |= {trained_modalities(run) for run in members.all}
    if len(trained) < 2 and max(counts.values(), default=0) <= (1 + ALIKE) * min(counts.values(), default=0):
        return []
    return [say("targets", by_arm="; ".join(f"{label}: {count:,.0f}" for label, count in counts.items()))]


def about_survival(compared: Compared) -> list[str]:
    """Return notes for a claim about the time of failures: the failed runs, the log-rank test, and what
    the interval leaves out; empty for other claims. The test needs all planned runs, because a run that fails
    finishes first."""
    claim = compared.claim
    if claim.metric != TIME or claim.test != "superiority" or not claim.decided:
        return []
    arms = (compared.treatment, compared.control)
    times = [times_to_failure(group.all) for group in arms]
    complete = all(len(group.all) == group.planned for group in arms)
    p = log_rank(*times[0], *times[1]) if complete else math.nan
    notes = [] if math.isnan(p) else [say("log rank", p=p)]
    trained = [{m for run in group.all for m in trained_modalities(run)} for group in arms]
    for group, (_, failed), own in zip(arms, times, trained, strict=True):
        found = "failed runs" if any(failed) else "no failed run"
        notes.append(say(found, arm=group.label, failed=sum(failed), runs=len(failed)))
        if lacks := sorted(set().union(*trained) - own):
            notes.append(say("untrained", arm=group.label, losses=listed(lacks)))
    return notes
