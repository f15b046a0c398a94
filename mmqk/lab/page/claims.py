"""What a page shows of each claim: its effect as text and as a bar, its p-values, the results of its runs, and what
the runs cannot show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mmqk.lab.formatting import DASH, capital, exp, listed, number, plural, slug
from mmqk.lab.metrics import Metric, find_metric
from mmqk.lab.metrics.families import learning_rate
from mmqk.lab.page.drawing import first_arms
from mmqk.lab.page.tables import Cell, Table, anchor, table
from mmqk.lab.runs import Run
from mmqk.lab.study import Study
from mmqk.lab.verdicts import detectable_in_words, effect_in_cell, effect_tested, interval_text, p_text, scale_of
from mmqk.lab.verdicts.assess import Verdict
from mmqk.lab.verdicts.measure import measure
from mmqk.store.formatting import percent

BADGES = ("reproduced", "contradicted", "inconclusive", "not run", "shown")
LOOKS = "No registered number of seeds: looks at the results raise the error (12 % in a simulation in docs/evidence.md)"


def counts(verdicts: Sequence[Verdict]) -> list[tuple[str, str, int]]:
    """Return (verdict, CSS class, number of claims) for each verdict that a claim has."""
    badges = [verdict.badge for verdict in verdicts]
    return [(badge, slug(badge), badges.count(badge)) for badge in BADGES if badge in badges]


def claim_rows(study: Study, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the values of the page for each claim; the claims that ``report.headline`` names are leading."""
    first = study.named("headline") or [v.claim.id for v in verdicts if v.claim.decided][:1]
    rows = []
    for verdict in verdicts:
        claim, p, medians = verdict.claim, p_values(verdict), _medians(study, verdict)
        labels = [study.label(name) for name in (claim.treatment, claim.control)]
        tested = effect_tested(claim)
        if tested and claim.treatment:
            tested += " in “{}” than in “{}”".format(*labels)
        access = f" [{claim.source_access}]" if claim.source_access else ""
        facts = {
            "Tested": tested,
            "Why no verdict": verdict.why,
            "Medians": medians,
            "Counts": "; ".join(f"{study.label(arm)}: {a} of {n}" for arm, (a, n) in verdict.counts.items()),
            **p,
            "Source": f"{claim.source}{access}",
            "Value of the source": claim.reference_value,
            "Notes": " ".join(note for note in verdict.notes if note != verdict.why),
            "Not checked": listed(claim.not_checked),
            "Registered as": claim.status,
            "Metric": claim.metric,
            "Estimand": claim.estimand,
            "Would contradict": claim.would_contradict,
        }
        row = {
            "id": claim.id,
            "slug": slug(claim.id),
            "statement": capital(claim.statement).strip().rstrip("."),
            "leading": claim.id in first,
            "exploratory": claim.status == "exploratory",
            "verdict": verdict.badge,
            "css": slug(verdict.badge),
            "effect": effect_in_cell(verdict.claim, verdict.effect, verdict.bounds),
            "bar": effect_bar(verdict),
            "tested": tested,
            "why": verdict.why.rstrip("."),
            "p": p,
            "medians": medians,
            "unchecked": listed(claim.not_checked) if claim.decided else "",
            "facts": [(name, str(value).rstrip(".")) for name, value in facts.items() if value],
            "checks": verdict.checks,
            "values": value_table(study, verdict),
            "figure": f"claim-{slug(claim.id)}",
        }
        rows.append(row)
    return rows


def _medians(study: Study, verdict: Verdict) -> str:
    if verdict.verdict == "not run" or verdict.counts:
        return ""
    values = "; ".join(f"{study.label(arm)} {number(value)}" for arm, value in verdict.medians.items())
    metric, modality = find_metric(verdict.claim.metric)
    label = f"{metric.label} ({modality})" if modality else metric.label
    return values and f"{label}: {values}"


def p_values(verdict: Verdict) -> dict[str, str]:
    """Return the p-value and, where the claim shares its level or a check took its verdict away, the adjusted p-value
    and the interval that decides; empty if nothing was tested."""
    adjusted, effect, claim = verdict.adjusted, verdict.effect, verdict.claim
    if adjusted is None or effect is None or not effect.has_interval or math.isnan(verdict.p):
        return {}
    first, second = p_text(verdict.p), p_text(adjusted.p)
    values = {"p": first}
    if second != first:
        values["adjusted p"] = second
    if adjusted.claims > 1:
        values["adjustment"] = f"{adjusted.method}, {plural(adjusted.claims, f'{claim.status} claim')}"
        decides = " to ".join(interval_text(claim, *effect.interval(adjusted.alpha)))
        values["interval that decides"] = f"{decides} ({percent(1 - adjusted.alpha, 3)})"
    return values


