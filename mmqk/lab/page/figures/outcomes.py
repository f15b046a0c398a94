"""Outcomes of the arms by modality, over time and by layer: the figures that ``report: {outcomes: true}`` selects."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mmqk.lab.formatting import capital, number
from mmqk.lab.metrics import METRICS
from mmqk.lab.metrics.probes import last_probes
from mmqk.lab.page.figures.captions import at_end, of_medians, verb
from mmqk.lab.page.figures.curves import arm_lines, bin_width, binned, finite, points_a_line
from mmqk.lab.page.figures.shapes import Figure, Line, Panel
from mmqk.lab.page.figures.style import legend
from mmqk.lab.runs.load import Run, Series
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import middle

# The short label of each metric, and whether its axis is logarithmic.
OUTCOMES = {
    "largest_attention_logit": ("largest |logit|", True),
    "logit_mean": ("mean μ", True),
    "logit_offset": ("offset δ", True),
    "logit_spread": ("spread r", True),
    "q_norm": ("‖q‖", True),
    "k_norm": ("‖k‖", True),
    "resid_norm": ("‖residual‖", True),
    "final_norm": ("‖last layer‖", True),
    "weight_growth": ("growth of W_q, W_k", False),
    "attention_mass_other": ("mass on others", False),
    "final_excess": ("excess loss", False),
}
# The statistic that is drawn by layer for a metric, and the function that reduces it over key modalities.
BY_LAYER: dict[str, tuple[str, Callable]] = {
    "largest_attention_logit": ("attn_logit_absmax", np.max),
    "logit_offset": ("attn_logit_offset_var", np.mean),
    "q_norm": ("q_norm", np.mean),
}


def outcome_figures(study: Study) -> list[Figure]:
    """Draw the curves over time and the end values by layer; empty if the grid does not select them."""
    return [figure for figure in (over_time(study), by_layer(study)) if figure]


def over_time(study: Study) -> Figure | None:
    """Draw one row for each outcome, one column for each modality, one line for each arm."""
    arms = study.with_runs(study.outcomes)
    points = points_a_line(len(arms))
    width = bin_width(study, points)
    rows = []
    for name, (label, log) in OUTCOMES.items():
        row = []
        for modality in study.modalities:
            lines = arm_lines(study, arms, modality, _series(name, modality, width), points)
            kept = tuple(line for line in lines if line.role == "median" or line.alone)
            row.append(Panel(f"{name}/{modality}", capital(modality), label, kept, log=log))
        if any(panel.lines for panel in row):
            rows.append(tuple(row))
    if not rows:
        return None
    caption = (
        "A line is the median over the runs of an arm, up to the last step that all of them reached. Logits are"
        " split into the mean μ of a row, the offset δ of a modality's keys and the spread r within them; each"
        " is a root mean square over layers. The modality is that of the queries or tokens. Mass on others: the share"
        " of attention on keys of other modalities. Norms are means over layers. Growth of W_q, W_k: the growth rate"
        " of ‖W_q‖² + ‖W_k‖² from the losses of a modality, per 1,000 steps."
    )
    if width > 1:
        caption += f" A point of the excess loss is the mean of {width} steps."
    reading = "The outcomes of each arm over time."
    if ends := _offsets(study, arms):
        reading = f"The offset between modalities {verb(study, arms)} at {ends}{of_medians(study, arms)}."
    return Figure("outcomes", reading, caption, tuple(rows), arms, legend(study, arms, study.modalities))


def _series(name: str, modality: str, width: int) -> Callable[[Run], Series]:
    def series(run: Run) -> Series:
        of_run = METRICS[name].series(run, modality)
        return binned(of_run, width) if name == "final_excess" else finite(of_run)

    return series


def _offsets(study: Study, arms: tuple[str, ...]) -> str:
    ends = [(arm, at_end(study, arm, METRICS["logit_offset"].measure)) for arm in arms]
    return ", ".join(f"{number(end)} ({study.label(arm)})" for arm, end in ends if math.isfinite(end))


def by_layer(study: Study) -> Figure | None:
    """Draw end values by layer: one row for each of `BY_LAYER`, one column per modality and one line per arm."""
    arms = study.with_runs(study.outcomes)
    found = {tag.layer for arm in arms for run in study.of_arm(arm) for tag in run.tags.values()}
    layers = sorted(layer for layer in found if layer is not None)
    rows = []
    for name in BY_LAYER:
        row = []
        for modality in study.modalities:
            lines = []
            for arm in arms:
                ends = [middle(_end(run, name, modality, i) for run in study.ended(arm)) for i in layers]
                at = [(float(layer), end) for layer, end in zip(layers, ends, strict=True) if math.isfinite(end)]
                if at:
                    x, y = np.array(at).T
                    lines.append(Line(arm, modality, None, x, y, "median"))
            panel = Panel(
                f"{name}/{modality}", capital(modality), OUTCOMES[name][0], tuple(lines), log=True,
                xlabel="layer", x="at_layer", ticks=tuple(map(str, layers)),
            )  # fmt: skip
            row.append(panel)
        if any(panel.lines for panel in row):
            rows.append(tuple(row))
    if not rows or layers != list(range(len(layers))):
        return None
    caption = "The median of the last three probes of a run, by layer; a line is the median over the runs of an arm."
    keys = legend(study, arms, study.modalities)
    return Figure("outcomes_by_layer", "The end values by layer.", caption, tuple(rows), arms, keys)


def _end(run: Run, name: str, modality: str, layer: int) -> float:
    statistic, reduce = BY_LAYER[name]
    values = last_probes(run.combined(statistic, reduce, modality, layer))
    if not len(values):
        return math.nan
    end = float(np.median(values))
    return math.sqrt(end) if name == "logit_offset" and end >= 0 else end
