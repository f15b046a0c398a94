"""The figures of a page: which numbers, in which panels, and what they show in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from mmqk.analysis.curves import (
    Figure,
    HeatMap,
    Panel,
    arm_lines,
    bin_width,
    binned,
    bound_lines,
    layer_map,
)
from mmqk.analysis.metrics import METRICS, attention_entropy, final_loss, is_trained
from mmqk.analysis.runs import Run, Series
from mmqk.analysis.study import Study
from mmqk.analysis.verdicts import middle
from mmqk.analysis.words import capital, listed, nats, number, plural

LOGIT = METRICS["largest_attention_logit"].measure
NORMS = {
    "q_norm": "‖q‖",
    "k_norm": "‖k‖",
    "v_norm": "‖v‖",
    "resid_norm": "‖residual‖",
}
# Losses above this many times the initial one say "high" and nothing more; drawing them flattens the rest.
LOSS_TOP = 1.5


def figures(study: Study) -> list[Figure]:
    """Every figure that the study's runs have numbers for, in the page's order."""
    made = [hero(study), entropy(study), norms(study), final_norm(study), heat_map(study), shown(study)]
    return [figure for figure in made if figure is not None]


def hero(study: Study) -> Figure | None:
    """Loss and largest attention logit by modality."""
    return _loss_and_logits(study, "hero", study.hero, _hero_reading(study))


def shown(study: Study) -> Figure | None:
    """The same for the arms that are shown and decide nothing."""
    arms = study.shown
    if not arms:
        return None
    ends = [f"{number(_end(study, arm, LOGIT))} ({study.label(arm)})" for arm in _by_logit(study, arms)]
    diverged = [study.label(a) for a in arms if any(r.status.status == "diverged" for r in study.of_arm(a))]
    tail = f"; diverged: {listed(diverged)}" if diverged else "; none diverged"
    return _loss_and_logits(study, "shown", arms, f"The largest attention logit ended at {listed(ends)}{tail}.")


def _loss_and_logits(study: Study, name: str, arms: Sequence[str], reading: str) -> Figure | None:
    width = bin_width(study)
    losses, logits = [], []
    for modality in study.modalities:
        lines = arm_lines(study, arms, modality, _loss_series(modality, width))
        losses.append(Panel(f"loss/{modality}", capital(modality), "training loss (nats a token)", lines))
        logit = arm_lines(study, arms, modality, _reduced("attn_logit_absmax", np.max, modality))
        bound = bound_lines(study, arms, modality)
        title = f"{capital(modality)} queries"
        logits.append(
            Panel(f"attn_logit_absmax/{modality}", title, "largest |attention logit|", (*logit, *bound), log=True)
        )
    start = max((line.values[0] for panel in losses for line in panel.lines), default=math.nan)
    top = LOSS_TOP * start
    cut = any((line.values > top).any() for panel in losses for line in panel.lines)
    losses = [Panel(p.statistic, p.title, p.ylabel, p.lines, top=top if cut else math.nan) for p in losses]
    rows = tuple(tuple(row) for row in (losses, logits) if any(panel.lines for panel in row))
    if not rows:
        return None
    caption = [_seeds_caption(study, arms)]
    if width > 1:
        caption.append(f"A point of the loss is the mean of {width} steps.")
    caption.append(
        "Logits are those of the softmax, before any cap, largest over layers, heads, keys and the probe's sequences."
    )
    if cut:
        caption.append(f"Losses above {nats(top)} nats are cut off.")
    if any(line.role == "bound" for panel in logits for line in panel.lines):
        caption.append(
            "Dotted: the QK-Norm bound √d·g², d the head width and g the gain. Staying under it is by construction; "
            "the evidence is elsewhere."
        )
    caption += _untrained(study, arms)
    if any(line.diverged for panel in losses for line in panel.lines):
        caption.append("× marks where a run was stopped as diverged.")
    return Figure(name, reading, " ".join(caption), rows, tuple(arms), study.modalities)


def entropy(study: Study) -> Figure | None:
    """Attention entropy by query modality."""
    panels = [
        Panel(
            f"attn_entropy/{m}",
            f"{capital(m)} queries",
            "attention entropy (nats)",
            arm_lines(study, study.hero, m, _reduced("attn_entropy", np.min, m)),
        )
        for m in study.modalities
    ]
    if not any(panel.lines for panel in panels):
        return None
    parts = []
    for modality in study.modalities:
        ends = _measured({arm: _end(study, arm, attention_entropy, modality) for arm in study.hero})
        if ends:
            low, high = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
            part = f"of {modality} queries ended at {nats(ends[low])} nats in {study.label(low)}"
            if high != low:
                part += f" and {nats(ends[high])} in {study.label(high)}"
            parts.append(part)
    extremes = "lowest and highest" if len(study.hero) > 2 else "entropy"
    reading = f"Attention entropy {'; '.join(parts)}" + (f" ({extremes} arm)." if len(study.hero) > 2 else ".")
    caption = (
        f"{_seeds_caption(study, study.hero)} Mean over heads and queries that see at least 8 keys, in the layer "
        "where it is lowest."
    )
    return Figure("entropy", reading, caption, (tuple(panels),), study.hero, study.modalities)


def norms(study: Study) -> Figure | None:
    """Query, key, value and residual norms by modality."""
    rows, growth = [], {}
    for statistic, symbol in NORMS.items():
        row = []
        for modality in study.modalities:
            lines = arm_lines(study, study.hero, modality, _reduced(statistic, np.mean, modality))
            row.append(Panel(f"{statistic}/{modality}", capital(modality), f"mean {symbol} (L2)", lines, log=True))
            for arm in study.hero:
                growth[(symbol, modality, arm)] = middle(
                    line.values[-1] / line.values[0]
                    for line in lines
                    if line.arm == arm and line.seed is not None and line.values[0] > 0
                )
        if any(panel.lines for panel in row):
            rows.append(tuple(row))
    growth = {key: value for key, value in growth.items() if not math.isnan(value)}
    if not growth:
        return None
    top = max(growth, key=growth.__getitem__)
    reading = (
        f"Of the four norms, {top[0]} of {top[1]} tokens in {study.label(top[2])} changed by the largest factor from "
        f"first to last probe, ×{number(growth[top])}"
    )
    values = {key: v for key, v in growth.items() if key[0] == "‖v‖"}
    if values and top[0] != "‖v‖":
        v = max(values, key=values.__getitem__)
        reading += f"; ‖v‖, which is outside the logit product, by at most ×{number(values[v])}"
    caption = (
        f"{_seeds_caption(study, study.hero)} Mean over tokens, heads and layers. q and k are what enters the dot "
        "product: after QK-Norm, where there is one."
    )
    return Figure("norms", f"{reading}.", caption, tuple(rows), study.hero, study.modalities)


def final_norm(study: Study) -> Figure | None:
    """Output norm of the last layer, L2 and RMS: Chameleon's Fig. 5a, by modality."""
    rows = []
    for statistic, label in (("final_norm", "last-layer output, L2"), ("final_rms", "last-layer output, RMS")):
        row = tuple(
            Panel(
                f"{statistic}/{m}",
                capital(m),
                label,
                arm_lines(study, study.hero, m, _reduced(statistic, np.mean, m)),
            )
            for m in study.modalities
        )
        if any(panel.lines for panel in row):
            rows.append(row)
    if not rows:
        return None
    parts = []
    for modality in study.modalities:
        ends = [
            f"{number(_end(study, arm, METRICS['final_norm'].measure, modality))} ({study.label(arm)})"
            for arm in study.hero
        ]
        parts.append(f"for {modality} tokens at {listed(ends)}")
    reading = f"The last layer's output norm ended {', and '.join(parts)}."
    caption = (
        f"{_seeds_caption(study, study.hero)} Mean over tokens of the residual stream after the last layer, before "
        "the final norm. Chameleon (2405.09818, Fig. 5a) does not say whether its norm is L2 or RMS: both are here."
    )
    return Figure("final_norm", reading, caption, tuple(rows), study.hero, study.modalities)


