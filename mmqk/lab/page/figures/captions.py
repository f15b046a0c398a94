"""Titles and captions of figures, made from the values at the end of the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from mmqk.lab.formatting import listed, nats, number, plural
from mmqk.lab.metrics import METRICS, final_loss, is_trained
from mmqk.lab.page.figures.curves import binned, finite
from mmqk.lab.runs.load import Run, Series
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import middle

# More arms than this are not listed in a sentence.
MANY_ARMS = 8
LOGIT = METRICS["largest_attention_logit"].measure


def loss_series(modality: str, width: int) -> Callable[[Run], Series]:
    """Return a function that returns the training loss of a run as means over ``width`` steps."""
    return lambda run: binned(run.series(f"loss/{modality}"), width)


def reduced(statistic: str, reduce: Callable, modality: str) -> Callable[[Run], Series]:
    """Return a function that returns a statistic of a run, reduced over layers, without its non-finite values."""
    return lambda run: finite(run.combined(statistic, reduce, modality))


def at_end(study: Study, arm: str, measure: Callable, modality: str | None = None) -> float:
    """Return a metric of an arm: the median over its finished runs, or over all its runs if none has finished."""
    return middle(measure(run, modality) for run in study.ended(arm))


def listed_ends(
    study: Study, arms: Collection[str], measure: Callable, modality: str | None = None
) -> list[str]:
    """Return each arm's value at the end, with the arm's label if the study has several arms."""
    values = [number(at_end(study, arm, measure, modality)) for arm in arms]
    if len(values) == 1 and len(study.arms) == 1:
        return values
    return [f"{value} ({study.label(arm)})" for value, arm in zip(values, arms, strict=True)]


def verb(study: Study, arms: Collection[str]) -> str:
    """Return ``ended`` if every arm has finished runs, else ``was last``."""
    return "ended" if all(study.finished(arm) for arm in arms) else "was last"


def of_medians(study: Study, arms: Collection[str], before: str = "; medians over runs") -> str:
    """Return ``before`` if any arm's number is a median, because the arm has several runs; else an empty string."""
    return before if any(len(study.ended(arm)) > 1 for arm in arms) else ""


def by_logit(study: Study, arms: Sequence[str]) -> list[str]:
    """Return the arms sorted by their largest logit, highest first."""
    ends = {arm: at_end(study, arm, LOGIT) for arm in arms}
    return sorted(arms, key=lambda arm: (math.isnan(ends[arm]), -ends[arm]))


def ends_by_modality(
    study: Study, arms: Sequence[str], measure: Callable, noun: str, form: Callable[[float], str]
) -> str:
    """Return the range of the arms' values by modality: ``between 1 (a) and 2 (b) for text tokens; at 3 for image
    tokens``.

    Empty if no value is finite.
    """
    parts = []
    for modality in study.modalities:
        ends = {arm: at_end(study, arm, measure, modality) for arm in arms}
        ends = {arm: value for arm, value in ends.items() if math.isfinite(value)}
        if not ends:
            continue
        low, high = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
        where = f"between {form(ends[low])} ({study.label(low)}) and {form(ends[high])} ({study.label(high)})"
        parts.append(f"{where if low != high else f'at {form(ends[low])}'} for {modality} {noun}")
    return "; ".join(parts)


def logit_reading(study: Study, measured: Sequence[str]) -> str:
    """Return a sentence with the final logits of the arms that measured them, without a full stop."""
    if not measured:
        return "Attention logits were not measured"
    return f"The largest attention logit {verb(study, measured)} at {listed(listed_ends(study, measured, LOGIT))}"


def hero_reading(study: Study, arms: Sequence[str]) -> str:
    """Return a sentence with the final logits and the differences between final losses.

    The losses are given because logits at different losses are hard to compare.
    """
    arms = by_logit(study, arms)
    measured = [arm for arm in arms if not math.isnan(at_end(study, arm, LOGIT))]
    if len(arms) > MANY_ARMS:
        if not measured:
            return f"The losses of {plural(len(arms), 'arm')}."
        ends = listed_ends(study, dict.fromkeys((measured[0], measured[-1])), LOGIT)
        where = f"between {ends[-1]} and {ends[0]}" if len(ends) > 1 else f"at {ends[0]}"
        ended = verb(study, measured)
        return (
            f"The largest attention logit of {plural(len(measured), 'arm')} {ended} {where}"
            f"{of_medians(study, measured)}."
        )
    reading = logit_reading(study, measured)
    gaps, compared = [], set(measured)
    for modality in study.modalities:
        losses = {
            arm: middle(final_loss(run, modality).value for run in study.ended(arm))
            for arm in arms
            if all(is_trained(run, modality) for run in study.of_arm(arm))
        }
        losses = {arm: loss for arm, loss in losses.items() if math.isfinite(loss)}
        if len(losses) > 1:
            gaps.append(f"{nats(max(losses.values()) - min(losses.values()))} nats ({modality})")
            compared |= set(losses)
    if gaps:
        what = "final losses" if verb(study, compared) == "ended" else "last losses"
        reading += f"; {what} of trained modalities differ between arms by up to {listed(gaps)}"
    return f"{reading}{of_medians(study, compared)}."


def seeds_caption(study: Study, arms: Sequence[str]) -> str:
    """Return a sentence that explains thin and thick lines."""
    counts = {len(study.of_arm(arm)) for arm in arms}
    if counts == {1}:
        return "One run per arm."
    if not counts:
        return ""
    seeds = plural(min(counts), "run") if len(counts) == 1 else f"{min(counts)} to {max(counts)} runs"
    return f"Thin lines: {seeds} per arm; thick lines: their medians."


def untrained(study: Study, arms: Sequence[str]) -> list[str]:
    """Return a sentence for each arm and modality whose loss is measured but not trained."""
    return [
        f"In “{study.label(arm)}” the {modality} loss is measured but not trained."
        for arm in arms
        for modality in study.modalities
        if any(
            not is_trained(run, modality) and math.isfinite(final_loss(run, modality).value)
            for run in study.of_arm(arm)
        )
    ]
