"""The figures of a page over optimizer steps: losses and logits, norms, outcomes, survival, the runs of a claim."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mmqk.lab.formatting import capital, slug
from mmqk.lab.metrics import METRICS, FamilyMetric, find_metric, is_trained
from mmqk.lab.metrics.probes import LAST_PROBES, last_probes
from mmqk.lab.page.curves import (
    arm_lines,
    bin_width,
    binned,
    bound_lines,
    finite,
    layer_lines,
    points_a_line,
    reduced,
)
from mmqk.lab.page.draw import GRAY, arm_colors, families, ramp
from mmqk.lab.page.figure import FEW_ARMS, Figure, Line, Panel
from mmqk.lab.runs import EMPTY, Run, Series
from mmqk.lab.stats.exact import kaplan_meier
from mmqk.lab.verdicts.assess import EVENTS, times_to_failure
from mmqk.lab.verdicts.failure_order import LATE
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import Verdict, middle

LOGIT = METRICS["largest_attention_logit"].measure
LOSS_LABEL = "training loss (nats per token)"
LINES = "Thin lines: runs; thick lines: their medians; × marks a run that was stopped as diverged."
NORMS = {"q_norm": "‖q‖", "k_norm": "‖k‖", "v_norm": "‖v‖", "resid_norm": "‖residual‖"}
# Losses above this multiple of the initial loss are cut off: they would flatten the other curves.
LOSS_TOP = 1.15
# With more runs than this the later figures show medians only.
FEW_RUNS = 40
# The short label of each outcome, and whether its axis is logarithmic.
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
# The statistic that is drawn by layer for an outcome, and the function that reduces it over key modalities.
BY_LAYER: dict[str, tuple[str, Callable]] = {
    "largest_attention_logit": ("attn_logit_absmax", np.max),
    "logit_offset": ("attn_logit_offset_var", np.mean),
    "q_norm": ("q_norm", np.mean),
}


def figures(study: Study, verdicts: Sequence[Verdict]) -> list[Figure]:
    """Return every figure that the runs have numbers for, except those of `sweeps`."""
    made = [
        loss_and_logits(study, "hero", "Loss and largest attention logit", hero_arms(study)),
        survival(study),
        *(claim_figure(study, verdict) for verdict in verdicts),
        entropy(study),
        norms(study),
        final_norm(study),
        by_layer(study),
        outcomes(study),
        outcomes_by_layer(study),
        loss_and_logits(study, "shown", "Shown without a verdict: loss and largest attention logit", study.shown),
    ]
    return [figure for figure in made if figure is not None]


def hero_arms(study: Study) -> tuple[str, ...]:
    """Return the arms of the first figure: the arms that the grid or its claims name; without a grid, all arms."""
    return study.hero if study.registered and study.hero else study.with_runs(tuple(study.arms))


def leading_arms(study: Study) -> tuple[str, ...]:
    """Return the arms of the later figures: all `hero_arms` if they are few; otherwise the two ends of each family's
    axis, or the arms that have a color."""
    arms = hero_arms(study)
    if len(arms) <= FEW_ARMS:
        return arms
    members = [[arm for arm in family if arm in arms] for family in families(study).values()]
    ends = [arm for kept in members if kept for arm in dict.fromkeys((kept[0], kept[-1]))]
    if len(ends) < len(arms) and len(ends) <= FEW_ARMS:
        return tuple(ends)
    colors = arm_colors(study)
    return tuple(arm for arm in arms if colors.get(arm, GRAY) != GRAY)[:FEW_ARMS]


def loss_and_logits(study: Study, name: str, title: str, arms: Sequence[str]) -> Figure | None:
    """Draw the loss and the largest attention logit by modality."""
    points = points_a_line(2 * len(study.modalities) * sum(len(study.of_arm(arm)) for arm in arms))
    width = bin_width(study, points)
    losses, logits = [], []
    for modality in study.modalities:
        lines = arm_lines(study, arms, modality, _loss(modality, width), points)
        losses.append(Panel(f"loss/{modality}", capital(modality), LOSS_LABEL, lines))
        lines = arm_lines(study, arms, modality, reduced("attn_logit_absmax", np.max, modality), points)
        lines += bound_lines(study, arms, modality) if len(arms) <= FEW_ARMS else ()
        where = f"{capital(modality)} queries"
        logits.append(Panel(f"attn_logit_absmax/{modality}", where, "largest |attention logit|", lines, log=True))
    top = LOSS_TOP * max((line.y[0] for panel in losses for line in panel.lines), default=math.nan)
    losses = [replace(panel, top=top) for panel in losses]
    if len(arms) > FEW_ARMS:  # medians would hide the runs
        losses, logits = ([_runs_alone(panel) for panel in row] for row in (losses, logits))
    caption = (
        f"{LINES} A point of the loss is a mean over steps (here {width}), without losses above {LOSS_TOP} times the "
        "first. Attention logits are measured before any cap: the largest over layers, heads, keys and the sequences "
        f"of the probe. The final logit or norm of a run is the median of its last {LAST_PROBES} probes. Dotted: the "
        "QK-Norm bound, the largest logit that the gains of that step allow by construction."
    )
    return _figure(name, title, caption, [losses, logits])


def _figure(name: str, title: str, caption: str, rows: Sequence[Sequence[Panel]], like: str = "") -> Figure | None:
    """Return the figure without rows that have no line; None if no row has one."""
    kept = tuple(tuple(row) for row in rows if any(panel.lines for panel in row))
    return Figure(name, title, caption, kept, like) if kept else None


def _loss(modality: str, width: int) -> Callable[[Run], Series]:
    tag = f"loss/{modality}" if modality else "loss"
    return lambda run: binned(run.series(tag), width)


def _runs_alone(panel: Panel) -> Panel:
    return replace(panel, lines=tuple(replace(li, alone=False) for li in panel.lines if li.role == "run"))


def _few_lines(
    study: Study, arms: Sequence[str], modality: str, series: Callable[[Run], Series]
) -> tuple[Line, ...]:
    """Return `arm_lines`; if there are many runs, only the medians."""
    runs = sum(len(study.of_arm(arm)) for arm in arms)
    lines = arm_lines(study, arms, modality, series, points_a_line(runs))
    return lines if runs <= FEW_RUNS else tuple(line for line in lines if line.thick)


def _row(
    study: Study, arms: Sequence[str], statistic: str, reduce: Callable, titles: str, ylabel: str, log: bool = False
) -> list[Panel]:
    """Return a panel per modality; ``titles`` has a place for its name."""
    return [
        Panel(
            f"{statistic}/{m}",
            capital(titles.format(m)),
            ylabel,
            _few_lines(study, arms, m, reduced(statistic, reduce, m)),
            log=log,
        )
        for m in study.modalities
    ]


def entropy(study: Study) -> Figure | None:
    """Draw the attention entropy by query modality."""
    caption = f"{LINES} Mean over heads and queries with at least 8 keys, in the layer with the lowest entropy."
    row = _row(study, leading_arms(study), "attn_entropy", np.min, "{} queries", "attention entropy (nats)")
    return _figure("entropy", "Attention entropy", caption, [row])


def norms(study: Study) -> Figure | None:
    """Draw the query, key, value and residual norms by modality."""
    arms = leading_arms(study)
    rows = [
        _row(study, arms, statistic, np.mean, f"{symbol}, {{}} tokens", f"mean {symbol} (L2)", log=True)
        for statistic, symbol in NORMS.items()
    ]
    caption = (
        f"{LINES} Mean over tokens, heads and layers. q and k are those of the dot product: after QK-Norm in arms "
        "that have it; v does not enter the logits."
    )
    return _figure("norms", "Norms by modality", caption, rows)


def final_norm(study: Study, arms: Sequence[str] = (), like: str = "Chameleon Fig. 5a") -> Figure | None:
    """Draw the output norm of the last layer: Chameleon's Fig. 5a, by modality."""
    arms = arms or leading_arms(study)
    row = _row(study, arms, "final_norm", np.mean, "{} tokens", "last-layer output (L2)")
    caption = (
        f"{LINES} Norm of the residual stream after the last layer and before the final norm, mean over tokens. "
        "Chameleon (2405.09818, Fig. 5a) does not specify whether its norm is L2 or RMS = L2/√width."
    )
    return _figure("final_norm", "Output norm of the last layer", caption, [row], like)


