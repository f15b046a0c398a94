"""Claims to verdicts.

reproduced      the interval lies beyond delta (of an equivalence: within it, on both sides), in the regime, between
                arms that differ as declared, and the negative control shows nothing
contradicted    the interval lies short of delta (of an equivalence: outside), and besides all that the positive
                control holds
not run         an arm has no finished run
inconclusive    everything else, and whatever is shown without being decided

The interval is that of the level which is left for the claim among its family (`multiple`). A run that diverged, or
whose last value is not finite, ranks worst: it is given the worst finite value of the runs compared, its own earlier
ones included, and is left out of the spread. The effect is then a bound, and no verdict is given that the bound does
not support. A finished run that was not measured leaves its claim open. `docs/evidence.md` has the rules in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mmqk.analysis.formatting import listed, number, plural
from mmqk.analysis.metrics import FamilyMetric, Metric
from mmqk.analysis.stats.effects import Effect
from mmqk.analysis.stats.exact import Counts
from mmqk.analysis.stats.multiple import Adjusted, benjamini_hochberg, holm, level_of_look
from mmqk.analysis.verdicts.assess import Assessment, assess
from mmqk.analysis.verdicts.claims import by_family
from mmqk.analysis.verdicts.compared import middle
from mmqk.analysis.verdicts.controls import Control, reaches
from mmqk.analysis.verdicts.notes import about_family, about_power, about_seeds, about_spread
from mmqk.analysis.verdicts.study import Claim, Study
from mmqk.analysis.verdicts.targets import about_targets

__all__ = ["Judgement", "Verdict", "detectable_in_words", "judge", "middle"]

Judgement = Literal["reproduced", "contradicted", "inconclusive", "not run"]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim.

    Attributes:
        claim: as registered.
        verdict: reproduced, contradicted, inconclusive or not run.
        effect: treatment against control on the metric's scale (log ratio or difference; of counts a difference of
            shares); None without one.
        medians: the metric by arm, the median over finished runs; of counts the share.
        runs: names of the runs it came from.
        controls: what was checked.
        notes: what a reader must know, one sentence each.
        adjusted: how it was judged among the other claims; None for what is not decided.
        p: two-sided p-value against the smallest effect of interest, before any adjustment; NaN without one.
        sign_flip: the exact sign-flip test's beside it, from 6 seeds on; else NaN.
        detectable: the true effect at which these seeds reach the verdict "reproduced" with 80 % power; NaN where
            not known. Of an equivalence: the smallest delta at which no true effect is found to be none.
        counts: of a claim that counts runs, how many of how many by arm.
        open: why nothing could be decided, whatever the effect; empty otherwise.
        bounds: how many runs count with the worst value seen, so that the effect is a bound.
    """

    claim: Claim
    verdict: Judgement
    effect: Effect | Counts | None
    medians: Mapping[str, float]
    runs: tuple[str, ...]
    controls: tuple[Control, ...]
    notes: tuple[str, ...]
    adjusted: Adjusted | None = None
    p: float = math.nan
    sign_flip: float = math.nan
    detectable: float = math.nan
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    open: str = ""
    bounds: int = 0

    @property
    def metric(self) -> Metric | FamilyMetric:
        """What the claim measures."""
        return self.claim.measured

    def as_record(self) -> dict[str, Any]:
        """As it stands in verdicts.json: numbers are null where there are none."""
        effect, adjusted, claim = self.effect, self.adjusted, self.claim
        has = effect is not None and effect.has_interval
        record: dict[str, Any] = {
            "claim": claim.id,
            "verdict": self.verdict,
            "effect": None if effect is None else _rounded(effect.value),
            "interval": [_rounded(effect.low), _rounded(effect.high)] if effect is not None and has else None,
            "threshold": None if math.isnan(claim.delta) else claim.delta * claim.sign,
            "runs": list(self.runs),
            "controls": [control.as_record() for control in self.controls],
            "note": " ".join(self.notes),
            "status": claim.status,
            "test": claim.test if claim.decided else None,
            "p": _rounded(self.p),
            "sign_flip": _rounded(self.sign_flip),
            "detectable": _rounded(self.detectable),
            "counts": {name: list(of) for name, of in self.counts.items()} or None,
            "adjusted": None,
        }
        if adjusted is not None and effect is not None and has:
            record["adjusted"] = {
                "method": adjusted.method,
                "claims": adjusted.claims,
                "level": _rounded(1 - adjusted.alpha),
                "interval": [_rounded(end) for end in effect.interval(adjusted.alpha)],
                "p": _rounded(adjusted.p),
            }
        return record


