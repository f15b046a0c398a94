"""Claims to verdicts.

reproduced      the interval lies beyond delta, in the regime, between arms that differ as declared
contradicted    the interval lies short of delta, and besides all that the positive control holds
not run         an arm has no finished run
inconclusive    everything else, and whatever is shown without being decided

A run that diverged, or whose last value is not finite, ranks worst: it is given the worst finite value of the
runs compared, its own earlier ones included, and is left out of the spread. The effect is then a bound, and no
verdict is given that the bound does not support. A finished run that was not measured leaves its claim open.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mmqk.analysis.controls import (
    Control,
    only_declared_differences,
    reaches,
    regime_reached,
    within_bound,
)
from mmqk.analysis.metrics import Metric, find_metric
from mmqk.analysis.runs import Run
from mmqk.analysis.stats import Effect, Spread, paired_effect, pooled_spread
from mmqk.analysis.study import Claim, Study
from mmqk.analysis.words import number, plural

Judgement = Literal["reproduced", "contradicted", "inconclusive", "not run"]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim.

    Attributes:
        claim: as registered.
        verdict: reproduced, contradicted, inconclusive or not run.
        effect: treatment against control on the metric's scale (log ratio or difference); None without one.
        medians: the metric by arm, the median over finished runs.
        runs: names of the runs it came from.
        controls: what was checked.
        notes: what a reader must know, one sentence each.
    """

    claim: Claim
    verdict: Judgement
    effect: Effect | None
    medians: Mapping[str, float]
    runs: tuple[str, ...]
    controls: tuple[Control, ...]
    notes: tuple[str, ...]

    @property
    def metric(self) -> Metric:
        """What the claim measures."""
        return find_metric(self.claim.metric)[0]

    def as_record(self) -> dict[str, Any]:
        """As it stands in verdicts.json."""
        effect = self.effect
        return {
            "claim": self.claim.id,
            "verdict": self.verdict,
            "effect": None if effect is None else _rounded(effect.value),
            "interval": [_rounded(effect.low), _rounded(effect.high)]
            if effect is not None and effect.has_interval
            else None,
            "threshold": None if math.isnan(self.claim.delta) else self.claim.delta * _sign(self.claim),
            "runs": list(self.runs),
            "controls": [control.as_record() for control in self.controls],
            "note": " ".join(self.notes),
        }


def judge(study: Study) -> list[Verdict]:
    """The verdict of every claim of the study, in the grid's order; controls are not claims."""
    verdicts: dict[str, Verdict] = {}
    pending = [claim for claim in study.claims if claim.status != "control"]
    # A claim may lean on another one as its control, wherever the grid writes it.
    while pending:
        ready = [c for c in pending if c.positive_control not in {p.id for p in pending if p is not c}]
        for claim in ready or pending:
            verdicts[claim.id] = _judge(study, claim, verdicts)
        pending = [c for c in pending if c.id not in verdicts]
    return [verdicts[claim.id] for claim in study.claims if claim.id in verdicts]


def _judge(study: Study, claim: Claim, others: Mapping[str, Verdict]) -> Verdict:
    runs = [run for arm in dict.fromkeys(claim.compared) for run in study.finished(arm)]
    names = tuple(run.name for run in runs)
    missing = [arm for arm in dict.fromkeys(claim.compared) if not study.finished(arm)]
    notes = [_sentence(claim.note)] if claim.note else []
    if missing:
        absent = ", ".join(study.label(arm) for arm in missing)
        return Verdict(claim, "not run", None, {}, names, (), (*notes, f"No finished run of {absent}."))
    outcomes, censored = _outcomes(study, claim)
    medians = _medians(study, claim)
    for arm, seeds in censored.items():
        notes.append(
            f"{plural(len(seeds), 'run')} of {study.label(arm)} diverged or ended without a finite value and got "
            "the worst finite one: the effect is a bound."
        )
    if not claim.decided:
        n = max(len(study.finished(arm)) for arm in claim.compared)
        notes.insert(0, f"Shown, {plural(n, 'seed')}: not decided.")
        effect = paired_effect(outcomes.get(claim.treatment, {}), outcomes.get(claim.control, {}), None)
        controls = tuple(filter(None, [within_bound(runs)]))
        return Verdict(claim, "inconclusive", effect, medians, names, controls, tuple(notes))
    spread = pooled_spread(_spread_outcomes(study, claim, outcomes, censored))
    effect = paired_effect(outcomes[claim.treatment], outcomes[claim.control], spread)
    controls = tuple(_controls(study, claim, runs, others))
    verdict, why = _decide(study, claim, effect, controls, censored)
    notes += [*why, *_about_spread(spread, effect)]
    found = Verdict(claim, verdict, effect, medians, names, controls, tuple(notes))
    if verdict == "inconclusive" and (smallest := detectable_in_words(found)):
        words = f"To reproduce the claim with 80 % power these seeds need a true effect of {smallest}."
        found = replace(found, notes=(*found.notes, words))
    return found


