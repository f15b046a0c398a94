"""The ranking of a page: its table, its figure and ranking.csv."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmqk.lab.formatting import DASH, decimals, exp, fixed, nats, number, slug
from mmqk.lab.page.draw import GRAY, PALETTE
from mmqk.lab.page.figure import Figure, Line, Panel
from mmqk.lab.page.tables import Cell, Row, Table
from mmqk.lab.stats.effects import Effect
from mmqk.lab.verdicts.ranking import TRAINS_NATS, Ranked, Ranking
from mmqk.lab.verdicts.study import Study

ABOUT = (
    "Exploratory: with this many arms and few seeds some rank high by chance. An arm is compared with its "
    "control, the arm without a remedy that has the same attention backend. Each arm runs at the best of the "
    "learning rates that were tried; * marks the lowest or highest of them, beyond which a better one may lie. "
    "Difference: final loss, mean over the trained modalities, minus that of the control, with its 95 % interval; "
    f"below 0 is better. Trains: the learning rates whose runs, one seed each, ended at most {TRAINS_NATS} nat "
    "above the best loss of the control. Sensitivity: mean over the learning rates that were tried of min(final "
    "loss, loss at initialization) minus the lowest of these values (Wortsman et al., arXiv 2309.14322). Largest "
    "logit: at the end, and its ratio to that of the control. Growth: ratio of the last-layer output norm at the "
    "end to that at the start. Time: ratio of the time per step to that of the control, if both ran on the same "
    "kind of processor with as many cores. “Front”: on the Pareto front of loss and sensitivity; points that are "
    "closer than the intervals are not told apart."
)


def ranking_table(study: Study, ranking: Ranking) -> Table:
    """Return the arms, best first; the arms without a remedy are last."""
    heads = ["Remedy", "Difference (nats)", "Best learning rate", "Trains", "Sensitivity", "Largest logit", "Ratio"]
    heads += [*(f"Growth, {m}" for m in study.modalities), "Failed", "Time", "Parameters", "Front"]
    note = ABOUT
    if ranking.unfinished:
        arms = "; ".join(map(study.label, ranking.unfinished))
        note += f" Not ranked, because their runs have not finished: {arms}."
    rows = [Row(_cells(study, ranking, row)) for row in [*ranking.rows, *ranking.controls]]
    return Table("Remedies by loss", heads, rows, heads[1:-1], sortable=True, note=note)


def _cells(study: Study, ranking: Ranking, row: Ranked) -> list[Cell]:
    is_control = row.arm == row.control

    def effect(of: Effect | None, ratio: bool) -> Cell:
        return Cell(DASH if is_control else interval(of, ratio), sort=of.value if of else "")

    difference = Cell(f"loss {nats(row.loss)}", sort=0.0) if is_control else effect(row.difference, False)
    parameters = DASH if row.parameters is None else f"{row.parameters:+,}" if row.parameters else "0"
    return [
        Cell(study.label(row.arm), f"#arm-{slug(row.arm)}"),
        difference,
        Cell(f"{row.rate:g}{'*' if row.at_edge else ''}", sort=row.rate),
        Cell(f"{sum(row.trains.values())} of {len(row.trains)}", sort=sum(row.trains.values())),
        Cell(nats(row.sensitivity)),
        Cell(number(row.logit), sort=row.logit),
        effect(row.logit_ratio, True),
        *(Cell(DASH if math.isnan(growth) else number(growth)) for growth in row.growth.values()),
        Cell(f"{row.failed} of {row.runs}", sort=row.failed),
        effect(row.time, True),
        Cell(parameters, sort=row.parameters or 0),
        Cell("yes" if row.arm in ranking.front else ""),
    ]


def interval(effect: Effect | None, ratio: bool = False) -> str:
    """Return a difference with its interval, ``-0.031 (-0.052 to -0.010)``; for the logarithm of a ratio,
    ``×1.20 (1.15 to 1.25)``."""
    if effect is None:
        return DASH
    if not math.isfinite(effect.value):
        return "diverged"
    if ratio:
        value, low, high = (
            f"{exp(log):.2f}" if exp(log) < 100 else number(exp(log))
            for log in ((effect.value, effect.low, effect.high) if effect.has_interval else [effect.value] * 3)
        )
        return f"×{value} ({low} to {high})" if effect.has_interval else f"×{value}"
    places = decimals(effect.error) if effect.has_interval else 2
    ends = f" ({fixed(effect.low, places, '+')} to {fixed(effect.high, places, '+')})" if effect.has_interval else ""
    return f"{fixed(effect.value, places, '+')}{ends}"


def ranking_figure(study: Study, ranking: Ranking) -> Figure:
    """Draw the loss difference against learning-rate sensitivity and against time per step."""
    shown = [
        row
        for row in ranking.rows
        if row.difference and math.isfinite(row.difference.value) and math.isfinite(row.sensitivity)
    ]
    sensitivity = [(row, row.sensitivity) for row in [*shown, *ranking.controls]]
    time = [(row, exp(row.time.value)) for row in shown if row.time]
    panels = [_panel(ranking, sensitivity, "learning-rate sensitivity (nats)", "lr_sensitivity")]
    if time:
        panels.append(_panel(ranking, time, "time per step relative to no remedy", "time_ratio"))
    caption = (
        "One point per remedy, at its own best learning rate; a point under the pointer shows its name. Below 0 its "
        "final loss is lower than without a remedy; further left, the loss depends less on the learning rate, or a "
        "step takes less time."
    )
    return Figure("ranking", "Loss against sensitivity and time", caption, (tuple(panels),))


def _panel(ranking: Ranking, points: Sequence[tuple[Ranked, float]], label: str, x_name: str) -> Panel:
    lines: list[Line] = []
    for row, x in points:
        group, color = ("on the Pareto front", PALETTE[1]) if row.arm in ranking.front else ("other remedies", GRAY)
        group, color = (group, color) if row.difference else ("no remedy", PALETTE[0])
        y = np.array([row.difference.value if row.difference else 0.0])
        lines.append(Line(row.arm, "", None, np.array([x]), y, color=color, marker="o", group=group))
    y_label = "loss minus loss without remedy (nats)"
    return Panel("loss difference", "", y_label, tuple(lines), xlabel=label, x=x_name)


def ranking_csv(study: Study, ranking: Ranking) -> str:
    """Return the numbers of the table with 6 digits, one row per arm."""
    out = io.StringIO()
    growth = [f"growth_{m}" for m in study.modalities]
    writer = csv.writer(out, lineterminator="\n")
    effects = [
        f"{name}{end}" for name in ("difference", "logit_ratio", "time_ratio") for end in ("", "_low", "_high")
    ]
    writer.writerow(
        ["arm", "label", "control", "seeds", "rate", "at_edge", "loss", "sensitivity", "trains", "rates", "logit",
         *growth, "failed", "runs", "parameters", "front", *effects]
    )  # fmt: skip
    for row in [*ranking.rows, *ranking.controls]:
        cells: list[Any] = [row.arm, study.label(row.arm), row.control, row.seeds, f"{row.rate:g}", int(row.at_edge)]
        cells += [f"{row.loss:.6g}", f"{row.sensitivity:.6g}", sum(row.trains.values()), len(row.trains)]
        cells += [f"{row.logit:.6g}", *(f"{value:.6g}" for value in row.growth.values()), row.failed, row.runs]
        cells += ["" if row.parameters is None else row.parameters, int(row.arm in ranking.front)]
        cells += _ends(row.difference, False) + _ends(row.logit_ratio, True) + _ends(row.time, True)
        writer.writerow(cells)
    return out.getvalue()


def _ends(effect: Effect | None, ratio: bool) -> list[str]:
    if effect is None:
        return ["", "", ""]
    values = (effect.value, *((effect.low, effect.high) if effect.has_interval else (math.nan, math.nan)))
    return [f"{exp(value) if ratio else value:.6g}" for value in values]
