"""The figures of a page: curves of statistics over steps by modality, survival, and the runs of a claim.

`over_steps` draws most of them: a row per statistic, a panel per modality, a thin line per run and a thick one for
the median of each arm.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex

from mmqk.lab.formatting import capital, slug
from mmqk.lab.metrics import METRICS, Metric, find_metric
from mmqk.lab.page import drawing
from mmqk.lab.page.claims import claim_values
from mmqk.lab.page.drawing import FEW_ARMS, Figure, Line, Panel
from mmqk.lab.runs import EMPTY, Run, Series
from mmqk.lab.study import Study
from mmqk.lab.verdicts.assess import Verdict
from mmqk.lab.verdicts.measure import TIME, kaplan_meier, middle, times_to_failure

# A line has at most POINTS points. The lines of a figure have at most ALL_POINTS points together, but each of them at
# least FEWEST. A page with 300 runs is then below 5 MB.
POINTS, ALL_POINTS, FEWEST = 120, 14_000, 16
# With more runs than this the figures after the first show medians only.
FEW_RUNS = 40


@dataclass(frozen=True)
class Curve:
    """A row of a figure: a statistic of a run over its steps, in a panel per modality.

    Attributes:
        statistic: its name in the CSV.
        label: label of the y-axis.
        series: returns the statistic of a run by modality.
        log: whether the y-axis is logarithmic.
        every_step: whether it is measured at every step, so that a point is a mean over steps.
        bound: statistic that bounds it from above by construction; empty if there is none.
        top: upper limit of y as a multiple of the largest first value.
    """

    statistic: str
    label: str
    series: Callable[[Run, str], Series]
    log: bool = True
    every_step: bool = False
    bound: str = ""
    top: float = math.nan

    def of(self, modality: str, width: int) -> Callable[[Run], Series]:
        """Return the function that gives the finite values of a run; for a statistic of every step, their means over
        ``width`` steps."""
        return lambda run: binned(self.series(run, modality), width if self.every_step else 1)


def _probed(statistic: str, label: str, reduce: Callable, log: bool = True, bound: str = "") -> Curve:
    """Return the curve of a statistic that is reduced over layers."""
    return Curve(statistic, label, lambda run, m: run.combined(statistic, reduce, m), log, bound=bound)


LOSS = Curve("loss", "training loss (nats per token)", lambda run, m: run.series(f"loss/{m}"), False, True, top=1.15)
LOGIT = _probed("attn_logit_absmax", "largest |attention logit|", np.max, bound="attn_logit_bound")
ENTROPY = _probed("attn_entropy", "attention entropy (nats)", np.min, log=False)
NORMS = [
    _probed(name, f"mean {symbol} (L2)", np.mean)
    for name, symbol in {"q_norm": "‖q‖", "k_norm": "‖k‖", "v_norm": "‖v‖", "resid_norm": "‖residual‖"}.items()
]
OUTPUT = _probed("final_norm", "last-layer output (L2)", np.mean, log=False)
OUTCOMES = [
    Curve(name, label, METRICS[name].series, METRICS[name].scale == "log", every_step=name == "final_excess")
    for name, label in {
        "largest_attention_logit": "largest |logit|", "logit_mean": "mean μ", "logit_offset": "offset δ",
        "logit_spread": "spread r", "q_norm": "‖q‖", "k_norm": "‖k‖", "resid_norm": "‖residual‖",
        "final_norm": "‖last layer‖", "weight_growth": "growth of W_q, W_k", "attention_mass_other": "mass on others",
        "final_excess": "excess loss",
    }.items()
]  # fmt: skip


def figures(study: Study, verdicts: Sequence[Verdict]) -> list[Figure]:
    """Return every figure that the runs have numbers for, except those of `sweeps`."""
    arms = later_arms(study)
    shown = "Shown without a verdict: loss and largest attention logit"
    made = [
        hero(study, "hero", "Loss and largest attention logit", drawing.first_arms(study)),
        survival(study),
        *(claim_figure(study, verdict) for verdict in verdicts),
        over_steps(study, "entropy", "Attention entropy", arms, [ENTROPY]),
        over_steps(study, "norms", "Norms by modality", arms, NORMS),
        over_steps(study, "final_norm", "Output norm of the last layer", arms, [OUTPUT], like="Chameleon Fig. 5a"),
        by_layer(study),
        over_steps(study, "outcomes", "Outcomes over time", drawing.outcome_arms(study), OUTCOMES, "medians"),
        hero(study, "shown", shown, drawing.shown_arms(study)),
    ]
    return [figure for figure in made if figure is not None]


def later_arms(study: Study) -> tuple[str, ...]:
    """Return the arms of the later figures: those of the first figures if they are few; otherwise the two ends of
    each family's axis, or the arms that have a color."""
    arms = drawing.first_arms(study)
    if len(arms) <= FEW_ARMS:
        return arms
    members = [[arm for arm in family if arm in arms] for family in drawing.families(study).values()]
    ends = [arm for kept in members if kept for arm in dict.fromkeys((kept[0], kept[-1]))]
    if len(ends) < len(arms) and len(ends) <= FEW_ARMS:
        return tuple(ends)
    colors = drawing.arm_colors(study)
    return tuple(arm for arm in arms if colors[arm] != drawing.GRAY)[:FEW_ARMS]