def by_layer(study: Study) -> Figure | None:
    """Draw the largest logit by layer, in the arms with the highest and the lowest final logit."""
    ends = {arm: middle(LOGIT(run, None) for run in study.ended(arm)) for arm in leading_arms(study)}
    ordered = sorted((arm for arm in ends if not math.isnan(ends[arm])), key=lambda arm: -ends[arm])
    label = "largest |attention logit|"
    rows = [
        [
            Panel(f"attn_logit_absmax/{m}", f"{study.label(arm)}: {m} queries", label,
                  layer_lines(study, arm, "attn_logit_absmax", m, ramp), log=True)
            for m in study.modalities
        ]
        for arm in dict.fromkeys((ordered[0], ordered[-1]) if ordered else ())
    ]  # fmt: skip
    caption = (
        "A line per layer, median over seeds; of the arms of the first figure, those with the highest and the lowest "
        "logit at the end."
    )
    return _figure("layers", "Largest attention logit by layer", caption, rows)


def outcomes(study: Study) -> Figure | None:
    """Draw the outcomes that ``report: {outcomes: ...}`` selects: one row per outcome, one column per modality."""
    arms = study.with_runs(study.outcomes)
    points = points_a_line(len(arms))
    width = bin_width(study, points)

    def series(name: str, modality: str) -> Callable[[Run], Series]:
        wide = width if name == "final_excess" else 1
        return lambda run: binned(METRICS[name].series(run, modality), wide)

    rows = [
        [
            Panel(f"{name}/{m}", capital(m), label, tuple(
                line for line in arm_lines(study, arms, m, series(name, m), points) if line.thick), log=log)
            for m in study.modalities
        ]
        for name, (label, log) in OUTCOMES.items()
    ]  # fmt: skip
    caption = (
        "A line is the median over the runs of an arm, up to the last step that all of them reached. Logits are"
        " split into the mean μ of a row, the offset δ of a modality's keys and the spread r within them; each"
        " is a root mean square over layers. The modality is that of the queries or tokens. Mass on others: the share"
        " of attention on keys of other modalities. Norms are means over layers. Growth of W_q, W_k: the growth rate"
        " of ‖W_q‖² + ‖W_k‖² from the losses of a modality, per 1,000 steps."
    )
    return _figure("outcomes", "Outcomes over time", caption, rows)


