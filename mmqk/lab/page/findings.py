"""Write the sentences of the page about the verdicts; the numbers in them come from the runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmqk.lab.formatting import capital, decimals, exp, fixed, listed, nats, number, plural
from mmqk.lab.grid.claims import CHECKS
from mmqk.lab.metrics import METRICS, Metric, final_loss
from mmqk.lab.metrics.rates import learning_rate
from mmqk.lab.page.figures.captions import of_medians, verb
from mmqk.lab.stats import AnyEffect
from mmqk.lab.stats.auroc import Auroc
from mmqk.lab.stats.effects import Effect
from mmqk.lab.stats.exact import Counts
from mmqk.lab.verdicts.claims import counted_label, measured_label
from mmqk.lab.verdicts.notes import interval_text
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import Verdict, detectable_in_words, middle
from mmqk.store.formatting import percent, plain

# If the half-width of the interval of a ratio, on a log scale, exceeds this, the ratio has two digits, not three.
ROUGH = 0.35
# More claims than this are counted, not named.
MOST_NAMED = 6
MARKS = {
    "V": "the source's own text or code was read",
    "S": "a detailed secondary source was read, not the paper itself",
    "A": "only the abstract was read",
    "M": "from memory, unchecked",
    "I": "our inference or arithmetic",
    "X": "read off a chart by an automatic converter: only the direction is reliable, not the number",
}


def lead(study: Study, verdicts: Sequence[Verdict]) -> tuple[list[Verdict], list[Verdict]]:
    """Return (verdicts in the title, verdicts in the sentences below it)."""
    by_id = {v.claim.id: v for v in verdicts}
    first = [by_id[id] for id in study.named("headline") if id in by_id]
    decided = [v for v in verdicts if v.claim.decided]
    leading = first or decided[:1]
    if not leading:
        return [], list(verdicts)
    return leading, [v for v in decided if v not in leading]


def headline(study: Study, verdicts: Sequence[Verdict]) -> str:
    """Return the title of the page."""
    leading, _ = lead(study, verdicts)
    return ". ".join(finding(study, v).rstrip(".") for v in leading) or _plain_headline(study)


def finding(study: Study, verdict: Verdict) -> str:
    """Return one sentence with the measured effect, interval and n; from the template of the claim if it has one."""
    claim, effect = verdict.claim, verdict.effect
    if verdict.verdict == "not run":
        return f"Claim {claim.id} was not tested: {capital(claim.statement).rstrip('.')}."
    if not claim.decided:
        what, values = medians(study, verdict)
        return f"{what}: {listed([f'{value} ({arm})' for arm, value in values])}."
    if effect is None:
        return f"Claim {claim.id} is inconclusive: {_lower(verdict.open) or 'nothing was measured'}."
    sentence = _measured(study, verdict, effect)
    if verdict.bounds:
        runs, count = plural(verdict.bounds, "failed run"), "counts" if verdict.bounds == 1 else "count"
        sentence += f"; this effect is a bound, because {runs} {count} with the worst value seen"
    decided = verdict.verdict in ("reproduced", "contradicted")
    if decided and claim.unchecked:
        sentence += f"; not checked: {listed([CHECKS[name] for name in claim.unchecked])}"
    return f"Exploratory: {sentence}." if decided and claim.status == "exploratory" else f"{sentence}."


def _measured(study: Study, verdict: Verdict, effect: AnyEffect) -> str:
    """Return the measured effect of a decided claim, without a full stop."""
    claim, words = verdict.claim, effect_in_words(verdict)
    template = claim.finding.get(verdict.verdict)
    # A template contains the interval, so it is used only if there is one.
    if template and effect.has_interval:
        because = f"; {_lower(verdict.open)}" if verdict.open else ""
        return template.format(**words).strip().rstrip(".") + because
    tail = _tail(verdict)
    if claim.test == "count":
        shares = [f"{a} of {n} in “{study.label(arm)}”" for arm, (a, n) in verdict.counts.items()]
        interval = f"95 % interval {words['low']} to {words['high']}"
        return f"Runs {counted_label(claim)}: {listed(shares)} (difference {words['ratio']}, {interval}){tail}"
    if isinstance(effect, Auroc):
        failed = [f"{a} of {n} in “{study.label(arm)}”" for arm, (a, n) in verdict.counts.items()]
        interval = (
            f"95 % interval {words['low']} to {words['high']}" if effect.has_interval else "no interval"
        )
        auroc = f"with an AUROC of {words['size']} ({interval})"
        return f"The {measured_label(claim)} predicts failed runs ({listed(failed)}) {auroc}{tail}"
    metric = verdict.metric
    verb = "ended" if isinstance(metric, Metric) and not metric.counts_failures else "was"
    low, high, than = words["low"], words["high"], "as"
    amount = f"{words['ratio']} times as high in"
    if metric.scale == "linear":
        # The word "higher" or "lower" gives the sign of the effect, so the numbers do not: "0.04 lower (0.03 to
        # 0.05)".
        size, low, high = _linear(effect, math.copysign(1, effect.value), metric.unit, sign="-")
        amount, than = f"{size} {'lower' if effect.value < 0 else 'higher'} in", "than"
    interval = (
        f"95 % interval {low} to {high}, {words['seeds']} per arm"
        if effect.has_interval
        else f"{words['seeds']}, no interval"
    )
    return (
        f"The {metric.label} {verb} {amount} “{study.label(claim.treatment)}” {than} in "
        f"“{study.label(claim.control)}” ({interval}){tail}"
    )


def _lower(sentence: str) -> str:
    return (sentence[:1].lower() + sentence[1:]).rstrip(".")


def _tail(verdict: Verdict) -> str:
    """Return what the effect means for the claim."""
    threshold, equivalence = _threshold(verdict), verdict.claim.test == "equivalence"
    effect = None if equivalence or isinstance(verdict.effect, Auroc) else verdict.effect
    opposite = effect is not None and max(verdict.claim.sign * end for end in (effect.low, effect.high)) < 0
    return {
        "reproduced": f", no difference as large as {threshold}" if equivalence else "",
        "contradicted": f", a difference of at least {threshold}"
        if equivalence
        else ", in the opposite direction"
        if opposite
        else f", weaker than the smallest effect of interest, {threshold}",
        "inconclusive": f", which does not decide claim {verdict.claim.id}",
    }[verdict.verdict]


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
    return {
        "ratio": value,
        "difference": value.lstrip("+"),
        "size": size,
        "low": low,
        "high": high,
        "n": str(effect.n),
        "seeds": plural(effect.n, "seed"),
    }


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
    empty for a claim without a verdict or an effect."""
    effect, metric = verdict.effect, verdict.metric
    if effect is None or not verdict.claim.decided:
        return ""
    words = effect_in_words(verdict)
    before = "×" if metric.scale == "log" else "AUROC " if isinstance(effect, Auroc) else ""
    value, high = (words[name].removesuffix(metric.unit).strip() for name in ("ratio", "high"))
    interval = f"({words['low']} to {high})" if effect.has_interval else "(no interval)"
    return f"{before}{value} {interval} {metric.unit}".strip() + f", n = {effect.n}"