def figure_of(
    name: str, title: str, rows: Sequence[Sequence[Panel]], like: str = "", shared: bool = True
) -> Figure | None:
    """Return the figure without rows that have no line; None if no row has one."""
    kept = tuple(tuple(row) for row in rows if any(panel.lines for panel in row))
    return Figure(name, title, kept, like, shared) if kept else None


def over_steps(
    study: Study, name: str, title: str, arms: Sequence[str], curves: Sequence[Curve], only: str = "", like: str = ""
) -> Figure | None:
    """Draw statistics by step: a row per statistic, a panel per modality.

    ``only`` selects "all" lines, the "runs" or the "medians"; without it, many runs have medians only.
    """
    runs = sum(len(study.of_arm(arm)) for arm in arms)
    only = only or ("medians" if runs > FEW_RUNS else "all")
    lines = len(arms) if only == "medians" else runs
    points = points_a_line(lines * len(curves) * len(study.modalities))
    width = max(1, math.ceil(max((run.last_step for run in study.runs), default=1) / points))
    rows = []
    for curve in curves:
        row = []
        for m in study.modalities:
            drawn = arm_lines(study, arms, m, curve.of(m, width), points, only)
            for arm in arms if curve.bound and len(arms) <= FEW_ARMS else ():
                bounds = [run.combined(curve.bound, np.max) for run in study.of_arm(arm)]
                drawn += [replace(line, role="bound") for line in median_line(arm, m, bounds, points)]
            row.append(Panel(f"{curve.statistic}/{m}", capital(m), curve.label, tuple(drawn), curve.log))
        top = curve.top * max((line.y[0] for panel in row for line in panel.lines), default=math.nan)
        rows.append([replace(panel, top=top) for panel in row])
    return figure_of(name, title, rows, like)


def hero(study: Study, name: str, title: str, arms: Sequence[str]) -> Figure | None:
    """Draw the loss and the largest attention logit; of many arms each run, because medians would hide the runs."""
    return over_steps(study, name, title, arms, [LOSS, LOGIT], "runs" if len(arms) > FEW_ARMS else "all")


def by_layer(study: Study) -> Figure | None:
    """Draw the largest logit by layer, in the arms with the highest and the lowest final logit."""
    logit = METRICS["largest_attention_logit"].measure
    ends = {arm: middle(logit(run, None) for run in study.ended(arm)) for arm in later_arms(study)}
    ordered = sorted((arm for arm in ends if not math.isnan(ends[arm])), key=lambda arm: -ends[arm])
    rows = []
    for arm in dict.fromkeys((ordered[0], ordered[-1]) if ordered else ()):
        row = []
        for m in study.modalities:
            lines, title = tuple(layer_lines(study, arm, m)), f"{study.label(arm)}: {m}"
            row.append(Panel(f"{LOGIT.statistic}/{m}", title, LOGIT.label, lines, log=True))
        rows.append(row)
    return figure_of("layers", "Largest attention logit by layer", rows)