def outcomes_by_layer(study: Study) -> Figure | None:
    """Draw end values by layer: one row for each of `BY_LAYER`, one column per modality and one line per arm."""
    arms = study.with_runs(study.outcomes)
    found = {tag.layer for arm in arms for run in study.of_arm(arm) for tag in run.tags.values()}
    layers = sorted(layer for layer in found if layer is not None)
    if layers != list(range(len(layers))):
        return None

    def end(run: Run, name: str, modality: str, layer: int) -> float:
        statistic, reduce = BY_LAYER[name]
        value = middle(last_probes(run.combined(statistic, reduce, modality, layer)))
        return math.sqrt(value) if name == "logit_offset" and value >= 0 else value

    def lines(name: str, modality: str) -> tuple[Line, ...]:
        made = []
        for arm in arms:
            ends = np.array([middle(end(run, name, modality, i) for run in study.ended(arm)) for i in layers])
            x, y = finite((np.array(layers, dtype=float), ends)) if layers else EMPTY
            made += [Line(arm, modality, None, x, y, "median")] if len(x) else []
        return tuple(made)

    rows = [
        [
            Panel(f"{name}/{m}", capital(m), OUTCOMES[name][0], lines(name, m), log=True,
                  xlabel="layer", x="at_layer", ticks=tuple(map(str, layers)))
            for m in study.modalities
        ]
        for name in BY_LAYER
    ]  # fmt: skip
    caption = "The median of the last three probes of a run, by layer; a line is the median over the runs of an arm."
    return _figure("outcomes_by_layer", "End values by layer", caption, rows)


