"""What a page says about each claim: its effect in text and as a bar, its p-values, the results of its runs, and what
the runs cannot show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from mmqk.lab.formatting import capital, decimals, exp, fixed, listed, nats, number, plural, slug
from mmqk.lab.metrics import FamilyMetric, Metric, final_loss, find_metric
from mmqk.lab.metrics.families import learning_rate
from mmqk.lab.page.figures import claim_runs, of_family
from mmqk.lab.page.tables import Cell, Table, anchor, table
from mmqk.lab.runs import Run
from mmqk.lab.stats.effects import Auroc
from mmqk.lab.stats.exact import AnyEffect
from mmqk.lab.verdicts.claims import measured_label
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import Verdict, detectable_in_words, effect_tested, interval_text
from mmqk.store.formatting import percent

BADGES = ("reproduced", "contradicted", "inconclusive", "not run", "shown")
# If the half-width of the interval of a ratio, on a log scale, exceeds this, the ratio has two digits, not three.
ROUGH = 0.35
MARKS = {
    "V": "the source's own text or code was read",
    "S": "a detailed secondary source was read, not the paper itself",
    "A": "only the abstract was read",
    "M": "from memory, unchecked",
    "I": "our inference or arithmetic",
    "X": "read off a chart by an automatic converter: only the direction is reliable, not the number",
}
WIDTH, HEIGHT, PAD = 300.0, 38.0, 12.0  # of the bar of an effect


def counts(verdicts: Sequence[Verdict]) -> list[tuple[str, str, int]]:
    """Return (verdict, CSS class, number of claims) for each verdict that a claim has."""
    badges = [verdict.badge for verdict in verdicts]
    return [(badge, badge.replace(" ", "-"), badges.count(badge)) for badge in BADGES if badge in badges]


def claim_rows(study: Study, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the values of the page for each claim; the claims that ``report.headline`` names are leading."""
    first = study.named("headline") or [v.claim.id for v in verdicts if v.claim.decided][:1]
    rows = []
    for verdict in verdicts:
        claim = verdict.claim
        facts = {
            "Tested": effect_tested(claim) and _between(study, verdict),
            "Why no verdict": verdict.why,
            "Finding": _finding(verdict),
            "Medians": _medians(study, verdict),
            "Counts": "; ".join(f"{study.label(arm)}: {a} of {n}" for arm, (a, n) in verdict.counts.items()),
            **p_values(verdict),
            "Source": f"{claim.source}{f' [{claim.source_access}]' if claim.source_access else ''}",
            "Value of the source": claim.reference_value,
            "Notes": " ".join(note for note in verdict.notes if note != verdict.why),
            "Not checked": listed(claim.not_checked),
            "Registered as": claim.status,
            "Metric": claim.metric,
            "Estimand": claim.estimand,
            "Would contradict": claim.would_contradict,
            "Exclusions": claim.exclusions,
        }
        rows.append(
            {
                "id": claim.id,
                "slug": slug(claim.id),
                "statement": capital(claim.statement).strip().rstrip("."),
                "leading": claim.id in first,
                "exploratory": claim.status == "exploratory",
                "verdict": verdict.badge,
                "css": verdict.badge.replace(" ", "-"),
                "effect": effect_in_cell(verdict),
                "bar": effect_bar(verdict),
                "tested": facts["Tested"],
                "why": verdict.why.rstrip("."),
                "p": p_values(verdict),
                "medians": facts["Medians"],
                "unchecked": listed(claim.not_checked) if claim.decided else "",
                "facts": [(name, str(value).rstrip(".")) for name, value in facts.items() if value],
                "controls": verdict.controls,
                "values": value_table(study, verdict),
                "figure": f"claim-{slug(claim.id)}",
            }
        )
    return rows


def _between(study: Study, verdict: Verdict) -> str:
    claim = verdict.claim
    arms = f" in “{study.label(claim.treatment)}” than in “{study.label(claim.control)}”" if claim.treatment else ""
    return f"{effect_tested(claim)}{arms}"


def _medians(study: Study, verdict: Verdict) -> str:
    if verdict.verdict == "not run" or verdict.counts:
        return ""
    values = "; ".join(f"{study.label(arm)} {number(value)}" for arm, value in verdict.medians.items())
    return values and f"{measured_label(verdict.claim)}: {values}"


def _finding(verdict: Verdict) -> str:
    """Return the sentence that the grid gives for this verdict, with the numbers of these runs."""
    template, effect = verdict.claim.finding.get(verdict.verdict), verdict.effect
    if not template or effect is None or not effect.has_interval:
        return ""
    return template.format(**effect_in_words(verdict)).strip()