def layer_lines(study: Study, arm: str, modality: str) -> list[Line]:
    """Return a line per layer: the largest logit, median over the runs of an arm that measured the layer, at the
    steps that all of them have."""
    runs, statistic = study.of_arm(arm), LOGIT.statistic
    found = {tag.layer for run in runs for tag in run.tags.values() if tag.statistic == statistic}
    layers = sorted(layer for layer in found if layer is not None)
    lines = []
    # Light to dark, readable on white.
    colors = colormaps["viridis_r"](np.linspace(0.12, 1, len(layers)))
    for layer, color in zip(layers, map(to_hex, colors), strict=True):
        series = [run.combined(statistic, np.max, modality, layer) for run in runs]
        for line in median_line(arm, modality, series, POINTS):
            lines.append(replace(line, layer=layer, color=color, group=f"layer {layer}"))
    return lines


def survival(study: Study) -> Figure | None:
    """Draw the Kaplan-Meier curve of each arm in a claim about failures; None if there is no such claim."""
    claims = [claim for claim in study.claims if claim.metric in ("late_failure", TIME) and claim.compared]
    if not claims:
        return None
    compared = dict.fromkeys(arm.name for c in claims for name in c.compared for arm in study.arms_of(name, c.at))
    lines = []
    for arm in filter(study.finished, compared):
        steps, shares = kaplan_meier(*times_to_failure(study.finished(arm)))
        # A step function: each share holds until the step before the next failure. The x values must differ.
        at, held = np.repeat(steps, 2)[1:], np.repeat(shares, 2)[:-1]
        at[1::2] -= 1
        at, first = np.unique(at, return_index=True)
        lines.append(Line(arm, "", None, at, held[first], "median"))
    panel = Panel("surviving", "", "share of runs that have not failed", tuple(lines), top=1.05)
    return figure_of("survival", "Share of runs that have not failed", [[panel]])


def claim_figure(study: Study, verdict: Verdict) -> Figure | None:
    """Draw the curves of a claim's metric, one line per run, beside the result of each run."""
    claim, used = verdict.claim, set(verdict.runs)
    metric, modality = find_metric(claim.metric)
    suffix = f", {modality}" if modality else ""
    label = capital(f"{metric.label}{suffix}" + (f" ({metric.unit})" if metric.unit else ""))
    if isinstance(metric, Metric) and not claim.metric.startswith("final_loss"):
        curve = Curve(claim.metric, label, lambda run, _: metric.series(run, modality), metric.scale == "log")
    else:
        # Neither a family metric nor a final loss has a value at each step: draw the held-out losses if every run has
        # measured them during training, else the training losses.
        part, runs = f"/{modality}" if modality else "", [run for run in study.runs if run.name in used]
        held_out = all(len(run.series(f"val_loss{part}")[0]) > 2 for run in runs)
        tag, kind = (f"val_loss{part}", "Held-out") if held_out else (f"loss{part}", "Training")
        curve = Curve(tag, f"{kind} loss{suffix} (nats per token)", lambda run, _: run.series(tag), False)

    def series(run: Run) -> Series:
        return finite(curve.series(run, "")) if run.name in used else EMPTY

    arms = tuple(dict.fromkeys(run.arm for run in verdict.compared.runs))
    lines = arm_lines(study, arms, "", series, points_a_line(len(used)))
    drawn = tuple(line for line in lines if line.role == "run" and len(line.x) > 1)
    by_step = Panel(f"{claim.metric} by step", "Every run", curve.label, drawn, curve.log)
    panels = [panel for panel in (by_step, by_seed(study, verdict, label)) if panel.lines]
    return figure_of(f"claim-{slug(claim.id)}", label, [panels], shared=False)


