"""The standard figures of a page: their numbers, panels and one-sentence titles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mmqk.lab.formatting import capital, listed, nats, number
from mmqk.lab.metrics import METRICS
from mmqk.lab.metrics.probes import LAST_PROBES
from mmqk.lab.page.figures.captions import (
    LOGIT,
    at_end,
    by_logit,
    ends_by_modality,
    hero_reading,
    logit_reading,
    loss_series,
    of_medians,
    reduced,
    seeds_caption,
    untrained,
    verb,
)
from mmqk.lab.page.figures.curves import arm_lines, bin_width, bound_lines, layer_map, points_a_line
from mmqk.lab.page.figures.shapes import Figure, HeatMap, Line, Panel
from mmqk.lab.page.figures.style import GRAY, arm_colors, families, legend
from mmqk.lab.runs.load import Run, Series
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import middle

NORMS = {
    "q_norm": "‖q‖",
    "k_norm": "‖k‖",
    "v_norm": "‖v‖",
    "resid_norm": "‖residual‖",
}
# Losses above this multiple of the initial loss are cut off: they would flatten the other curves.
LOSS_TOP = 1.15
FEW_ARMS = 8
# With more runs than this the later figures show medians only.
FEW_RUNS = 40


def figures(study: Study) -> list[Figure]:
    """Draw every figure that the runs have numbers for, in the order of the page."""
    made = [hero(study), entropy(study), norms(study), final_norm(study), heat_map(study), shown(study)]
    return [figure for figure in made if figure is not None]


def hero_arms(study: Study) -> tuple[str, ...]:
    """Return the arms of the first figure: the arms that the grid or its claims name; without a grid, all arms."""
    if study.registered and study.hero:
        return study.hero
    have = {run.arm for run in study.runs if run.tags}
    return tuple(arm for arm in study.arms if arm in have)


def leading_arms(study: Study) -> tuple[str, ...]:
    """Return the arms of the later figures.

    All `hero_arms` if they are few; otherwise the two ends of each family's axis, or the arms that have a color.
    """
    arms = hero_arms(study)
    if len(arms) <= FEW_ARMS:
        return arms
    ends = [
        arm
        for members in families(study).values()
        if (kept := [m for m in members if m in arms])
        for arm in dict.fromkeys((kept[0], kept[-1]))
    ]
    if len(ends) < len(arms) and len(ends) <= FEW_ARMS:
        return tuple(ends)
    colors = arm_colors(study)
    return tuple(arm for arm in arms if colors.get(arm, GRAY) != GRAY)[:FEW_ARMS]


def hero(study: Study) -> Figure | None:
    """Draw the loss and largest attention logit by modality."""
    arms = hero_arms(study)
    return _loss_and_logits(study, "hero", arms, hero_reading(study, arms))


def shown(study: Study) -> Figure | None:
    """Draw `hero` for the arms that are shown without a verdict."""
    arms = study.shown
    if not arms:
        return None
    measured = [arm for arm in by_logit(study, arms) if not math.isnan(at_end(study, arm, LOGIT))]
    runs = [run for arm in arms for run in study.of_arm(arm)]
    diverged = [study.label(a) for a in arms if any(r.status.status == "diverged" for r in study.of_arm(a))]
    tail = f"; diverged: {listed(diverged)}" if diverged else ""
    if not diverged and all(run.status.finished for run in runs):
        tail = "; none diverged"
    reading = logit_reading(study, measured) + of_medians(study, measured)
    return _loss_and_logits(study, "shown", arms, f"{reading}{tail}.")


def _loss_and_logits(study: Study, name: str, arms: Sequence[str], reading: str) -> Figure | None:
    points = points_a_line(2 * len(study.modalities) * sum(len(study.of_arm(arm)) for arm in arms))
    width = bin_width(study, points)
    losses, logits = [], []
    for modality in study.modalities:
        lines = arm_lines(study, arms, modality, loss_series(modality, width), points)
        losses.append(Panel(f"loss/{modality}", capital(modality), "training loss (nats per token)", lines))
        logit = arm_lines(study, arms, modality, reduced("attn_logit_absmax", np.max, modality), points)
        bound = bound_lines(study, arms, modality) if len(arms) <= FEW_ARMS else ()
        panel = Panel(
            f"attn_logit_absmax/{modality}",
            f"{capital(modality)} queries",
            "largest |attention logit|",
            (*logit, *bound),
            log=True,
        )
        if bound:
            highest = max(bound, key=lambda line: line.values[-1])
            x, y = float(highest.steps[-1]), float(highest.values.max())
            panel = replace(panel, notes=((x, y, "QK-Norm bound (by construction)", "left"),))
        logits.append(panel)
    start = max((line.values[0] for panel in losses for line in panel.lines), default=math.nan)
    top = LOSS_TOP * start
    cut = any((line.values > top).any() for panel in losses for line in panel.lines)
    losses = [replace(panel, top=top if cut else math.nan) for panel in losses]
    if len(arms) > FEW_ARMS:
        losses, logits = ([_runs_alone(panel) for panel in row] for row in (losses, logits))
    rows = tuple(tuple(row) for row in (losses, logits) if any(panel.lines for panel in row))
    if not rows:
        return None
    caption = [seeds_caption(study, arms) if len(arms) <= FEW_ARMS else "One line per run."]
    if width > 1 and any(panel.lines for panel in losses):
        caption.append(f"A point of the loss is the mean of {width} steps.")
    if any(line.role != "bound" for panel in logits for line in panel.lines):
        caption.append(
            "Attention logits are measured before any cap: the largest over layers, heads, keys and the sequences of "
            f"the probe. The final logit or norm of a run is the median of its last {LAST_PROBES} probes."
        )
    if cut:
        caption.append(f"Losses above {nats(top)} nats are cut off.")
    if any(line.role == "bound" for panel in logits for line in panel.lines):
        caption.append(
            "Dotted: the QK-Norm bound, the largest logit that the gains of that step allow. Logits below the bound "
            "are no evidence for a claim, because they cannot exceed it."
        )
    caption += untrained(study, arms)
    if any(line.diverged for panel in (*losses, *logits) for line in panel.lines):
        caption.append("× marks where a run was stopped as diverged.")
    if any(len(at) > points for at in _probes(study, arms)):
        caption.append(
            f"Each logit line is thinned to {points} points: the highest and lowest value of every interval."
        )
    return Figure(name, reading, " ".join(caption), rows, tuple(arms), legend(study, arms, study.modalities))


def _runs_alone(panel: Panel) -> Panel:
    """Return the panel without medians, which would hide the runs if there are many arms."""
    return replace(panel, lines=tuple(replace(li, alone=False) for li in panel.lines if li.role == "seed"))


def _probes(study: Study, arms: Sequence[str]) -> list[np.ndarray]:
    series = reduced("attn_logit_absmax", np.max, study.modalities[0]) if study.modalities else None
    return [series(run)[0] for arm in arms for run in study.of_arm(arm)] if series else []


def few_lines(
    study: Study, arms: Sequence[str], modality: str, series: Callable[[Run], Series]
) -> tuple[Line, ...]:
    """Return `arm_lines`; if there are many runs, only the medians."""
    runs = sum(len(study.of_arm(arm)) for arm in arms)
    lines = arm_lines(study, arms, modality, series, points_a_line(runs))
    return lines if runs <= FEW_RUNS else tuple(line for line in lines if line.seed is None or line.alone)


def lines_caption(study: Study, arms: Sequence[str]) -> str:
    """Return a sentence that explains the lines of `few_lines`."""
    if sum(len(study.of_arm(arm)) for arm in arms) <= FEW_RUNS:
        return seeds_caption(study, arms)
    return "Lines: medians over the runs of an arm; single runs are in the first figure."


def entropy(study: Study) -> Figure | None:
    """Draw the attention entropy by query modality."""
    arms = leading_arms(study)
    panels = [
        Panel(
            f"attn_entropy/{m}",
            f"{capital(m)} queries",
            "attention entropy (nats)",
            few_lines(study, arms, m, reduced("attn_entropy", np.min, m)),
        )
        for m in study.modalities
    ]
    if not any(panel.lines for panel in panels):
        return None
    measure = METRICS["attention_entropy"].measure
    ends = ends_by_modality(study, arms, measure, "queries", lambda v: f"{nats(v)} nats")
    ended = f"{verb(study, arms)} {ends}{of_medians(study, arms)}"
    reading = f"The attention entropy {ended}." if ends else "The attention entropy is not finite."
    caption = (
        f"{lines_caption(study, arms)} Mean over heads and queries with at least 8 keys, in the layer with the "
        "lowest entropy."
    )
    return Figure("entropy", reading, caption, (tuple(panels),), arms, legend(study, arms, study.modalities))


def norms(study: Study) -> Figure | None:
    """Draw the query, key, value and residual norms by modality."""
    arms = leading_arms(study)
    rows, growth = [], {}
    for statistic, symbol in NORMS.items():
        row = []
        for modality in study.modalities:
            lines = few_lines(study, arms, modality, reduced(statistic, np.mean, modality))
            title = f"{symbol}, {modality} tokens"
            row.append(Panel(f"{statistic}/{modality}", title, f"mean {symbol} (L2)", lines, log=True))
            for arm in arms:
                of_arm = [line for line in lines if line.arm == arm and line.values[0] > 0]
                of_runs = [line for line in of_arm if line.seed is not None]
                # With many runs the lines are medians only.
                growth[(symbol, modality, arm)] = middle(
                    line.values[-1] / line.values[0] for line in of_runs or of_arm
                )
        if any(panel.lines for panel in row):
            rows.append(tuple(row))
    growth = {key: value for key, value in growth.items() if math.isfinite(value) and value > 0}
    if not growth:
        return None
    top = _changed_most(growth)
    reading = (
        f"Of these norms, {top[0]} of {top[1]} tokens in “{study.label(top[2])}” changed most from first to last "
        f"probe: ×{number(growth[top])}"
    )
    values = {key: v for key, v in growth.items() if key[0] == NORMS["v_norm"]}
    if values and top not in values:
        most = number(values[_changed_most(values)])
        reading += f"; ‖v‖, which does not enter the logits, ×{most} where it changed most"
    caption = (
        f"{lines_caption(study, arms)} Mean over tokens, heads and layers. q and k are those of the dot product: "
        "after QK-Norm in arms that have it."
    )
    return Figure("norms", f"{reading}.", caption, tuple(rows), arms, legend(study, arms, study.modalities))


def _changed_most(growth: dict[tuple[str, str, str], float]) -> tuple[str, str, str]:
    return max(growth, key=lambda key: abs(math.log(growth[key])))


def final_norm(study: Study, arms: tuple[str, ...] = ()) -> Figure | None:
    """Draw the output norm of the last layer, L2 and RMS: Chameleon's Fig. 5a, by modality."""
    arms = arms or leading_arms(study)
    factor = _rms_factor(study, arms)
    row = tuple(
        Panel(
            f"final_norm/{m}",
            f"{capital(m)} tokens",
            "last-layer output, L2",
            few_lines(study, arms, m, reduced("final_norm", np.mean, m)),
            right=("RMS", factor) if factor else None,
        )
        for m in study.modalities
    )
    if not any(panel.lines for panel in row):
        return None
    ends = ends_by_modality(study, arms, METRICS["final_norm"].measure, "tokens", number)
    reading = (
        f"The last layer's output norm {verb(study, arms)} {ends}{of_medians(study, arms)}."
        if ends
        else "The last layer's output is not finite."
    )
    caption = (
        f"{lines_caption(study, arms)} Norm of the residual stream after the last layer and before the "
        "final norm, mean over tokens. Chameleon (2405.09818, Fig. 5a) does not specify whether its norm is L2 "
        "or RMS" + (": the right axis is RMS." if factor else ".")
    )
    keys = legend(study, arms, study.modalities)
    return Figure("final_norm", reading, caption, (row,), arms, keys, like="Chameleon Fig. 5a")


