"""The verdict of each claim.

reproduced      both intervals lie beyond min_effect, and all checks and the negative control passed
contradicted    both intervals lie below min_effect, and all checks, the negative control and the positive control
                passed
not run         an arm has no finished run, or the claim sets not_run, the reason why no run of the grid tests it
inconclusive    every other case, and every claim with the status shown, which `Verdict.badge` calls "shown"

An equivalence is reproduced if the interval lies between -min_effect and min_effect, and contradicted if it lies
beyond one of them; both verdicts need a positive control that passed. A negative control is always optional.

The level of both intervals is corrected for the other claims of the family (`multiple`). The second one is shifted
for the skewness of the two arms (`Effect.shifted`); counts and predictions have none. A run that diverged, or
whose last value is not finite, ranks worst: it gets the worst finite value of the compared runs at any step, and does
not count in the spread. The effect is then a bound, and a verdict is given only if the bound supports it. A claim
stays inconclusive if a finished run has no value. `docs/evidence.md` describes the rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mmqk.lab.formatting import decimals, exp, fixed, listed, number, plural
from mmqk.lab.grid.claims import LEANS, Claim
from mmqk.lab.metrics import FamilyMetric, Metric, trained_modalities
from mmqk.lab.runs import Run
from mmqk.lab.stats.effects import Auroc, Effect, Spread
from mmqk.lab.stats.exact import (
    Adjusted,
    AnyEffect,
    Counts,
    benjamini_hochberg,
    clopper_pearson,
    holm,
    level_of_look,
    log_rank,
)
from mmqk.lab.verdicts.assess import EVENTS, Assessment, assess, middle, times_to_failure
from mmqk.lab.verdicts.claims import by_family, claim_metric
from mmqk.lab.verdicts.controls import Control, reaches
from mmqk.lab.verdicts.study import Compared, Group, Study, load_study
from mmqk.store.formatting import plain

__all__ = ["Judgment", "Verdict", "detectable_in_words", "effect_tested", "judge", "middle"]

Judgment = Literal["reproduced", "contradicted", "inconclusive", "not run"]


@dataclass(frozen=True)
class Verdict(Assessment):
    """The verdict of one claim. Unlike an `Assessment`, it includes the checks that need other claims.

    Attributes:
        verdict: reproduced, contradicted, inconclusive or not run.
        runs: names of the compared runs.
        adjusted: level and p-value corrected for the family; None for a claim that is not decided.
        why: why the claim is inconclusive, one sentence; empty for every other verdict.
        detectable: the true effect that the first test of these seeds detects with 80 % power; NaN if unknown. For
            an equivalence: the smallest min_effect with 80 % power at a true effect of 0.
    """

    verdict: Judgment = "inconclusive"
    runs: tuple[str, ...] = ()
    adjusted: Adjusted | None = None
    why: str = ""
    detectable: float = math.nan

    @property
    def badge(self) -> str:
        """The verdict; "shown" for a claim that never gets one."""
        return self.verdict if self.claim.decided or self.verdict == "not run" else "shown"

    @property
    def metric(self) -> Metric | FamilyMetric:
        """The metric of the claim."""
        return claim_metric(self.claim)

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
            "controls": [asdict(control) for control in self.controls],
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


@dataclass(frozen=True)
class Findings:
    """The content of a page: the study and its verdicts."""

    study: Study
    verdicts: tuple[Verdict, ...]


def read(folder: str | Path) -> Findings:
    """Return the findings of a folder or pack.

    Raises:
        UserError: the folder has no runs, or a record cannot be read.
    """
    study = load_study(folder)
    return Findings(study, tuple(judge(study)))


def judge(study: Study) -> list[Verdict]:
    """Return the verdicts of the study's claims in the order of the grid. A claim whose status is ``control`` gets no
    verdict."""
    claims = [claim for claim in study.claims if claim.status != "control"]
    assessed = {claim.id: assess(study, claim) for claim in claims}
    adjusted = _adjust(claims, assessed)
    verdicts: dict[str, Verdict] = {}
    pending = list(claims)
    # A claim may name other claims as its controls, and these may come later in the grid.
    while pending:
        waiting = {claim.id for claim in pending}
        ready = [c for c in pending if not (set(c.leans_on) - {c.id}) & waiting]
        for claim in ready or pending:
            verdicts[claim.id] = _judge(study, assessed, adjusted.get(claim.id), verdicts, claim.id)
        pending = [c for c in pending if c.id not in verdicts]
    return [verdicts[claim.id] for claim in claims]


def _adjust(claims: list[Claim], assessed: Mapping[str, Assessment]) -> dict[str, Adjusted]:
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
                alpha = level_of_look(level, claim.seeds, claim.max_seeds) if claim.stopping else level
                adjusted[claim.id] = Adjusted(method, len(members), alpha, p)
    return adjusted


def _judge(
    study: Study,
    assessed: Mapping[str, Assessment],
    adjusted: Adjusted | None,
    others: Mapping[str, Verdict],
    id: str,
) -> Verdict:
    assessment = assessed[id]
    claim, effect, groups = assessment.claim, assessment.effect, assessment.compared.groups.values()
    made = Verdict(**vars(assessment), runs=tuple(run.name for run in assessment.compared.runs))
    notes = [sentence(claim.note)] if claim.note else []
    if claim.not_run:
        return replace(made, verdict="not run", notes=(sentence(claim.not_run), *notes))
    if missing := [f"“{members.label}”" for members in groups if not members.runs]:
        return replace(made, verdict="not run", notes=(*notes, f"No finished run of {listed(missing, 'or')}."))
    notes += [*about_targets(groups), *assessment.notes]
    if adjusted is None:
        n = max(len(members.runs) for members in groups)
        return replace(made, notes=(f"Shown, {plural(n, 'seed')}: not decided.", *notes))
    controls = (*assessment.controls, *_named_controls(study, claim, others, assessed))
    why = _inconclusive(assessment, adjusted, controls)
    verdict: Judgment = "inconclusive" if why else "reproduced" if assessment.holds else "contradicted"
    if verdict == "contradicted" or (verdict == "reproduced" and claim.test == "equivalence"):
        notes += [about_control(claim, other) for other in study.claims if other.id == claim.positive_control]
    if claim.not_checked:
        notes.insert(0, f"Not checked: {listed(claim.not_checked)}.")
    notes = [
        *filter(None, [*notes, why]),
        *about_effect(effect, assessment.spread, assessment.sign_flip),
        *about_survival(assessment.compared),
    ]
    return replace(
        made,
        verdict=verdict,
        controls=controls,
        adjusted=adjusted,
        why=why,
        detectable=_detectable(claim, effect, adjusted),
        notes=tuple(notes),
    )


def _inconclusive(assessment: Assessment, adjusted: Adjusted, controls: tuple[Control, ...]) -> str:
    """Return why the claim is inconclusive; empty if the assessment, the corrected level and the controls
    decide it."""
    claim, effect = assessment.claim, assessment.effect
    if assessment.open or effect is None:
        return assessment.open
    if assessment.p > adjusted.alpha:
        low, high = effect.interval(0.05)
        if any(low <= threshold <= high for threshold in claim.thresholds):
            return "The interval includes the smallest effect of interest."
        return "The interval at the corrected level of this claim includes the smallest effect of interest."
    if isinstance(effect, Effect) and not _excludes(claim, effect.shifted(adjusted.alpha), assessment.holds):
        ends = interval_text(claim, *effect.shifted(adjusted.alpha))
        return (
            "The second test disagrees: the interval of the two arms alone, shifted for their skewness, is "
            f"{ends[0]} to {ends[1]}."
        )
    positive = next((c for c in controls if c.name.startswith("positive control")), None)
    negative = next((c for c in controls if c.name.startswith("negative control")), None)
    failed = [c.name for c in controls if not c.passed and c not in (positive, negative)]
    if failed:
        return f"Failed checks: {', '.join(failed)}."
    if assessment.bounded:
        return assessment.bounded
    if negative is not None and not negative.passed:
        return "The negative control did not pass: the arms that should not show the effect may show it."
    if assessment.holds and claim.test != "equivalence":
        return ""
    lies = "within" if assessment.holds else "outside" if claim.test == "equivalence" else "short of"
    lies = f"The interval lies {lies} the smallest effect of interest"
    if positive is None:
        missing = "does not show equivalence" if assessment.holds else "does not contradict the claim"
        return f"{lies}, but without a positive control this {missing}."
    return "" if positive.passed else f"{lies}, but the positive control did not pass."


def _excludes(claim: Claim, interval: tuple[float, float], holds: bool) -> bool:
    """Return whether the interval lies on the side of the smallest effect of interest that ``holds`` names."""
    low, high = sorted(claim.sign * end for end in interval)
    if claim.test == "equivalence":
        inside = -claim.min_effect < low and high < claim.min_effect
        return inside if holds else high < -claim.min_effect or low > claim.min_effect
    return low > claim.min_effect if holds else high < claim.min_effect


def _named_controls(
    study: Study, claim: Claim, others: Mapping[str, Verdict], assessed: Mapping[str, Assessment]
) -> list[Control]:
    """Return the results of the controls that the claim names: other claims, or entries with the status control."""
    controls = []
    for key in LEANS:
        name, other = key.replace("_", " "), getattr(claim, key)
        positive = name != "negative control"
        if other in others:
            verdict = others[other]
            why = _fails_positive(verdict) if positive else _fails_negative(verdict, assessed[other])
            controls.append(Control(f"{name} {other}", not why, why or verdict.verdict))
        elif other in assessed:
            controls.append(Control(f"{name} {other}", False, f"it depends on {claim.id} in turn"))
        controls += [
            reaches(study, c, name, positive) for c in study.claims if c.id == other and c.status == "control"
        ]
    return controls


def _fails_positive(verdict: Verdict) -> str:
    """Return why a claim fails as a positive control; empty if it was reproduced and is not an equivalence."""
    if verdict.verdict != "reproduced":
        return verdict.verdict
    return "an equivalence shows no effect" if verdict.claim.test == "equivalence" else ""


def _fails_negative(verdict: Verdict, assessment: Assessment) -> str:
    """Return why a claim fails as a negative control; empty if it passes.

    The whole 95 % interval must lie below the smallest effect of interest, in the direction of the claim, and all
    checks must pass. An inconclusive claim is therefore not enough.
    """
    if assessment.open or verdict.effect is None or not verdict.effect.has_interval:
        return sentence(assessment.open or "no interval").rstrip(".")
    if failed := [control.name for control in assessment.controls if not control.passed]:
        return f"failed checks: {', '.join(failed)}"
    if assessment.bounded:
        return assessment.bounded.rstrip(".")
    ends = [verdict.claim.sign * end for end in (verdict.effect.low, verdict.effect.high)]
    if verdict.claim.test == "equivalence":
        ends = list(map(abs, ends))
    return "" if max(ends) < verdict.claim.min_effect else "its interval reaches the smallest effect of interest"


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


def detectable_in_words(verdict: Verdict) -> str:
    """Return the true effect that the first test of these seeds detects with 80 % power; empty if unknown."""
    size = verdict.detectable
    if not verdict.claim.decided or not math.isfinite(size):
        return ""
    if verdict.metric.scale == "log":
        return f"a factor of {number(exp(size), 2)}"
    return f"{number(size, 2)} {verdict.metric.unit}".strip()


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


# Smaller relative differences in trained targets are not reported: different sequences already cause them.
ALIKE = 0.01


def sentence(text: str) -> str:
    """Return a text with a full stop."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def about_control(claim: Claim, control: Claim) -> str:
    """Return a note if the positive control does not show that the runs can detect an effect on the claim's metric;
    else an empty string."""
    if control.status != "control" and control.metric == claim.metric:
        return ""
    return (
        f"The positive control {control.id} does not show that these runs can detect a difference in {claim.metric}, "
        "so this verdict is weaker than it would be with such a control."
    )