def _decide(
    study: Study,
    claim: Claim,
    effect: Effect | None,
    controls: Sequence[Control],
    censored: Mapping[str, Collection[int]],
) -> tuple[Judgement, list[str]]:
    """The rule itself."""
    for arm in dict.fromkeys(claim.compared):
        planned, done = len(study.arms[arm].seeds), len(study.finished(arm))
        if done < planned:
            return "inconclusive", [
                f"{done} of {plural(planned, 'planned run')} of {study.label(arm)} finished."
            ]
    if unmeasured := _unmeasured(study, claim):
        return "inconclusive", [f"Without a value: {', '.join(unmeasured)}."]
    if effect is None:
        return "inconclusive", ["The two arms share no seed."]
    if not effect.has_interval:
        return "inconclusive", ["Too few seeds for an interval."]
    sign = _sign(claim)
    low, high = sorted((sign * effect.low, sign * effect.high))
    failed = [c.name for c in controls if not c.passed and not c.name.startswith("positive control")]
    positive = [c for c in controls if c.name.startswith("positive control")]
    if low <= claim.delta <= high:
        return "inconclusive", ["The interval includes the smallest effect of interest."]
    if failed:
        return "inconclusive", [f"Not satisfied: {', '.join(failed)}."]
    # The arm whose true values lie further out makes the claim truer, or less true, than it was measured.
    helps = claim.treatment if (find_metric(claim.metric)[0].worst == "high") == (sign > 0) else claim.control
    if low > claim.delta:
        if set(censored) - {helps}:
            return "inconclusive", ["The runs that diverged may make the effect smaller."]
        return "reproduced", []
    if helps in censored:
        return "inconclusive", ["The runs that diverged may make the effect larger."]
    if not positive:
        return "inconclusive", [
            "The interval lies short of the smallest effect of interest, without a "
            "positive control that could make this a contradiction."
        ]
    if not positive[0].passed:
        return "inconclusive", [
            "The interval lies short of the smallest effect of interest, but the positive "
            "control did not pass."
        ]
    return "contradicted", []


def _controls(
    study: Study, claim: Claim, runs: Sequence[Run], others: Mapping[str, Verdict]
) -> list[Control]:
    controls = [only_declared_differences(study, claim, runs)]
    if claim.regime:
        controls.insert(0, regime_reached(study, claim, runs))
    if (bound := within_bound(runs)) is not None:
        controls.append(bound)
    if claim.positive_control in others:
        found = others[claim.positive_control].verdict
        controls.append(Control(f"positive control {claim.positive_control}", found == "reproduced", found))
    elif claim.positive_control:
        named = [c for c in study.claims if c.id == claim.positive_control and c.status == "control"]
        controls += [reaches(study, control) for control in named]
    return controls