def _rms_factor(study: Study, arms: Sequence[str]) -> float:
    """Return the ratio of the RMS to the L2 norm, which is 1/√width; 0 if the arms differ in width."""
    modalities = study.modalities
    ratios = [
        run.series(f"final_rms/{m}")[1] / run.series(f"final_norm/{m}")[1]
        for arm in arms
        for run in study.of_arm(arm)
        for m in modalities
        if len(run.series(f"final_rms/{m}")[1]) == len(run.series(f"final_norm/{m}")[1]) > 0
    ]
    together = np.concatenate(ratios) if ratios else np.zeros(0)
    together = together[np.isfinite(together)]
    if not len(together) or together.max() > 1.01 * together.min():
        return 0.0
    return float(np.median(together))


def heat_map(study: Study) -> Figure | None:
    """Draw the largest logit by layer and step, in the arms with the highest and the lowest final logit."""
    arms = leading_arms(study)
    ordered = [arm for arm in by_logit(study, arms) if not math.isnan(at_end(study, arm, LOGIT))]
    rows: list[tuple[HeatMap, ...]] = []
    parts: list[str] = []
    for arm in dict.fromkeys((ordered[0], ordered[-1]) if ordered else ()):
        row: list[HeatMap] = []
        peaks: list[tuple[float, int]] = []
        for modality in study.modalities:
            by_layer = layer_map(study, arm, "attn_logit_absmax", modality)
            if by_layer is None:
                continue
            title = f"{study.label(arm)}: {modality} queries"
            row.append(HeatMap("attn_logit_absmax", title, "largest |attention logit|", arm, modality, *by_layer))
            layers, _, values = by_layer
            peaks += [(value, layer) for value, layer in zip(values[:, -1], layers, strict=True) if value > 0]
        if row:
            rows.append(tuple(row))
            if peaks:
                value, layer = max(peaks)
                parts.append(f"in layer {layer} of “{study.label(arm)}” ({number(float(value))})")
    if not rows:
        return None
    drawn = tuple(dict.fromkeys(panel.arm for row in rows for panel in row))
    at = "final" if verb(study, drawn) == "ended" else "latest"
    which = f". Of the arms of the first figure, those with the highest and the lowest {at} logit"
    reading = "The largest attention logit by layer."
    median = of_medians(study, drawn, "median over seeds, ")
    if parts:
        of = "the largest attention logit" if not median else "the median over seeds of the largest attention logit"
        reading = f"At the last probe {of} was highest {' and '.join(parts)}."
    caption = f"The largest logit by layer{which if len(drawn) > 1 else ''}; {median}one color scale."
    return Figure("layers", reading, caption, tuple(rows), drawn)
