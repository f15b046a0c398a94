"""The ranking of arms that each add one remedy to a control, each at its best learning rate: table, figure and CSV.

``report.ranking`` of the grid names the controls of the ranking, arms without a remedy. With several controls, an arm
is compared with the control that has the same attention backend. A ranking is exploratory: with many arms and few
seeds, some arms rank high by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from mmqk.lab.effects import Effect, Spread, paired_effect, pooled_spread
from mmqk.lab.formatting import DASH, decimals, exp, fixed, nats, number, slug
from mmqk.lab.metrics import FAMILY_METRICS, METRICS
from mmqk.lab.page.drawing import GRAY, PALETTE, Figure, Line, Panel
from mmqk.lab.page.figures import figure_of
from mmqk.lab.page.sweeps import markers
from mmqk.lab.page.tables import Cell, Table, table
from mmqk.lab.runs import Run
from mmqk.lab.study import Study, StudyArm
from mmqk.lab.verdicts.measure import chosen, value_of

# An arm trains at a learning rate if all its runs at this learning rate end at most this many nats above the best
# mean loss of the control.
TRAINS_NATS = 0.25


@dataclass(frozen=True)
class Ranked:
    """One arm and its comparison with its control. Losses are means over the trained modalities, in nats per token.

    Attributes:
        arm: name of the arm.
        control: name of its control; for a control, its own name.
        seeds: number of finished runs at the chosen learning rate.
        rate: the chosen learning rate.
        at_edge: whether the chosen learning rate is the lowest or highest one that was tried.
        loss: mean final loss over seeds; infinite if a run diverged.
        difference: loss minus the control's loss over shared seeds; None for a control, or if no seed is shared.
        trains: for each learning rate that was tried, whether the arm trains at it (see `TRAINS_NATS`).
        sensitivity: learning-rate sensitivity of the selection runs (Wortsman et al., arXiv 2309.14322).
        logit: largest attention logit at the end, geometric mean over seeds.
        logit_ratio: logarithm of ``logit`` divided by the control's ``logit``.
        growth: ratio of the last-layer output norm at the end to its value at the start, by modality, geometric mean
            over seeds.
        failed: number of runs that diverged, at all learning rates.
        runs: number of finished runs, at all learning rates.
        time: logarithm of the time per step divided by the control's time per step; None if the machines differ
            (`time_ratio`).
        parameters: number of trained parameters minus the control's; None if the number is not recorded.
    """

    arm: str
    control: str
    seeds: int
    rate: float
    at_edge: bool
    loss: float
    difference: Effect | None
    trains: Mapping[float, bool]
    sensitivity: float
    logit: float
    logit_ratio: Effect | None
    growth: Mapping[str, float]
    failed: int
    runs: int
    time: Effect | None
    parameters: int | None


@dataclass(frozen=True)
class Ranking:
    """The ranked arms and their controls.

    Attributes:
        rows: the arms with a remedy, by ascending loss difference to their control.
        controls: the arms without a remedy.
        unfinished: names of the arms that are not ranked, because they or their controls lack finished runs.
    """

    rows: Sequence[Ranked]
    controls: Sequence[Ranked]
    unfinished: Sequence[str]

    @cached_property
    def front(self) -> set[str]:
        """The arms of the Pareto front: no other arm has a lower loss difference or a lower sensitivity without a
        higher value of the other."""
        points = {row.arm: (row.difference.value, row.sensitivity) for row in self.rows if row.difference}
        return {
            arm
            for arm, (x, y) in points.items()
            if math.isfinite(x + y) and not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())
        }


def ranking(study: Study) -> Ranking | None:
    """Return the ranking that the grid names; None if it names none or if no arm can be compared with a control."""
    control_of = {_backend(study, study.arms[name]): name for name in study.named("ranking") if name in study.arms}
    if not control_of:
        return None
    logit = METRICS["largest_attention_logit"]
    # By arm and seed: the final loss, and the logarithm of the largest logit.
    losses: dict[str, dict[int, float]] = {}
    logits: dict[str, dict[int, float]] = {}
    for name in study.arms:
        losses[name] = {run.seed: value_of(run, study.rate_metrics[name]) for run in study.finished(name)}
        logits[name] = {run.seed: logit.on_scale(logit.measure(run, None)) for run in study.finished(name)}
    choices = {name: choice for name, arm in study.arms.items() if losses[name] and (choice := chosen(study, arm))}
    of_losses, of_logits = (
        pooled_spread({name: list(filter(math.isfinite, values[name].values())) for name in choices})
        for values in (losses, logits)
    )
    rows = []
    for name, best in choices.items():
        arm, control = study.arms[name], control_of.get(_backend(study, study.arms[name]), "")
        if control not in choices:
            continue
        limit = choices[control].means[choices[control].rate] + TRAINS_NATS
        runs, remedy = _finished(study, arm), name != control
        against = _finished(study, study.arms[control]) if remedy else []
        row = Ranked(
            arm=name,
            control=control,
            seeds=len(losses[name]),
            rate=best.rate,
            at_edge=best.at_edge,
            loss=float(np.mean(list(losses[name].values()))),
            difference=_effect(losses[name], losses[control], of_losses) if remedy else None,
            trains={rate: all(loss <= limit for loss in values) for rate, values in best.values.items()},
            sensitivity=_sensitivity([run for run in runs if run.role == "selection"]),
            logit=math.exp(float(np.mean(list(logits[name].values())))),
            logit_ratio=_effect(logits[name], logits[control], of_logits) if remedy else None,
            growth={m: _growth(study.finished(name), m) for m in study.modalities},
            failed=sum(run.status.status == "diverged" for run in runs),
            runs=len(runs),
            time=time_ratio(runs, against),
            parameters=_parameters(runs, against),
        )
        rows.append(row)
    ranked = [row for row in rows if row.arm != row.control]
    ranked.sort(key=lambda row: (row.difference.value if row.difference else math.inf, row.sensitivity))
    without = [row for row in rows if row.arm == row.control]
    finished = {row.arm for row in rows}
    return Ranking(ranked, without, [name for name in study.arms if name not in finished]) if ranked else None


def _finished(study: Study, arm: StudyArm) -> list[Run]:
    """Return the finished runs of an arm: first those of the verdicts, then those that selected its learning rate."""
    return [run for run in (*study.of_arm(arm.name), *study.selection(arm)) if run.status.finished]


def _effect(treatment: Mapping[int, float], control: Mapping[int, float], spread: Spread | None) -> Effect | None:
    """Return `paired_effect`; if a run of the treatment diverged, the effect is infinite and has no interval. None if
    a run has no value or a run of the control diverged."""
    if any(map(math.isnan, treatment.values())) or not all(map(math.isfinite, control.values())):
        return None
    if not all(map(math.isfinite, treatment.values())):
        return Effect(math.inf, math.nan, len(treatment), 0.0, "two arms")
    return paired_effect(treatment, control, spread)


def _sensitivity(runs: Sequence[Run]) -> float:
    """Return the mean learning-rate sensitivity over the seeds of the selection runs."""
    measure, seeds = FAMILY_METRICS["lr_sensitivity"].measure, sorted({run.seed for run in runs})
    return float(np.mean([measure([r for r in runs if r.seed == seed]) for seed in seeds]))


def _growth(runs: Sequence[Run], modality: str) -> float:
    """Return the geometric mean over runs of the ratio of the last-layer output norm at the end to the norm at the
    start; infinite if the last value of a run is not finite."""
    logs = []
    for run in runs:
        _, values = METRICS["final_norm"].series(run, modality)
        if not len(values) or not values[0] > 0:
            return math.nan
        logs.append(math.log(values[-1] / values[0]) if np.isfinite(values[-1]) else math.inf)
    return math.exp(float(np.mean(logs))) if logs else math.nan


def time_ratio(runs: Sequence[Run], against: Sequence[Run]) -> Effect | None:
    """Return the logarithm of the time per step of ``runs`` divided by that of the runs ``against``.

    The time per step of a run is its median over the steps. None if a side has fewer than two runs, or if the
    machines differ. Machines count as equal if their system, processor type, number of cores and device agree,
    because a record does not name the machine.
    """
    machines = {f"{r.details.get('machine')} {(r.details.get('device') or {}).get('name')}" for r in [*runs, *against]}
    if len(machines) > 1:
        return None
    one, two = (
        dict(enumerate(-math.log(float(np.median(speeds))) for r in side if len(speeds := r.series("tokens_per_s")[1])))
        for side in (runs, against)
    )
    return paired_effect(one, two, None) if min(len(one), len(two)) > 1 else None


def _parameters(runs: Sequence[Run], against: Sequence[Run]) -> int | None:
    one, two = (
        next((n for run in side if isinstance(n := run.details.get("parameters"), int)), None)
        for side in (runs, against)
    )
    return None if one is None or two is None else one - two


def _backend(study: Study, arm: StudyArm) -> str:
    runs = [*study.finished(arm.name), *study.selection(arm)]
    return str(runs[0].setting("backend")) if runs else ""


def ranking_figure(ranking: Ranking) -> Figure | None:
    """Draw the loss difference against learning-rate sensitivity and against time per step."""
    shown = [row for row in ranking.rows if row.difference and math.isfinite(row.difference.value)]
    sensitivity = [(row, row.sensitivity) for row in [*shown, *ranking.controls] if math.isfinite(row.sensitivity)]
    panels = [
        _remedies(ranking, sensitivity, "learning-rate sensitivity (nats)", "lr_sensitivity"),
        _remedies(ranking, [(r, exp(r.time.value)) for r in shown if r.time], "relative time per step", "time_ratio"),
    ]
    return figure_of("ranking", "Loss against sensitivity and time", [[panel for panel in panels if panel.lines]])


def _remedies(ranking: Ranking, points: Sequence[tuple[Ranked, float]], label: str, x_name: str) -> Panel:
    lines: list[Line] = []
    for row, x in points:
        y, group, color = row.difference.value if row.difference else 0.0, "other remedies", GRAY
        if row.arm in ranking.front:
            group, color = "on the Pareto front", PALETTE[1]
        elif not row.difference:
            group, color = "no remedy", PALETTE[0]
        lines.append(replace(markers([x], [y], color, group), arm=row.arm))
    return Panel("loss difference", "", "loss minus loss without remedy (nats)", tuple(lines), xlabel=label, x=x_name)


def ranking_table(study: Study, ranking: Ranking) -> Table | None:
    """Return the arms, best first; the arms without a remedy are last."""
    heads = ["Remedy", "Difference (nats)", "Best learning rate", "Trains", "Sensitivity", "Largest logit", "Ratio"]
    heads += [*(f"Growth, {m}" for m in study.modalities), "Failed", "Time", "Parameters", "Front"]
    rows = [
        [
            Cell(study.label(row.arm), f"#arm-{slug(row.arm)}"),
            f"0 (loss {nats(row.loss)})" if row.arm == row.control else interval(row.difference),
            f"{row.rate:g}{'*' if row.at_edge else ''}",
            f"{sum(row.trains.values())} of {len(row.trains)}",
            nats(row.sensitivity),
            number(row.logit),
            interval(row.logit_ratio, ratio=True),
            *(DASH if math.isnan(growth) else number(growth) for growth in row.growth.values()),
            f"{row.failed} of {row.runs}",
            interval(row.time, ratio=True),
            DASH if row.parameters is None else f"{row.parameters:+,}" if row.parameters else "0",
            "yes" if row.arm in ranking.front else "",
        ]
        for row in [*ranking.rows, *ranking.controls]
    ]
    unfinished = "; ".join(map(study.label, ranking.unfinished))
    note = f"Not ranked, because their runs have not finished: {unfinished}." if unfinished else ""
    return table("Remedies by loss", heads, rows, 1, 1, note, sortable=True)


def interval(effect: Effect | None, ratio: bool = False) -> str:
    """Return a difference with its interval, ``-0.031 (-0.052 to -0.010)``; for the logarithm of a ratio,
    ``×1.20 (1.15 to 1.25)``."""
    if effect is None:
        return DASH
    if not math.isfinite(effect.value):
        return "diverged"
    values = [effect.value, *((effect.low, effect.high) if effect.has_interval else ())]
    if ratio:
        value, *ends = (f"{exp(log):.2f}" if exp(log) < 100 else number(exp(log)) for log in values)
        value = f"×{value}"
    else:
        places = decimals(effect.error) if effect.has_interval else 2
        value, *ends = (fixed(one, places, "+") for one in values)
    return f"{value} ({' to '.join(ends)})" if ends else value


# Fields of `Ranked` that the CSV has as they are.
PLAIN = ("arm", "control", "seeds", "rate", "at_edge", "loss", "sensitivity", "logit", "failed", "runs", "parameters")


def ranking_csv(study: Study, ranking: Ranking) -> str:
    """Return the numbers of the table with 6 digits, one row per arm."""
    rows = []
    for row in [*ranking.rows, *ranking.controls]:
        record = {name: getattr(row, name) for name in PLAIN}
        record |= {"label": study.label(row.arm), "trains": sum(row.trains.values()), "rates": len(row.trains)}
        record |= {f"growth_{modality}": growth for modality, growth in row.growth.items()}
        record["front"] = row.arm in ranking.front
        effects = {"difference": row.difference, "logit_ratio": row.logit_ratio, "time_ratio": row.time}
        for name, effect in effects.items():
            values = (effect.value, effect.low, effect.high) if effect else (math.nan,) * 3
            scaled = values if name == "difference" else map(exp, values)
            record |= dict(zip((name, f"{name}_low", f"{name}_high"), scaled, strict=True))
        rows.append(record)
    frame = pd.DataFrame(rows).astype({"at_edge": int, "front": int, "parameters": "Int64"})
    return frame.to_csv(index=False, lineterminator="\n", float_format="%.6g")