def effect_bar(verdict: Verdict) -> dict[str, Any] | None:
    """Return where to draw the effect, its interval, and marks at no effect and at the smallest effect of interest,
    in percent of the width of the drawing; None if the claim has no finite effect."""
    effect, claim = verdict.effect, verdict.claim
    if effect is None:
        return None
    low, high = (effect.low, effect.high) if effect.has_interval else (effect.value, effect.value)
    if not all(map(math.isfinite, (effect.value, low, high))):
        return None
    marks = sorted({0.0, *(() if math.isnan(claim.min_effect) else claim.thresholds)})
    first, last = min(low, *marks), max(high, *marks)

    def at(value: float) -> float:
        return round(4 + 92 * (value - first) / ((last - first) or 1.0), 2)

    def named(value: float) -> str:
        return f"×{exp(value):.3g}" if scale_of(claim)[0] == "log" else f"{value:.3g}"

    # If marks are close together, the outer labels extend outward.
    near = len(marks) > 1 and at(marks[-1]) - at(marks[0]) < 13
    anchors = ["end", *["middle"] * (len(marks) - 2), "start"] if near else ["middle"] * len(marks)
    limits = " or ".join(named(mark) for mark in marks if mark)
    description = f"Effect {effect_in_cell(claim, effect, verdict.bounds)}; no effect is {named(0)}"
    description += f"; the smallest effect of interest is {limits}" if limits else ""
    return {
        "description": description,
        "marks": [(at(mark), named(mark), place, bool(mark)) for mark, place in zip(marks, anchors, strict=True)],
        "low": at(low),
        "value": at(effect.value),
        "high": at(high),
    }


class Value(NamedTuple):
    """The value of a claim's metric in one run, or in one family at one seed (then ``run`` is None and ``arm`` is one
    of its arms). ``name`` is the arm or the family."""

    name: str
    arm: str
    seed: int
    value: float
    run: Run | None


def claim_values(verdict: Verdict) -> list[Value]:
    """Return the values of a claim by arm or family and seed; NaN for a family that lacks a planned point."""
    compared, name = verdict.compared, verdict.claim.metric
    metric, modality = find_metric(name)
    if isinstance(metric, Metric):
        return [Value(run.arm, run.arm, run.seed, metric.measure(run, modality), run) for run in compared.runs]
    table = measure(compared.groups, name)
    columns = (table[column].tolist() for column in ("group", "seed", "raw"))
    last = {key: members.arms[-1].name for key, members in compared.groups.items()}
    return [Value(key, last[key], seed, value, None) for key, seed, value in zip(*columns, strict=True)]


def value_table(study: Study, verdict: Verdict) -> Table | None:
    """Return the result of each run of a claim: a row per arm or family, a column per seed."""
    values = claim_values(verdict)
    seeds = sorted({one.seed for one in values})
    rows: list[list[Cell | str]] = []
    for name in dict.fromkeys(one.name for one in values):
        cells: list[Cell | str] = [Cell(study.label(name), f"#arm-{slug(name)}" if name in study.arms else "")]
        for seed in seeds:
            one = next((one for one in values if (one.name, one.seed) == (name, seed)), None)
            cross = " ×" if one and one.run and one.run.status.status == "diverged" else ""
            href = f"#{anchor(one.run)}" if one and one.run else ""
            cells.append(Cell(f"{number(one.value)}{cross}", href) if one else DASH)
        rows.append(cells)
    heads = [f"{verdict.claim.metric}, by seed", *map(str, seeds)]
    return table("Result of each run; × marks a divergence", heads, rows)


def cannot_tell(study: Study, verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """Return what these runs cannot show, as (kind, which): first what the grid says, without a kind, then what
    follows from the claims and runs."""
    found: dict[str, list[str]] = {}
    for kind, which in (*_limits_of_claims(verdicts), *_limits_of_runs(study)):
        found.setdefault(kind, []).append(which)
    stated = [("", text) for text in study.named("cannot_tell")]
    return [*stated, *((kind, "; ".join(which)) for kind, which in found.items())]


def _limits_of_claims(verdicts: Sequence[Verdict]) -> Iterator[tuple[str, str]]:
    for verdict in verdicts:
        claim, effect = verdict.claim, verdict.effect
        for check in verdict.checks:
            if not check.passed:
                yield "A control did not pass", f"{claim.id}: {check.name}: {check.detail}"
        if claim.decided and claim.not_checked:
            yield "Not checked", f"{claim.id}: {listed(claim.not_checked)}"
        size = "" if claim.test == "equivalence" else detectable_in_words(claim, verdict.detectable)
        if size and effect is not None:
            yield "Effects with less than 80 % power", f"{claim.id}: weaker than {size}, n = {effect.n}"
        if claim.decided and not claim.seeds:
            yield LOOKS, claim.id
        if not claim.decided and verdict.verdict != "not run":
            yield "Shown without a verdict, from a few runs and without an interval", claim.id
    families = {v.claim.alpha_family for v in verdicts if v.claim.decided and v.claim.status == "confirmatory"}
    if len(families) > 1:
        yield "Families of claims with an error of 5 % each", str(len(families))


def _limits_of_runs(study: Study) -> Iterator[tuple[str, str]]:
    if not study.claims:
        yield "No claim was registered, so no difference has a verdict", study.title
    if study.missing:
        yield "Runs that have not started", str(len(study.missing))
    for run in study.runs:
        if run.status.status and not run.status.finished:
            end = f"{study.label(run.arm)}, seed {run.seed}: {run.status.status} at step {run.status.step}"
            yield "Unfinished runs, which figures show and verdicts do not count", end
    arms = first_arms(study)
    rates = {rate for arm in arms for run in study.of_arm(arm) if math.isfinite(rate := learning_rate(run))}
    tuned = any(study.selection(study.arms[arm]) for arm in arms)
    if study.registered and len(rates) == 1 and len(arms) > 1 and not tuned:
        yield "One learning rate, not tuned for each arm", f"{rates.pop():g}"
    if len(codes := {run.code for run in study.runs if run.code}) > 1:
        yield "Several versions of the code", str(len(codes))
