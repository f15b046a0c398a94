"""The ranking of a page: its table, its figure and ranking.csv."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmqk.lab.formatting import DASH, decimals, exp, fixed, listed, nats, number, plural, slug
from mmqk.lab.page.figures.shapes import Figure, Key, Line, Panel
from mmqk.lab.page.figures.style import GRAY, PALETTE
from mmqk.lab.stats.effects import Effect
from mmqk.lab.verdicts.ranking import TRAINS_NATS, Ranked, Ranking
from mmqk.lab.verdicts.study import Study

# A point near a labeled point gets no label. Near means that the loss differences are at most this far apart (in
# nats), and the sensitivities at most four times as far.
NEAR = 0.04
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
    "kind of processor with as many cores."
)


def ranking_rows(study: Study, ranking: Ranking) -> list[dict[str, Any]]:
    """Return the rows of the table, the arms without a remedy last."""
    return [_row(study, ranking, row) for row in [*ranking.rows, *ranking.controls]]


def _row(study: Study, ranking: Ranking, row: Ranked) -> dict[str, Any]:
    is_control = row.arm == row.control
    value: float | str = row.difference.value if row.difference else 0.0 if is_control else ""
    return {
        "label": study.label(row.arm),
        "anchor": f"arm-{slug(row.arm)}",
        "front": row.arm in ranking.front,
        "difference": f"loss {nats(row.loss)}" if is_control else interval(row.difference),
        "rate": f"{row.rate:g}{'*' if row.at_edge else ''}",
        "trains": f"{sum(row.trains.values())} of {len(row.trains)}",
        "which": listed([f"{rate:g}" for rate, trains in row.trains.items() if trains]) or "none",
        "sensitivity": nats(row.sensitivity),
        "logit": number(row.logit),
        "ratio": DASH if is_control else interval(row.logit_ratio, ratio=True),
        "growth": [number(growth) if not math.isnan(growth) else DASH for growth in row.growth.values()],
        "failed": f"{row.failed} of {row.runs}",
        "time": DASH if is_control else interval(row.time, ratio=True),
        "parameters": DASH if row.parameters is None else f"{row.parameters:+,}" if row.parameters else "0",
        "raw": {
            "difference": value,
            "rate": row.rate,
            "trains": sum(row.trains.values()),
            "logit": row.logit,
            "ratio": row.logit_ratio.value if row.logit_ratio else 0.0 if is_control else "",
            "failed": row.failed,
            "time": row.time.value if row.time else "",
            "parameters": row.parameters or 0,
        },
    }


def interval(effect: Effect | None, ratio: bool = False) -> str:
    """Return a difference with its interval, ``-0.031 (-0.052 to -0.010)``; for the logarithm of a ratio,
    ``×1.20 (1.15 to 1.25)``."""
    if effect is None:
        return DASH
    if not math.isfinite(effect.value):
        return "diverged"
    if ratio:
        ends = f" ({_factor(effect.low)} to {_factor(effect.high)})" if effect.has_interval else ""
        return f"×{_factor(effect.value)}{ends}"
    places = decimals(effect.error) if effect.has_interval else 2
    ends = f" ({fixed(effect.low, places, '+')} to {fixed(effect.high, places, '+')})" if effect.has_interval else ""
    return f"{fixed(effect.value, places, '+')}{ends}"


def _factor(log: float) -> str:
    value = exp(log)
    return f"{value:.2f}" if value < 100 else number(value)


def ranking_figure(study: Study, ranking: Ranking) -> Figure:
    """Draw the loss difference against learning-rate sensitivity and against time per step, with the Pareto front
    marked."""
    shown = [
        row
        for row in ranking.rows
        if row.difference and math.isfinite(row.difference.value) and math.isfinite(row.sensitivity)
    ]
    sensitivity = [(row, row.sensitivity) for row in [*shown, *ranking.controls]]
    time = [(row, exp(row.time.value)) for row in shown if row.time]
    panels = [_panel(study, ranking, sensitivity, "learning-rate sensitivity (nats)", "lr_sensitivity")]
    if time:
        panels.append(_panel(study, ranking, time, "time per step relative to no remedy", "time_ratio"))
    best = [f"“{study.label(row.arm)}” ({row.difference.value:+.2f} nats)" for row in shown[:3] if row.difference]
    least = min(shown, key=lambda row: row.sensitivity, default=None)
    reading = f"Lowest losses of {plural(len(shown), 'arm')}, against no remedy: {listed(best) or 'none'}"
    if least is not None:
        reading += f"; lowest learning-rate sensitivity: “{study.label(least.arm)}” ({nats(least.sensitivity)})"
    reading += "."
    caption = (
        "One point per remedy, at its own best learning rate. Below 0 its final loss is lower than without a remedy;"
        " further left, the loss depends less on the learning rate, or a step takes less time. The Pareto front is"
        " exploratory: points that are closer than the intervals of the table are not told apart."
    )
    keys = (
        Key("on the Pareto front of loss and sensitivity", PALETTE[1], marker="o"),
        Key("other remedies", GRAY, marker="o"),
        Key("no remedy", PALETTE[0], marker="D"),
    )
    return Figure("ranking", reading, caption, (tuple(panels),), tuple(row.arm for row in shown), keys)


def _panel(
    study: Study, ranking: Ranking, points: Sequence[tuple[Ranked, float]], label: str, x_name: str
) -> Panel:
    lines: list[Line] = []
    notes: list[tuple[float, float, str, str]] = []
    for row, x in points:
        y = row.difference.value if row.difference else 0.0
        front = row.arm in ranking.front
        color, marker = (PALETTE[0], "D") if not row.difference else (PALETTE[1] if front else GRAY, "o")
        at, value = np.array([x]), np.array([y])
        lines.append(Line(row.arm, "", None, at, value, "median", color=color, marker=marker))
        if front and x_name == "lr_sensitivity" and all(
            abs(y - other_y) > NEAR or abs(x - other_x) > 4 * NEAR for other_x, other_y, *_ in notes
        ):
            notes.append((x, y, row.arm, "right"))
    y_label = "loss minus loss without remedy (nats)"
    return Panel(
        "loss difference", "", y_label, tuple(lines), xlabel=label, x=x_name, notes=tuple(notes), labeled=True
    )


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