def about_effect(effect: AnyEffect | None, spread: Spread | None, sign_flip: float) -> list[str]:
    """Return notes with the numbers that the interval is computed from, and with the tests that decide nothing."""
    if isinstance(effect, Counts):
        arms = [(effect.a, effect.n_treatment), (effect.b, effect.m)]
        shares = [f"{count} of {n} ({100 * low:.0f} to {100 * high:.0f} %)"
                  for count, n in arms for low, high in [clopper_pearson(count, n)]]  # fmt: skip
        return [f"Counted (95 % Clopper-Pearson): {'; '.join(shares)}. Fisher's exact test: p {_p(effect.fisher)}."]
    if isinstance(effect, Auroc):
        return [f"Pairs of runs: {effect.pairs}; failed runs: {effect.failures}; other runs: {effect.survivors}."]
    if effect is None or not effect.has_interval:
        return []
    notes = [f"Interval from: {effect.of}, {plain(effect.df)} degrees of freedom."]
    if spread is not None:
        sds = ", ".join(f"{plain(sd, 2)}" for sd in spread.by_arm.values())
        pooled = f"pooled: {plain(spread.sd, 2)}; equal spread: p = {spread.p_equal:.2g}"
        notes.append(f"Standard deviation over seeds by arm: {sds}; {pooled}.")
    if math.isfinite(sign_flip):
        notes.append(f"Sign-flip test: p {_p(sign_flip)}.")
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
    by_arm = "; ".join(f"{label}: {count:,.0f}" for label, count in counts.items())
    return [f"Trained targets per step, counted in the data of the runs: {by_arm}."]