def survival(study: Study) -> Figure | None:
    """Draw the Kaplan-Meier curve of each arm in a claim about failures; None if there is no such claim."""
    claims = [claim for claim in study.claims if claim.metric in LATE and claim.compared]
    if not claims:
        return None
    metric = claims[0].metric if claims[0].metric in EVENTS else "time_of_failure"
    compared = dict.fromkeys(arm.name for c in claims for name in c.compared for arm in study.arms_of(name, c.at))
    lines = []
    for arm in compared:
        if study.finished(arm):
            steps, shares = kaplan_meier(*times_to_failure(study.finished(arm), metric))
            # A step function: each share holds until the step before the next failure. The x values must differ.
            at, held = np.repeat(steps, 2)[1:], np.repeat(shares, 2)[:-1]
            at[1::2] -= 1
            at, first = np.unique(at, return_index=True)
            lines.append(Line(arm, "", None, at, held[first], "median"))
    caption = (
        "Kaplan-Meier curves over the finished runs. A run that did not fail counts up to its last step. While runs "
        "are unfinished the curves are too low, because failed runs end earlier than others."
    )
    panel = Panel("surviving", "", "share of runs that have not failed", tuple(lines), top=1.05)
    return _figure("survival", "Share of runs that have not failed", caption, [[panel]])


def training_loss(study: Study, arms: Sequence[str], like: str) -> Figure | None:
    """Draw the training loss by step, over all tokens and by trained modality: Chameleon Fig. 5b to 6c."""
    arms = arms or hero_arms(study)[:FEW_ARMS]
    width = bin_width(study, points_a_line(sum(len(study.of_arm(arm)) for arm in arms)))
    several = study.modalities if len(study.modalities) > 1 else ()
    panels = []
    for modality in ("", *several):
        training = [a for a in arms if not modality or all(is_trained(run, modality) for run in study.of_arm(a))]
        lines = _few_lines(study, training, modality, _loss(modality, width))
        title = f"{capital(modality) or 'All'} tokens"
        panels.append(Panel(f"loss/{modality}" if modality else "loss", title, LOSS_LABEL, lines))
    top = LOSS_TOP * max((line.y[0] for panel in panels for line in panel.lines), default=math.nan)
    caption = (
        f"{LINES} A point is a mean over {width} steps. “All tokens” are the trained targets of each arm: if these "
        "differ between arms, compare by modality."
    )
    panels = [replace(panel, top=top) for panel in panels]
    return _figure("training_loss", "Training loss", caption, [panels], like)


def claim_arms(study: Study, verdict: Verdict) -> tuple[str, ...]:
    """Return the arms that a claim compares and that have runs in the verdict; a family is replaced by its arms."""
    named = [arm.name for name in verdict.claim.compared for arm in study.arms_of(name, verdict.claim.at)]
    used = {run.arm for run in study.runs if run.name in set(verdict.runs)}
    return tuple(arm for arm in dict.fromkeys(named) if arm in used)


def claim_runs(study: Study, verdict: Verdict) -> list[Run]:
    """Return the runs of a verdict, by arm and seed."""
    names = set(verdict.runs)
    return [run for arm in claim_arms(study, verdict) for run in study.of_arm(arm) if run.name in names]


