"""The figures of a page: which numbers, in which panels, and what they show in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mmqk.analysis.curves import (
    Figure,
    HeatMap,
    Panel,
    arm_lines,
    bin_width,
    bound_lines,
    layer_map,
)
from mmqk.analysis.metrics import METRICS, attention_entropy
from mmqk.analysis.readings import (
    LOGIT,
    at_end,
    by_logit,
    ends_by_modality,
    hero_reading,
    listed_ends,
    loss_series,
    reduced,
    seeds_caption,
    untrained,
)
from mmqk.analysis.study import Study
from mmqk.analysis.verdicts import middle
from mmqk.analysis.words import capital, listed, nats, number

NORMS = {
    "q_norm": "‖q‖",
    "k_norm": "‖k‖",
    "v_norm": "‖v‖",
    "resid_norm": "‖residual‖",
}
# Losses above this many times the initial one say "high" and nothing more; drawing them flattens the rest.
LOSS_TOP = 1.15


def figures(study: Study) -> list[Figure]:
    """Every figure that the study's runs have numbers for, in the page's order."""
    made = [hero(study), entropy(study), norms(study), final_norm(study), heat_map(study), shown(study)]
    return [figure for figure in made if figure is not None]


def hero(study: Study) -> Figure | None:
    """Loss and largest attention logit by modality."""
    return _loss_and_logits(study, "hero", study.hero, hero_reading(study))


def shown(study: Study) -> Figure | None:
    """The same for the arms that are shown and decide nothing."""
    arms = study.shown
    if not arms:
        return None
    ends = listed_ends(study, by_logit(study, arms), LOGIT)
    diverged = [study.label(a) for a in arms if any(r.status.status == "diverged" for r in study.of_arm(a))]
    tail = f"; diverged: {listed(diverged)}" if diverged else "; none diverged"
    return _loss_and_logits(
        study, "shown", arms, f"The largest attention logit ended at {listed(ends)}{tail}."
    )


def _loss_and_logits(study: Study, name: str, arms: Sequence[str], reading: str) -> Figure | None:
    width = bin_width(study)
    losses, logits = [], []
    for modality in study.modalities:
        lines = arm_lines(study, arms, modality, loss_series(modality, width))
        losses.append(Panel(f"loss/{modality}", capital(modality), "training loss (nats a token)", lines))
        logit = arm_lines(study, arms, modality, reduced("attn_logit_absmax", np.max, modality))
        bound = bound_lines(study, arms, modality)
        title = f"{capital(modality)} queries"
        logits.append(
            Panel(
                f"attn_logit_absmax/{modality}",
                title,
                "largest |attention logit|",
                (*logit, *bound),
                log=True,
            )
        )
    start = max((line.values[0] for panel in losses for line in panel.lines), default=math.nan)
    top = LOSS_TOP * start
    cut = any((line.values > top).any() for panel in losses for line in panel.lines)
    losses = [Panel(p.statistic, p.title, p.ylabel, p.lines, top=top if cut else math.nan) for p in losses]
    rows = tuple(tuple(row) for row in (losses, logits) if any(panel.lines for panel in row))
    if not rows:
        return None
    caption = [seeds_caption(study, arms)]
    if width > 1:
        caption.append(f"A point of the loss is the mean of {width} steps.")
    caption.append(
        "Logits are those of attention, before any cap, largest over layers, heads, keys and the probe's "
        "sequences."
    )
    if cut:
        caption.append(f"Losses above {nats(top)} nats are cut off.")
    if any(line.role == "bound" for panel in logits for line in panel.lines):
        caption.append(
            "Dotted: the QK-Norm bound, which the present gains allow at most. Staying under it is by construction; "
            "the evidence is elsewhere."
        )
    caption += untrained(study, arms)
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
            arm_lines(study, study.hero, m, reduced("attn_entropy", np.min, m)),
        )
        for m in study.modalities
    ]
    if not any(panel.lines for panel in panels):
        return None
    ends = ends_by_modality(study, study.hero, attention_entropy, "queries", lambda v: f"{nats(v)} nats")
    reading = f"The attention entropy ended {ends}." if ends else "The attention entropy is not finite."
    caption = (
        f"{seeds_caption(study, study.hero)} Mean over heads and queries that see at least 8 keys, in the "
        "layer where it is lowest."
    )
    return Figure("entropy", reading, caption, (tuple(panels),), study.hero, study.modalities)


def norms(study: Study) -> Figure | None:
    """Query, key, value and residual norms by modality."""
    rows, growth = [], {}
    for statistic, symbol in NORMS.items():
        row = []
        for modality in study.modalities:
            lines = arm_lines(study, study.hero, modality, reduced(statistic, np.mean, modality))
            title = f"{symbol}, {modality} tokens"
            row.append(Panel(f"{statistic}/{modality}", title, f"mean {symbol} (L2)", lines, log=True))
            for arm in study.hero:
                growth[(symbol, modality, arm)] = middle(
                    line.values[-1] / line.values[0]
                    for line in lines
                    if line.arm == arm and line.seed is not None and line.values[0] > 0
                )
        if any(panel.lines for panel in row):
            rows.append(tuple(row))
    growth = {key: value for key, value in growth.items() if math.isfinite(value) and value > 0}
    if not growth:
        return None
    top = _changed_most(growth)
    reading = (
        f"From first to last probe {top[0]} of {top[1]} tokens in {study.label(top[2])} changed most of "
        f"these norms, ×{number(growth[top])}"
    )
    values = {key: v for key, v in growth.items() if key[0] == NORMS["v_norm"]}
    if values and top not in values:
        most = number(values[_changed_most(values)])
        reading += f"; ‖v‖, which is outside the logit product, by ×{most} at most"
    caption = (
        f"{seeds_caption(study, study.hero)} Mean over tokens, heads and layers. q and k are what enters the "
        "dot product: after QK-Norm, where there is one."
    )
    return Figure("norms", f"{reading}.", caption, tuple(rows), study.hero, study.modalities)


def _changed_most(growth: dict[tuple[str, str, str], float]) -> tuple[str, str, str]:
    return max(growth, key=lambda key: abs(math.log(growth[key])))


def final_norm(study: Study) -> Figure | None:
    """Output norm of the last layer, L2 and RMS: Chameleon's Fig. 5a, by modality."""
    factor = _rms_factor(study)
    row = tuple(
        Panel(
            f"final_norm/{m}",
            f"{capital(m)} tokens",
            "last-layer output, L2",
            arm_lines(study, study.hero, m, reduced("final_norm", np.mean, m)),
            right=("RMS", factor) if factor else None,
        )
        for m in study.modalities
    )
    if not any(panel.lines for panel in row):
        return None
    ends = ends_by_modality(study, study.hero, METRICS["final_norm"].measure, "tokens", number)
    reading = (
        f"The last layer's output norm ended {ends}." if ends else "The last layer's output is not finite."
    )
    caption = (
        f"{seeds_caption(study, study.hero)} Norm of the residual stream after the last layer and before the "
        "final norm, mean over tokens. Chameleon (2405.09818, Fig. 5a) does not say whether its norm is L2 "
        "or RMS" + (": the right axis is RMS." if factor else ".")
    )
    return Figure("final_norm", reading, caption, (row,), study.hero, study.modalities)