def effect_in_words(verdict: Verdict) -> dict[str, str]:
    """Return the values for the template of a finding: ratio, difference, size, low, high, n and seeds.

    The width of the interval determines the number of digits. The size of a difference is positive if its sign is the
    claimed one; for an equivalence it is always positive.
    """
    effect = verdict.effect
    if effect is None:
        return {}
    claim, unit = verdict.claim, verdict.metric.unit
    if verdict.metric.scale == "log":
        half = effect.high - effect.low if effect.has_interval else math.inf
        digits = 3 if half < 2 * ROUGH else 2
        value, low, high = (number(exp(v), digits) for v in (effect.value, effect.low, effect.high))
        size = value
    else:
        value, low, high = _linear(effect, 1, unit, sign="-" if isinstance(effect, Auroc) else "+")
        way = math.copysign(1, effect.value) if claim.test == "equivalence" else claim.sign
        size, *_ = _linear(effect, way, unit, sign="-")
    words = {"ratio": value, "difference": value.lstrip("+"), "size": size, "low": low, "high": high}
    return {**words, "n": str(effect.n), "seeds": plural(effect.n, "seed")}


def _linear(effect: AnyEffect, way: float, unit: str, sign: str) -> tuple[str, str, str]:
    """Return (difference with unit, low, high with unit), multiplied by ``way``: 1 or -1."""
    ends = sorted((way * effect.low, way * effect.high)) if effect.has_interval else [math.nan, math.nan]
    places = decimals((ends[1] - ends[0]) / 2)
    value, low, high = (
        fixed(v, places, sign) if math.isfinite(v) else number(v) for v in (way * effect.value, *ends)
    )
    return f"{value} {unit}".strip(), low, f"{high} {unit}".strip()


def effect_in_cell(verdict: Verdict) -> str:
    """Return the effect with its interval, unit and number of seeds, as in ``+0.54 (+0.28 to +0.79) nats, n = 3``;
    empty for a claim without a verdict or an effect. The effect is a bound if failed runs count with the worst value
    that was seen."""
    effect, metric = verdict.effect, verdict.metric
    if effect is None or not verdict.claim.decided:
        return ""
    words = effect_in_words(verdict)
    before = "×" if metric.scale == "log" else "AUROC " if isinstance(effect, Auroc) else ""
    value, high = (words[name].removesuffix(metric.unit).strip() for name in ("ratio", "high"))
    interval = f"({words['low']} to {high})" if effect.has_interval else "(no interval)"
    bound = f", a bound: {plural(verdict.bounds, 'failed run')}" if verdict.bounds else ""
    return f"{before}{value} {interval} {metric.unit}".strip() + f", n = {effect.n}{bound}"


def p_values(verdict: Verdict) -> dict[str, str]:
    """Return the p-value and, where the claim shares its level or a check took its verdict away, the adjusted p-value
    and the interval that decides; empty if nothing was tested."""
    adjusted, effect, claim = verdict.adjusted, verdict.effect, verdict.claim
    if adjusted is None or effect is None or not effect.has_interval or math.isnan(verdict.p):
        return {}
    first, second = (f"{p:.2g}" if p >= 1e-4 else "< 0.0001" for p in (verdict.p, adjusted.p))
    values = {"p": first}
    if second != first:
        values["adjusted p"] = second
    if adjusted.claims > 1 or claim.stopping:
        looks = f", {claim.seeds} to {claim.max_seeds} seeds" if claim.stopping else ""
        values["adjustment"] = f"{adjusted.method}, {plural(adjusted.claims, f'{claim.status} claim')}{looks}"
        decides = " to ".join(interval_text(claim, *effect.interval(adjusted.alpha)))
        values["interval that decides"] = f"{decides} ({percent(1 - adjusted.alpha, 3)})"
    return values


def effect_bar(verdict: Verdict) -> str:
    """Return a drawing of the effect as SVG: its interval, and marks at no effect and at the smallest effect of
    interest; empty if the claim has no finite effect."""
    effect, claim = verdict.effect, verdict.claim
    if effect is None or not math.isfinite(effect.value):
        return ""
    low, high = (effect.low, effect.high) if effect.has_interval else (effect.value, effect.value)
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    limits = () if math.isnan(claim.min_effect) else claim.thresholds
    first, last = min(0.0, low, *limits), max(0.0, high, *limits)
    span = (last - first) or 1.0

    def at(value: float) -> str:
        return f"{PAD + (WIDTH - 2 * PAD) * (value - first) / span:.1f}"

    def named(value: float) -> str:
        return f"×{exp(value):.3g}" if verdict.metric.scale == "log" else f"{value:.3g}"

    description = f"Effect {effect_in_cell(verdict)}; no effect is {named(0)}"
    if limits:
        description += f"; the smallest effect of interest is {' or '.join(map(named, limits))}"
    values = sorted([0.0, *limits])
    # If marks are close together, the outer labels extend outward.
    near = (values[-1] - values[0]) / span * (WIDTH - 2 * PAD) < 40
    anchors = ["end", *["middle"] * (len(values) - 2), "start"] if near and limits else ["middle"] * len(values)
    middle = HEIGHT / 2 - 6
    parts = [
        f'<svg class="bar" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(description)}">',
        f'<line x1="{PAD:g}" x2="{WIDTH - PAD:g}" y1="{middle:g}" y2="{middle:g}" stroke="var(--line)"/>',
    ]
    for value, place in zip(values, anchors, strict=True):
        x, dash = at(value), ' stroke-dasharray="3 2"' if value else ""
        parts.append(f'<line x1="{x}" x2="{x}" y1="2" y2="{HEIGHT - 12:g}" stroke="var(--soft)"{dash}/>')
        parts.append(f'<text x="{x}" y="{HEIGHT - 1:g}" text-anchor="{place}">{named(value)}</text>')
    parts.append(
        f'<line x1="{at(low)}" x2="{at(high)}" y1="{middle:g}" y2="{middle:g}" stroke="currentColor" '
        'stroke-width="4"/>'
        f'<circle cx="{at(effect.value)}" cy="{middle:g}" r="6" fill="currentColor"/></svg>'
    )
    return "".join(parts)