def heat_map(study: Study) -> Figure | None:
    """The largest logit by layer and step, in the arm where it ended highest and the one where it ended lowest."""
    ordered = [arm for arm in _by_logit(study, study.hero) if not math.isnan(_end(study, arm, LOGIT))]
    rows, parts = [], []
    for arm in dict.fromkeys((ordered[0], ordered[-1]) if ordered else ()):
        row, peaks = [], []
        for modality in study.modalities:
            found = layer_map(study, arm, "attn_logit_absmax", modality)
            if found is None:
                continue
            steps, values = found
            title = f"{study.label(arm)}: {modality} queries"
            row.append(
                HeatMap("attn_logit_absmax", title, "largest |attention logit|", arm, modality, steps, values)
            )
            peaks.append(values[:, -1])
        if row:
            rows.append(tuple(row))
            last = np.max(peaks, axis=0)
            layer = int(np.argmax(last))
            parts.append(f"in layer {layer} of {study.label(arm)} ({number(float(last[layer]))})")
    if not rows:
        return None
    arms = tuple(dict.fromkeys(panel.arm for row in rows for panel in row))
    which = "in the arm where it ended highest, and in the one where it ended lowest" if len(arms) > 1 else ""
    reading = f"At the last probe the largest attention logit stood {', and '.join(parts)}."
    caption = f"The largest logit by layer {which}".rstrip() + "; median over seeds, one colour scale."
    return Figure("layers", reading, caption, tuple(rows), arms, study.modalities)