def _rms_factor(study: Study) -> float:
    """RMS over L2, which is 1/√width: one number where the arms have one width, and 0 where they do not."""
    ratios = [
        run.series(f"final_rms/{m}")[1] / run.series(f"final_norm/{m}")[1]
        for arm in study.hero
        for run in study.of_arm(arm)
        for m in study.modalities
        if len(run.series(f"final_rms/{m}")[1]) == len(run.series(f"final_norm/{m}")[1]) > 0
    ]
    together = np.concatenate(ratios) if ratios else np.zeros(0)
    together = together[np.isfinite(together)]
    if not len(together) or together.max() > 1.01 * together.min():
        return 0.0
    return float(np.median(together))


def heat_map(study: Study) -> Figure | None:
    """The largest logit by layer and step, in the arms where it ended highest and lowest."""
    ordered = [arm for arm in by_logit(study, study.hero) if not math.isnan(at_end(study, arm, LOGIT))]
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
            last = np.fmax.reduce(peaks)
            if np.isnan(last).all():
                continue
            layer = int(np.nanargmax(last))
            parts.append(f"in layer {layer} of {study.label(arm)} ({number(float(last[layer]))})")
    if not rows:
        return None
    arms = tuple(dict.fromkeys(panel.arm for row in rows for panel in row))
    which = "in the arm where it ended highest, and in the one where it ended lowest" if len(arms) > 1 else ""
    reading = "The largest attention logit by layer."
    if parts:
        reading = f"At the last probe the largest attention logit stood {', and '.join(parts)}."
    caption = f"The largest logit by layer {which}".rstrip() + "; median over seeds, one colour scale."
    return Figure("layers", reading, caption, tuple(rows), arms, study.modalities)