def medians(study: Study, verdict: Verdict) -> tuple[str, list[tuple[str, str]]]:
    """Return (what was measured, its value by label of the arm): the median if the arm has several runs."""
    if verdict.verdict == "not run" or not verdict.medians:
        return "", []
    label = verdict.metric.label if verdict.claim.test == "count" else measured_label(verdict.claim)
    what = f"{capital(label)}, medians" if _several(verdict) else capital(label)
    return what, [(study.label(arm), number(value)) for arm, value in verdict.medians.items()]


def p_values(verdict: Verdict) -> dict[str, str]:
    """Return the p-value and, where the claim shares its level or a check took its verdict away, the adjusted p-value
    and the interval that decides; empty if nothing was tested."""
    adjusted, effect, claim = verdict.adjusted, verdict.effect, verdict.claim
    if adjusted is None or effect is None or not effect.has_interval or math.isnan(verdict.p):
        return {}
    values = {"p": _p(verdict.p)}
    if _p(adjusted.p) != values["p"]:
        values["adjusted p"] = _p(adjusted.p)
    if adjusted.claims > 1 or claim.stopping:
        looks = f", {claim.seeds} to {claim.max_seeds} seeds" if claim.stopping else ""
        values["adjustment"] = f"{adjusted.method}, {plural(adjusted.claims, f'{claim.status} claim')}{looks}"
        decides = " to ".join(interval_text(claim, *effect.interval(adjusted.alpha)))
        values["interval that decides"] = f"{decides} ({percent(1 - adjusted.alpha, 3)})"
    return values


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-4 else "< 0.0001"


def _several(verdict: Verdict) -> bool:
    """Return whether the numbers by arm are medians of several runs."""
    return not verdict.counts and len(verdict.runs) > len(verdict.medians)


def about_numbers(verdicts: Sequence[Verdict]) -> str:
    """Return a sentence on how the effects, intervals and numbers by arm of the verdict table are computed."""
    effects = [v for v in verdicts if v.claim.decided and v.effect is not None]
    means = [v for v in effects if isinstance(v.effect, Effect)]
    parts = []
    if means:
        parts.append("Effects are means over shared seeds")
        if any(v.metric.scale == "log" for v in means):
            parts.append("ratios are averaged on a log scale")
        if any(map(_several, means)):
            parts.append("numbers by arm are medians over runs")
        if any(v.effect is not None and v.effect.has_interval for v in means):
            parts.append("intervals are Student's t")
    if len(means) < len(effects):
        if any(isinstance(v.effect, Counts) for v in effects):
            parts.append("differences of shares have Santner and Snell's exact interval")
        if any(isinstance(v.effect, Auroc) for v in effects):
            parts.append("the interval of an AUROC is a jackknife over runs")
    return f"{capital('; '.join(parts))}." if parts else ""