def claim_figure(study: Study, verdict: Verdict) -> Figure | None:
    """Draw the curves of a claim's metric, one line per run, beside the result of each run."""
    arms, runs = claim_arms(study, verdict), claim_runs(study, verdict)
    metric, modality = find_metric(verdict.claim.metric)
    suffix = "" if modality is None else f", {modality}"
    label = capital(f"{metric.label}{suffix}" + (f" ({metric.unit})" if metric.unit else ""))
    log, names = metric.scale == "log", set(verdict.runs)
    family = isinstance(metric, FamilyMetric)
    if isinstance(metric, FamilyMetric) or verdict.claim.metric.partition("/")[0] == "final_loss":
        # Neither a family metric nor a final loss has a value at each step: draw the held-out losses if every run has
        # measured them during training, else the training losses.
        part = f"/{modality}" if modality else ""
        held_out = all(len(run.series(f"val_loss{part}")[0]) > 2 for run in runs)
        tag = f"val_loss{part}" if held_out else f"loss{part}"
        curves = f"{'Held-out' if held_out else 'Training'} loss{suffix} (nats per token)"
        series: Callable = lambda run, _: run.series(tag)  # noqa: E731
    else:
        curves, series = label, metric.series
    lines = arm_lines(
        study, arms, "", lambda run: finite(series(run, modality)) if run.name in names else EMPTY,
        points_a_line(len(runs)),
    )  # fmt: skip
    by_step = Panel(
        f"{verdict.claim.metric} by step", "Every run", curves,
        tuple(line for line in lines if line.role == "run" and len(line.x) > 1), log=log and not family, shared=False,
    )  # fmt: skip
    by_seed = replace(_by_seed(study, arms, runs, verdict), ylabel=label, log=log)
    caption = (
        "Left: raw curves of the runs, thinned to the lowest and highest value of every interval. Right: "
        "the result of each run; gray lines join the runs of a seed, × marks a run that was stopped as diverged."
    )
    panels = [panel for panel in (by_step, by_seed) if panel.lines]
    return _figure(f"claim-{slug(verdict.claim.id)}", label, caption, [panels])


def _by_seed(study: Study, arms: Sequence[str], runs: Sequence[Run], verdict: Verdict) -> Panel:
    """Return the panel with one dot per run above its arm, and lines that join the runs of a seed; for a family
    metric, one dot per family and seed."""
    metric, modality = find_metric(verdict.claim.metric)
    names = list(arms)
    lines: list[Line] = []
    if isinstance(metric, FamilyMetric):
        names = list(dict.fromkeys(run.family for run in runs))
        for name in names:
            members = [run for run in runs if run.family == name]
            for seed in sorted({run.seed for run in members}):
                value = of_family(study, verdict, members, seed)
                lines.append(_dot(names.index(name), value, members[-1].arm, seed, study.label(name)))
    else:
        for run in runs:
            value = metric.measure(run, modality)
            value = metric.worst_seen(run, modality) if math.isinf(value) else value
            dot = _dot(names.index(run.arm), value, run.arm, run.seed)
            lines.append(replace(dot, run=run.name, marker="x" if run.status.status == "diverged" else "o"))
    lines = [line for line in lines if math.isfinite(line.y[0])]
    if verdict.claim.decided and not isinstance(metric, FamilyMetric):
        for seed in sorted({line.seed or 0 for line in lines}):
            points = [(line.x[0], line.y[0]) for line in lines if line.seed == seed and line.marker]
            if len(points) > 1:
                x, y = np.array(sorted(points)).T
                lines.insert(0, Line("", "", seed, x, y, color="#c3c9cf"))
    wrapped = ["\n".join(textwrap.wrap(study.label(n), 16, break_on_hyphens=False)[:3]) for n in names]
    ticks = tuple(wrapped if len(names) <= 10 else [""] * len(names))
    x = "family" if isinstance(metric, FamilyMetric) else "arm"
    return Panel(verdict.claim.metric, "By seed", "", tuple(lines), xlabel="", x=x, ticks=ticks, shared=False)


def _dot(x: int, value: float, arm: str, seed: int, group: str = "") -> Line:
    return Line(arm, "", seed, np.array([float(x)]), np.array([value]), marker="o", group=group)


def of_family(study: Study, verdict: Verdict, runs: Sequence[Run], seed: int) -> float:
    """Return the value of a family at one seed in the verdict; NaN if a planned point is missing."""
    metric, modality = find_metric(verdict.claim.metric)
    assert isinstance(metric, FamilyMetric)
    points = [arm.point for arm in study.arms_of(runs[0].family, verdict.claim.at)]
    return metric.measured([run for run in runs if run.seed == seed], modality, points).value