def judge(study: Study) -> list[Verdict]:
    """The verdict of every claim of the study, in the grid's order; controls are not claims."""
    claims = [claim for claim in study.claims if claim.status != "control"]
    assessed = {claim.id: assess(study, claim) for claim in claims}
    adjusted = _adjust(claims, assessed)
    verdicts: dict[str, Verdict] = {}
    pending = list(claims)
    # A claim may lean on others as its controls, wherever the grid writes them.
    while pending:
        waiting = {claim.id for claim in pending}
        ready = [c for c in pending if not (set(c.leans_on) - {c.id}) & waiting]
        for claim in ready or pending:
            verdicts[claim.id] = _judge(study, assessed, adjusted.get(claim.id), verdicts, claim.id)
        pending = [c for c in pending if c.id not in verdicts]
    return [verdicts[claim.id] for claim in claims]


def _adjust(claims: list[Claim], assessed: Mapping[str, Assessment]) -> dict[str, Adjusted]:
    """The level of every decided claim: each family's claims share one, those that cannot be decided included."""
    found: dict[str, Adjusted] = {}
    for status, method, rule in (
        ("confirmatory", "Holm", holm),
        ("exploratory", "Benjamini-Hochberg", benjamini_hochberg),
    ):
        for members in by_family(claims, status).values():
            shared = rule([assessed[claim.id].p_in_family for claim in members])
            for claim, (level, p) in zip(members, shared, strict=True):
                alpha = level_of_look(level, claim.seeds, claim.max_seeds) if claim.stopping else level
                found[claim.id] = Adjusted(method, len(members), alpha, p)
    return found


def _judge(
    study: Study,
    assessed: Mapping[str, Assessment],
    adjusted: Adjusted | None,
    others: Mapping[str, Verdict],
    id: str,
) -> Verdict:
    found = assessed[id]
    claim, effect = found.claim, found.effect
    notes = [_sentence(claim.note)] if claim.note else []
    names = tuple(run.name for members in found.groups.values() for run in members.all)
    if missing := [members.label for members in found.groups.values() if not members.runs]:
        notes.append(f"No finished run of {', '.join(missing)}.")
        return Verdict(claim, "not run", None, {}, names, (), tuple(notes))
    notes += [*about_targets(found.groups), *found.notes]
    if not claim.decided or adjusted is None:
        n = max(len(members.runs) for members in found.groups.values())
        notes.insert(0, f"Shown, {plural(n, 'seed')}: not decided.")
        return Verdict(claim, "inconclusive", effect, found.medians, names, found.controls, tuple(notes))
    controls = (*found.controls, *_leaning(study, claim, others, assessed))
    verdict, why = _decide(found, adjusted, controls)
    if claim.not_checked:
        notes.insert(0, f"Not checked: {listed(claim.not_checked)}.")
    notes += [*why, *about_family(claim, effect, adjusted, found.p), *about_spread(found.spread, effect)]
    notes += about_seeds(claim, effect, found.sign_flip)
    detectable = _detectable(claim, effect, adjusted)
    made = Verdict(
        claim, verdict, effect, found.medians, names, controls, tuple(notes), adjusted, found.p, found.sign_flip,
        detectable, found.counts, found.open, found.failures,
    )  # fmt: skip
    if verdict == "inconclusive" and (words := about_power(claim, detectable_in_words(made))):
        made = replace(made, notes=(*made.notes, words))
    return made