def _threshold(verdict: Verdict) -> str:
    size = verdict.claim.min_effect
    either = verdict.claim.test == "equivalence"
    sign = 1 if either else verdict.claim.sign
    way = " either way" if either else ""
    if verdict.metric.scale == "log":
        return f"a factor of {plain(exp(sign * size))}{way}"
    return f"{plain(sign * size)} {verdict.metric.unit}".strip() + way


def _plain_headline(study: Study) -> str:
    metric = METRICS["largest_attention_logit"]
    ends = {arm: middle(metric.measure(run, None) for run in study.ended(arm)) for arm in study.arms}
    measured = {arm: value for arm, value in ends.items() if not math.isnan(value)}
    runs = plural(len(study.runs), "run")
    if not measured:
        return f"{study.title}: {runs}; attention logits were not recorded"
    if len(measured) == 1:
        (arm, value), *_ = measured.items()
        ended = verb(study, measured)
        losses = [
            f"{m} {nats(middle(final_loss(run, m).value for run in study.ended(arm)))}"
            for m in study.modalities
            if any(math.isfinite(final_loss(run, m).value) for run in study.ended(arm))
        ]
        also = f" and the losses at {listed(losses)} nats" if losses else ""
        medians = of_medians(study, measured)
        return f"{study.label(arm)}: the largest attention logit {ended} at {number(value)}{also} ({runs}{medians})"
    low, high = min(measured, key=measured.__getitem__), max(measured, key=measured.__getitem__)
    return (
        f"Over {runs} the largest attention logit {verb(study, measured)} between {number(measured[low])} "
        f"({study.label(low)}) and {number(measured[high])} ({study.label(high)}){of_medians(study, measured)}"
    )


def cannot_tell(study: Study, verdicts: Sequence[Verdict]) -> list[str]:
    """Return sentences on what these runs cannot show: first those of the grid, then those that follow from the
    runs."""
    items = study.named("cannot_tell")
    for verdict in verdicts:
        for control in verdict.controls:
            if not control.passed:
                items.append(f"{verdict.claim.id}: “{control.name}” did not pass: {control.detail}.")
        if verdict.claim.decided and verdict.claim.not_checked:
            items.append(f"{verdict.claim.id}: not checked: {listed(verdict.claim.not_checked)}.")
    powers: dict[int, list[str]] = {}
    for verdict in verdicts:
        equivalence = verdict.claim.test == "equivalence"
        if verdict.effect is not None and not equivalence and (size := detectable_in_words(verdict)):
            powers.setdefault(verdict.effect.n, []).append(f"{size} ({verdict.claim.id})")
    items += [
        f"Effects weaker than {listed(sizes)}: with {plural(n, 'seed')} per arm the power for them is below 80 %."
        for n, sizes in powers.items()
    ]
    decided = [v.claim for v in verdicts if v.claim.decided]
    if len(families := {c.alpha_family for c in decided if c.status == "confirmatory"}) > 1:
        items.append(
            f"Whether every confirmatory verdict is right: {plural(len(families), 'family', 'families')} of claims "
            "have an error of 5 % each."
        )
    if unregistered := [c.id for c in decided if not c.seeds]:
        which = listed(unregistered) if len(unregistered) <= MOST_NAMED else plural(len(unregistered), "claim")
        items.append(
            f"Whether seeds were added after a look at the results: {which} registered no number of seeds. Such "
            "looks raise the error of a verdict from 5 % to between 10 and 16 %."
        )
    shown = [v.claim.id for v in verdicts if not v.claim.decided and v.verdict != "not run"]
    if shown:
        items.append(f"{listed(shown)}: shown without a verdict, from a few runs and without an interval.")
    items += _about_runs(study)
    return list(dict.fromkeys(items))


def _about_runs(study: Study) -> list[str]:
    items = []
    if not study.claims:
        items.append(
            "Whether a difference is more than chance: no claim was registered for these runs, so no claim has a "
            f"verdict{'' if study.named('ranking') else ' and no number has an interval'}."
        )
    unfinished = [run for run in study.runs if run.status.status and not run.status.finished]
    if study.missing or unfinished:
        parts = []
        if study.missing:
            have = "has" if len(study.missing) == 1 else "have"
            parts.append(f"{plural(len(study.missing), 'run')} of the grid {have} not started")
        parts += [
            f"“{study.label(run.arm)}”, seed {run.seed}: {run.status.status} at step {run.status.step}"
            for run in unfinished
        ]
        shown = " Figures show unfinished runs; verdicts do not count them." if unfinished else ""
        items.append(f"Results of unfinished runs: {'; '.join(parts)}.{shown}")
    rates = {learning_rate(run) for arm in study.hero for run in study.of_arm(arm)}
    rates = {rate for rate in rates if math.isfinite(rate)}
    tuned = any(study.selection(study.arms[arm]) for arm in study.hero)
    if study.registered and len(rates) == 1 and len(study.hero) > 1 and not tuned:
        items.append(
            f"Other learning rates: the compared arms ran at {rates.pop():g} and were not tuned separately, so an "
            "arm may do better or worse at its best learning rate."
        )
    if len({run.code for run in study.runs if run.code}) > 1:
        items.append(
            "Whether code changes between the runs matter: the runs used several versions of the code."
        )
    return items