def _outcomes(study: Study, claim: Claim) -> tuple[dict[str, dict[int, float]], dict[str, set[int]]]:
    """The metric on its scale, by arm and seed, and which runs of an arm have only a bound.

    A run that never measured it is left out, unless it diverged.
    """
    metric, modality = find_metric(claim.metric)
    runs = {arm: study.finished(arm) for arm in dict.fromkeys(claim.compared)}
    measured: dict[str, dict[int, float]] = {arm: {} for arm in runs}
    censored: dict[str, set[int]] = {}
    seen = []
    for arm in runs:
        for run in runs[arm]:
            value = metric.measure(run, modality)
            if math.isinf(value) or run.status.status == "diverged":
                censored.setdefault(arm, set()).add(run.seed)
                seen += [metric.on_scale(metric.worst_seen(run, modality)), metric.on_scale(value)]
            elif not math.isnan(value):
                measured[arm][run.seed] = metric.on_scale(value)
    seen += [value for by_seed in measured.values() for value in by_seed.values()]
    finite = [value for value in seen if math.isfinite(value)]
    if finite:
        worst = max(finite) if metric.worst == "high" else min(finite)
        for arm, seeds in censored.items():
            measured[arm].update(dict.fromkeys(seeds, worst))
    return measured, censored


def _unmeasured(study: Study, claim: Claim) -> list[str]:
    """Runs that completed and have no value of the metric."""
    metric, modality = find_metric(claim.metric)
    return [
        f"{study.label(arm)} seed {run.seed}"
        for arm in dict.fromkeys(claim.compared)
        for run in study.finished(arm)
        if run.status.status == "completed" and math.isnan(metric.on_scale(metric.measure(run, modality)))
    ]


def _spread_outcomes(
    study: Study,
    claim: Claim,
    outcomes: Mapping[str, Mapping[int, float]],
    censored: Mapping[str, Collection[int]],
) -> dict[str, list[float]]:
    """Outcomes by arm for the seed spread: the compared arms, and every other one of their block."""
    metric, modality = find_metric(claim.metric)
    by_arm = {
        arm: [value for seed, value in values.items() if seed not in censored.get(arm, ())]
        for arm, values in outcomes.items()
    }
    block = study.arms[claim.treatment].block
    for arm in study.arms.values():
        if arm.block == block and arm.name not in by_arm:
            runs = [run for run in study.finished(arm.name) if run.status.status == "completed"]
            values = [metric.on_scale(metric.measure(run, modality)) for run in runs]
            by_arm[arm.name] = [v for v in values if math.isfinite(v)]
    return by_arm


def _medians(study: Study, claim: Claim) -> dict[str, float]:
    metric, modality = find_metric(claim.metric)
    return {
        arm: middle(metric.measure(run, modality) for run in study.finished(arm))
        for arm in dict.fromkeys(claim.compared)
    }


def middle(values: Any) -> float:
    """The median, with what was not measured left out and infinities kept; NaN of nothing."""
    kept = sorted(v for v in values if not math.isnan(v))
    if not kept:
        return math.nan
    half = len(kept) // 2
    return kept[half] if len(kept) % 2 else (kept[half - 1] + kept[half]) / 2


def _about_spread(spread: Spread | None, effect: Effect | None) -> list[str]:
    if spread is None or effect is None or not effect.has_interval:
        return []
    sds = ", ".join(f"{sd:.2g}" for sd in spread.by_arm.values())
    method = (
        "the pooled one"
        if effect.pooled
        else "Welch's, of the two arms alone, whose standard error is larger"
    )
    return [
        f"Seed spread by arm {sds}, pooled {spread.sd:.2g} (equal spread p = {spread.p_equal:.2g}); the interval is "
        f"{method} ({effect.df:.3g} degrees of freedom)."
    ]


def detectable_in_words(verdict: Verdict) -> str:
    """The true effect at which these seeds reproduce the claim with 80 % power; nothing where not known."""
    effect, claim = verdict.effect, verdict.claim
    if effect is None or not claim.decided or not math.isfinite(effect.margin):
        return ""
    size = _sign(claim) * (claim.delta + effect.margin)
    if verdict.metric.scale == "log":
        return f"a factor of {number(math.exp(size))}"
    return f"{number(size)} {verdict.metric.unit}"


def _sign(claim: Claim) -> int:
    return 1 if claim.direction == "greater" else -1


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