def _decide(
    found: Assessment, adjusted: Adjusted, controls: tuple[Control, ...]
) -> tuple[Judgement, list[str]]:
    """The rule itself."""
    claim, effect = found.claim, found.effect
    if found.open or effect is None:
        return "inconclusive", [found.open]
    if found.p > adjusted.alpha:
        low, high = effect.interval(0.05)
        if any(low <= threshold <= high for threshold in claim.thresholds):
            return "inconclusive", ["The interval includes the smallest effect of interest."]
        return "inconclusive", [
            "The interval of the level that is left for this claim includes the smallest effect of interest."
        ]
    positive = next((c for c in controls if c.name.startswith("positive control")), None)
    negative = next((c for c in controls if c.name.startswith("negative control")), None)
    failed = [c.name for c in controls if not c.passed and c not in (positive, negative)]
    if failed:
        return "inconclusive", [f"Not satisfied: {', '.join(failed)}."]
    if found.bounded:
        return "inconclusive", [found.bounded]
    if negative is not None and not negative.passed:
        return "inconclusive", [
            "It is not shown that the effect is absent where it cannot be: the negative control did not pass."
        ]
    if not found.holds or claim.test == "equivalence":
        lies = "within" if found.holds else "outside" if claim.test == "equivalence" else "short of"
        if positive is None:
            made = "it says something" if found.holds else "this a contradiction"
            return "inconclusive", [
                f"The interval lies {lies} the smallest effect of interest, without a positive control that could "
                f"make {made}."
            ]
        if not positive.passed:
            return "inconclusive", [
                f"The interval lies {lies} the smallest effect of interest, but the positive control did not pass."
            ]
    return ("reproduced" if found.holds else "contradicted"), []


def _leaning(
    study: Study, claim: Claim, others: Mapping[str, Verdict], assessed: Mapping[str, Assessment]
) -> list[Control]:
    """The controls that are claims of their own."""
    found = []
    for name, other in (
        ("positive control", claim.positive_control),
        ("negative control", claim.negative_control),
        ("manipulation check", claim.manipulation_check),
    ):
        wanted = name != "negative control"
        if other in others:
            seen = others[other]
            why = _shows_it(seen) if wanted else _shows_nothing(seen, assessed[other])
            found.append(Control(f"{name} {other}", not why, why or seen.verdict))
        elif other in assessed:
            found.append(Control(f"{name} {other}", False, f"it leans on {claim.id} in its turn"))
        found += [
            reaches(study, c, name, wanted) for c in study.claims if c.id == other and c.status == "control"
        ]
    return found


def _shows_it(seen: Verdict) -> str:
    """Why a claim is no positive control: it must have been reproduced, and be one of an effect. Empty if it is."""
    if seen.verdict != "reproduced":
        return seen.verdict
    return "no difference was found, which shows nothing" if seen.claim.test == "equivalence" else ""


def _shows_nothing(seen: Verdict, found: Assessment) -> str:
    """Why a claim is no negative control; empty if it is.

    The whole 95 % interval must lie short of the effect that must not be there, of runs that could have shown it: no
    evidence is not enough.
    """
    if found.open or seen.effect is None or not seen.effect.has_interval:
        return _sentence(found.open or "no interval").rstrip(".")
    if failed := [control.name for control in found.controls if not control.passed]:
        return f"not satisfied: {', '.join(failed)}"
    if found.bounded:
        return found.bounded.rstrip(".")
    ends = (seen.claim.sign * seen.effect.low, seen.claim.sign * seen.effect.high)
    return "" if max(ends) < seen.claim.delta else "its interval reaches the smallest effect of interest"


def _detectable(claim: Claim, effect: Effect | Counts | None, adjusted: Adjusted) -> float:
    if isinstance(effect, Counts):
        return effect.detectable(claim.thresholds[0], adjusted.alpha, 0.8)
    if effect is None or not effect.has_interval:
        return math.nan
    if claim.test == "equivalence":
        # Both ends must be cleared from a true effect of 0.
        return effect.beyond(adjusted.alpha, 0.9)
    return claim.sign * (claim.delta + effect.beyond(adjusted.alpha))


def detectable_in_words(verdict: Verdict) -> str:
    """The true effect at which these seeds reproduce the claim with 80 % power; nothing where not known."""
    size = verdict.detectable
    if not verdict.claim.decided or not math.isfinite(size):
        return ""
    if verdict.metric.scale == "log":
        return f"a factor of {number(math.exp(size), 2)}"
    return f"{number(size, 2)} {verdict.metric.unit}".strip()


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
