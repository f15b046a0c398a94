"""The figure of a claim: raw curves of its runs, and the result of each run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmqk.lab.formatting import capital, number, plural, slug
from mmqk.lab.metrics import FamilyMetric, find_metric
from mmqk.lab.metrics.metric import BySeries
from mmqk.lab.page.figures.curves import arm_lines, finite, points_a_line
from mmqk.lab.page.figures.shapes import Figure, Line, Panel
from mmqk.lab.page.figures.style import legend
from mmqk.lab.runs.load import EMPTY, Run, Series
from mmqk.lab.verdicts.claims import counted_label
from mmqk.lab.verdicts.study import Study
from mmqk.lab.verdicts.verdicts import Verdict

MOST_TICKS, TICK_WIDTH = 10, 16
JOINED = "#c3c9cf"


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
    if not runs:
        return None
    suffix = "" if modality is None else f", {modality}"
    label = f"{metric.label}{suffix}" + (f" ({metric.unit})" if metric.unit else "")
    log = metric.scale == "log"
    names = set(verdict.runs)
    family = isinstance(metric, FamilyMetric)
    if isinstance(metric, FamilyMetric) or verdict.claim.metric.partition("/")[0] == "final_loss":
        # Neither a family metric nor a final loss has a value at each step.
        curves, series = _losses(runs, modality)
    else:
        curves, series = label, metric.series
    points = points_a_line(len(runs))

    def of_claim(run: Run) -> Series:
        return finite(series(run, modality)) if run.name in names else EMPTY

    lines = tuple(line for line in arm_lines(study, arms, "", of_claim, points) if line.seed is not None)
    panels = []
    if any(len(line.steps) > 1 for line in lines):
        panels.append(
            Panel(
                f"{verdict.claim.metric} by step",
                "Every run",
                capital(curves),
                lines,
                log=log and not family,
                shared=False,
            )
        )
    ends = _by_seed(study, arms, runs, verdict)
    if ends is not None:
        panels.append(replace(ends, ylabel=capital(label), log=log))
    if not panels:
        return None
    return Figure(
        f"claim-{slug(verdict.claim.id)}",
        _reading(verdict, label, arms, study),
        _caption(verdict, runs, points, panels, family),
        (tuple(panels),),
        arms,
        legend(study, arms),
    )


def _losses(runs: Sequence[Run], modality: str | None) -> tuple[str, BySeries]:
    """Return the held-out losses by step if every run has measured them during training, else the training losses."""
    part = f"/{modality}" if modality else ""
    held_out = all(len(run.series(f"val_loss{part}")[0]) > 2 for run in runs)
    name = f"val_loss{part}" if held_out else f"loss{part}"
    label = f"{'held-out' if held_out else 'training'} loss{part.replace('/', ', ')} (nats per token)"
    return label, lambda run, _: run.series(name)


def _reading(verdict: Verdict, label: str, arms: Sequence[str], study: Study) -> str:
    if verdict.counts:
        # The curves show the metric; the verdict counts runs.
        counts = [f"{a} of {n} ({study.label(arm)})" for arm, (a, n) in verdict.counts.items()]
        claim = verdict.claim
        which = "Failed runs" if claim.test == "prediction" else f"Runs {counted_label(claim)}"
        return f"{which}: {', '.join(counts)}."
    medians = [f"{number(value)} ({study.label(arm)})" for arm, value in verdict.medians.items()]
    return f"{capital(label)}: {', '.join(medians)}." if medians else f"{capital(label)}."


def _caption(
    verdict: Verdict, runs: Sequence[Run], points: int, panels: Sequence[Panel], family: bool
) -> str:
    """Return the caption, which describes the curves (if there are any) and the results of the runs."""
    if verdict.verdict == "not run":
        sentences = [f"The {plural(len(runs), 'finished run')} of the arms of this claim."]
    else:
        uses = "verdict counts" if verdict.claim.decided else "claim shows"
        sentences = [f"The {plural(len(runs), 'run')} that the {uses}."]
    curves, ends = (
        [p for p in panels if (p.statistic == verdict.claim.metric) == at_end] for at_end in (False, True)
    )
    if any(len(line.steps) >= points for panel in curves for line in panel.lines):
        sentences.append(
            f"Curves are raw, thinned to {points} points: the lowest and highest value of every interval."
        )
    elif curves:
        sentences.append("Curves are raw.")
    if family:
        sentences.append("One number per family and seed.")
    elif not verdict.counts and len(runs) > len(verdict.medians) > 0:
        sentences.append("Numbers above are medians over runs.")
    if ends and not family:
        sentences.append(f"{'Right: result' if curves else 'Result'} of each run.")
    if any(line.color == JOINED for panel in ends for line in panel.lines):
        sentences.append("Gray lines join the runs of a seed.")
    if any(run.status.status == "diverged" for run in runs):
        sentences.append("× marks a run that was stopped as diverged.")
    return " ".join(sentences)


def _by_seed(study: Study, arms: Sequence[str], runs: Sequence[Run], verdict: Verdict) -> Panel | None:
    """Return the panel with one dot per run above its arm, and lines that join the runs of a seed; for a family
    metric, one dot per family and seed."""
    metric, modality = find_metric(verdict.claim.metric)
    dots: list[tuple[str, str, int, float, str, str]] = []  # place, arm, seed, value, run, marker
    if isinstance(metric, FamilyMetric):
        names = list(dict.fromkeys(run.family for run in runs))
        for name in names:
            members = [run for run in runs if run.family == name]
            for seed in sorted({run.seed for run in members}):
                value = of_family(study, verdict, members, seed)
                dots.append((name, members[-1].arm, seed, value, "", "o"))
    else:
        names = list(arms)
        for run in runs:
            value = metric.measure(run, modality)
            value = metric.worst_seen(run, modality) if math.isinf(value) else value
            marker = "x" if run.status.status == "diverged" else "o"
            dots.append((run.arm, run.arm, run.seed, value, run.name, marker))
    lines: list[Line] = []
    of_seed: dict[int, list[tuple[float, float]]] = {}
    for name, arm, seed, value, run_name, marker in dots:
        if math.isfinite(value):
            x = float(names.index(name))
            of_seed.setdefault(seed, []).append((x, value))
            lines.append(Line(arm, "", seed, np.array([x]), np.array([value]), run=run_name, marker=marker))
    if not lines:
        return None
    if verdict.claim.decided and not isinstance(metric, FamilyMetric):
        for seed, points in of_seed.items():
            if len(points) > 1:
                xs, ys = np.array(sorted(points)).T
                lines.insert(0, Line("", "", seed, xs, ys, color=JOINED))
    ticks = tuple(_tick(study.label(name)) if len(names) <= MOST_TICKS else "" for name in names)
    x_is = "family" if isinstance(metric, FamilyMetric) else "arm"
    return Panel(
        verdict.claim.metric, "By seed", "", tuple(lines), xlabel="", x=x_is, ticks=ticks, shared=False
    )


def _tick(label: str) -> str:
    return "\n".join(textwrap.wrap(label, TICK_WIDTH, break_on_hyphens=False)[:3])


def of_family(study: Study, verdict: Verdict, runs: Sequence[Run], seed: int) -> float:
    """Return the value of a family at one seed in the verdict; NaN if a planned point is missing."""
    metric, modality = find_metric(verdict.claim.metric)
    assert isinstance(metric, FamilyMetric)
    points = [arm.point for arm in study.arms_of(runs[0].family, verdict.claim.at)]
    return metric.measured([run for run in runs if run.seed == seed], modality, points).value