def by_seed(study: Study, verdict: Verdict, label: str) -> Panel:
    """Return the panel with one dot per value of a claim above its arm or family; lines join the runs of a seed."""
    metric, modality = find_metric(verdict.claim.metric)
    values = claim_values(verdict)
    names = list(dict.fromkeys(one.name for one in values))
    dots: list[Line] = []
    for one in values:
        value, marker, run = one.value, "o", ""
        if one.run is not None and isinstance(metric, Metric):
            value = metric.worst_seen(one.run, modality) if math.isinf(value) else value
            marker, run = "x" if one.run.status.status == "diverged" else "o", one.run.name
        if math.isfinite(value):
            x, y = np.array([float(names.index(one.name))]), np.array([value])
            group = "" if run else study.label(one.name)
            dots.append(Line(one.arm, "", one.seed, x, y, marker=marker, run=run, group=group))
    joined = []
    for seed in sorted({dot.seed or 0 for dot in dots if dot.run and verdict.claim.decided}):
        of_seed = sorted((dot.x[0], dot.y[0]) for dot in dots if dot.seed == seed)
        if len(of_seed) > 1:
            x, y = np.array(of_seed).T
            joined.append(Line("", "", seed, x, y, color="#c3c9cf"))
    wrapped = ["\n".join(textwrap.wrap(study.label(name), 16, break_on_hyphens=False)[:3]) for name in names]
    ticks = tuple(wrapped if len(names) <= 10 else [""] * len(names))
    lines, log = (*joined, *dots), metric.scale == "log"
    return Panel(verdict.claim.metric, "By seed", label, lines, log, xlabel="", x="place", ticks=ticks)


# Curves of runs -----------------------------------------------------------------------------------------------------


def arm_lines(
    study: Study, arms: Sequence[str], modality: str, series: Callable[[Run], Series], points: int, only: str = "all"
) -> list[Line]:
    """Return a thin line per run and the median of each arm, up to the last step that all its runs reached.

    Each line is thinned to at most ``points`` points. With ``only`` "medians", an arm of one run has its line.
    """
    lines: list[Line] = []
    for arm in arms:
        curves = [(run, made) for run in study.of_arm(arm) if len((made := series(run))[0])]
        alone = len(curves) == 1 and only != "runs"
        for run, curve in curves if alone or only != "medians" else ():
            line = Line(arm, modality, run.seed, *thinned(curve, points), alone=alone, run=run.name)
            lines.append(replace(line, diverged=run.status.status == "diverged"))
        if len(curves) > 1 and only != "runs":
            lines += median_line(arm, modality, [curve for _, curve in curves], points)
    return lines


def median_line(arm: str, modality: str, series: Sequence[Series], points: int) -> list[Line]:
    """Return the line of the median of several series at their common steps; empty if there are none."""
    measured = [one for one in series if len(one[0])]
    if not measured:
        return []
    steps = reduce(np.intersect1d, [at for at, _ in measured])
    table = [values[np.searchsorted(at, steps)] for at, values in measured]
    x, y = thinned((steps, np.median(table, axis=0)), points)
    return [Line(arm, modality, None, x, y, "median")] if len(x) else []


def points_a_line(lines: int) -> int:
    """Return how many points each of ``lines`` lines may have."""
    return min(POINTS, max(FEWEST, ALL_POINTS // max(lines, 1)))


def thinned(series: Series, points: int) -> Series:
    """Return a series of at most ``points`` points: the lowest and the highest of each interval, and both ends.

    Spikes are kept, because nothing is averaged.
    """
    steps, values = series
    if len(steps) <= points:
        return series
    indices = {0, len(steps) - 1}
    for part in np.array_split(np.arange(len(steps)), max(1, (points - 2) // 2)):
        seen = part[np.isfinite(values[part])]
        if len(seen):
            indices |= {int(seen[values[seen].argmin()]), int(seen[values[seen].argmax()])}
        if len(seen) < len(part):
            indices.add(int(part[-1]))
    at = np.array(sorted(indices))
    return steps[at], values[at]


def finite(series: Series) -> Series:
    """Return a series without its non-finite values."""
    steps, values = series
    keep = np.isfinite(values)
    return steps[keep], values[keep]


def binned(series: Series, width: int) -> Series:
    """Return the means of a series over ``width`` steps, at the middle of each bin, without non-finite values."""
    steps, values = finite(series)
    if width <= 1 or not len(steps):
        return steps, values
    index = np.unique((steps - 1) // width, return_inverse=True)[1]
    count = np.bincount(index)
    return np.bincount(index, steps) / count, np.bincount(index, values) / count