def value_table(study: Study, verdict: Verdict) -> Table | None:
    """Return the result of each run of a claim: a row per arm, a column per seed. For a family metric, a row per
    family with its number, then a row per arm with its final losses."""
    metric, modality = find_metric(verdict.claim.metric)
    runs = claim_runs(study, verdict)
    seeds = sorted({run.seed for run in runs})
    rows: list[list[Cell | str]] = []
    family = ""
    for arm in dict.fromkeys(run.arm for run in runs):
        if isinstance(metric, FamilyMetric) and study.arms[arm].family != family:
            family = study.arms[arm].family
            members = [run for run in runs if run.family == family]
            values = [number(of_family(study, verdict, members, seed)) for seed in seeds]
            rows.append([f"{study.label(family)}: {metric.label}", *values])
        cells = [Cell(study.label(arm), f"#arm-{slug(arm)}")]
        for seed in seeds:
            of_seed = [run for run in runs if run.arm == arm and run.seed == seed]
            text = ", ".join(_result(run, metric, modality) for run in of_seed) or "–"
            cells.append(Cell(text, f"#{anchor(of_seed[0])}" if of_seed else ""))
        rows.append([*cells])
    heads = [f"{verdict.claim.metric}, by seed", *map(str, seeds)]
    return table("Result of each run; × marks a divergence", heads, rows)


def _result(run: Run, metric: Metric | FamilyMetric, modality: str | None) -> str:
    value = final_loss(run, modality).value if modality else math.nan
    text = f"{nats(value)} nats" if math.isfinite(value) else run.status.status
    text = text if isinstance(metric, FamilyMetric) else number(metric.measure(run, modality))
    return f"{text} ×" if run.status.status == "diverged" else text


def cannot_tell(study: Study, verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """Return what these runs cannot show, as (kind, which): first what the grid says, without a kind, then what
    follows from the claims and runs."""
    rows: list[tuple[str, str]] = [("", text) for text in study.named("cannot_tell")]
    for verdict in verdicts:
        id = verdict.claim.id
        rows += [("A control did not pass", f"{id}: {c.name}: {c.detail}") for c in verdict.controls if not c.passed]
        if verdict.claim.decided and verdict.claim.not_checked:
            rows.append(("Not checked", f"{id}: {listed(verdict.claim.not_checked)}"))
        size = "" if verdict.effect is None or verdict.claim.test == "equivalence" else detectable_in_words(verdict)
        if size and verdict.effect is not None:
            rows.append(("Effects with less than 80 % power", f"{id}: weaker than {size}, n = {verdict.effect.n}"))
    decided = [v.claim for v in verdicts if v.claim.decided]
    families = {c.alpha_family for c in decided if c.status == "confirmatory"}
    if len(families) > 1:
        rows.append(("Families of claims with an error of 5 % each", str(len(families))))
    looks = "No registered number of seeds: looks at the results raise the error from 5 % to between 10 and 16 %"
    rows.append((looks, ", ".join(c.id for c in decided if not c.seeds)))
    shown = [v.claim.id for v in verdicts if not v.claim.decided and v.verdict != "not run"]
    rows.append(("Shown without a verdict, from a few runs and without an interval", ", ".join(shown)))
    if not study.claims:
        rows.append(("No claim was registered, so no difference has a verdict", study.title))
    rows.append(("Runs that have not started", str(len(study.missing) or "")))
    unfinished = [run for run in study.runs if run.status.status and not run.status.finished]
    ends = [f"{study.label(r.arm)}, seed {r.seed}: {r.status.status} at step {r.status.step}" for r in unfinished]
    rows.append(("Unfinished runs, which figures show and verdicts do not count", "; ".join(ends)))
    rates = {rate for arm in study.hero for run in study.of_arm(arm) if math.isfinite(rate := learning_rate(run))}
    tuned = any(study.selection(study.arms[arm]) for arm in study.hero)
    if study.registered and len(rates) == 1 and len(study.hero) > 1 and not tuned:
        rows.append(("One learning rate, not tuned for each arm", f"{rates.pop():g}"))
    codes = {run.code for run in study.runs if run.code}
    rows.append(("Several versions of the code", str(len(codes)) if len(codes) > 1 else ""))
    merged = {kind: "; ".join(which for k, which in rows if k == kind and which) for kind, _ in rows if kind}
    return [*(row for row in rows if not row[0]), *(row for row in merged.items() if row[1])]