def about_survival(compared: Compared) -> list[str]:
    """Return notes for a claim about the time of an event (`EVENTS`): the failed runs, the log-rank test, and what
    the interval leaves out; empty for other claims. The test needs all planned runs, because a run that fails
    finishes first."""
    claim = compared.claim
    if claim.metric not in EVENTS or claim.test != "superiority" or not claim.decided:
        return []
    groups = [times_to_failure(group.all, claim.metric) for group in compared.pair]
    complete = all(len(group.all) == group.planned for group in compared.pair)
    p = log_rank(*groups[0], *groups[1]) if complete else math.nan
    notes = ["" if math.isnan(p) else f"Log-rank test of equal survival: p = {p:.2g}."]
    trained = [{m for run in group.all for m in trained_modalities(run)} for group in compared.pair]
    for group, (_, failed), lacks in zip(
        compared.pair, groups, (trained[1] - trained[0], trained[0] - trained[1]), strict=True
    ):
        unsure = "" if any(failed) else "; the interval ignores the uncertainty of this arm"
        notes.append(f"Failed runs of “{group.label}”: {sum(failed)} of {len(failed)}{unsure}.")
        if lacks:
            notes.append(f"Losses that “{group.label}” does not train: {listed(sorted(lacks))}.")
    return [note for note in notes if note]