def _loss_series(modality: str, width: int) -> Callable[[Run], Series]:
    return lambda run: binned(run.series(f"loss/{modality}"), width)


def _reduced(statistic: str, reduce: Callable, modality: str) -> Callable[[Run], Series]:
    def series(run: Run) -> Series:
        steps, values = run.combined(statistic, reduce, modality)
        keep = np.isfinite(values)
        return steps[keep], values[keep]

    return series


def _end(study: Study, arm: str, measure: Callable, modality: str | None = None) -> float:
    return middle(measure(run, modality) for run in study.of_arm(arm))


def _by_logit(study: Study, arms: Sequence[str]) -> list[str]:
    """Arms by their largest logit, highest first."""
    return sorted(arms, key=lambda arm: -_end(study, arm, LOGIT))


def _measured(values: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if not math.isnan(value)}


def _hero_reading(study: Study) -> str:
    arms = _by_logit(study, study.hero)
    ends = [f"{number(_end(study, arm, LOGIT))} ({study.label(arm)})" for arm in arms]
    reading = f"The largest attention logit ended at {listed(ends)}"
    gaps = []
    for modality in study.modalities:
        losses = [
            middle(final_loss(run, modality).value for run in study.of_arm(arm))
            for arm in arms
            if all(is_trained(run, modality) for run in study.of_arm(arm))
        ]
        losses = [loss for loss in losses if math.isfinite(loss)]
        if len(losses) > 1:
            gaps.append(f"{nats(max(losses) - min(losses))} nat ({modality})")
    if gaps:
        reading += f"; final losses of what is trained lie within {listed(gaps)} of each other"
    return f"{reading}."


def _seeds_caption(study: Study, arms: Sequence[str]) -> str:
    counts = {len(study.of_arm(arm)) for arm in arms}
    if counts == {1}:
        return "One run an arm."
    seeds = plural(min(counts), "seed") if len(counts) == 1 else f"{min(counts)} to {max(counts)} seeds"
    return f"Thin lines: {seeds} an arm; thick: their median."


def _untrained(study: Study, arms: Sequence[str]) -> list[str]:
    return [
        f"In {study.label(arm)} the {modality} loss is measured and not trained."
        for arm in arms
        for modality in study.modalities
        if any(not is_trained(run, modality) for run in study.of_arm(arm))
    ]