def interval_text(claim: Claim, low: float, high: float) -> tuple[str, str]:
    """Return the ends of an interval as text: ratios, or differences with their unit."""
    metric = claim_metric(claim)
    if metric.scale == "log":
        return f"×{number(exp(low))}", f"×{number(exp(high))}"
    places = decimals((high - low) / 2)
    return fixed(low, places, "+"), f"{fixed(high, places, '+')} {metric.unit}".strip()


def effect_tested(claim: Claim) -> str:
    """Return what the claim tests of its treatment, relative to its control: ``at least ×2``, ``at least 0.1 nats
    lower``; empty for a claim without a verdict."""
    if not claim.decided:
        return ""
    metric, size = claim_metric(claim), claim.min_effect
    if claim.test == "prediction":
        return f"AUROC of at least {plain(size)}"
    if metric.scale == "log":
        ends = plain(exp(-size)), plain(exp(size))
        if claim.test == "equivalence":
            return f"from ×{ends[0]} to ×{ends[1]}"
        return f"at least ×{ends[1]}" if claim.sign > 0 else f"at most ×{ends[0]}"
    amount = f"{plain(size)} {metric.unit}".strip()
    if claim.test == "equivalence":
        return f"less than {amount} apart"
    more, less = ("more", "fewer") if claim.test == "count" else ("higher", "lower")
    return f"at least {amount} {more if claim.sign > 0 else less}"


def _p(value: float) -> str:
    return f"= {value:.2g}" if value >= 1e-4 else "< 0.0001"
