"""Data of a figure for the page's script, which replaces the drawn panels with interactive charts."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmqk.lab.page.figures.draw import Brush
from mmqk.lab.page.figures.shapes import Figure, HeatMap, Line, Panel
from mmqk.lab.page.figures.style import STYLES, ramp
from mmqk.lab.verdicts.study import Study

DIGITS = 5  # more than a screen can show
CALCULATED = {"bound": "QK-Norm bound", "fit": "fit"}


def chart_data(study: Study, brush: Brush, figure: Figure) -> str:
    """Return the panels of a figure as JSON; empty for a figure that is not interactive, because it has categories,
    labeled points or a second axis."""
    if not all(isinstance(p, HeatMap) or not (p.ticks or p.height or p.right or p.labeled) for p in figure.panels):
        return ""
    return json.dumps(
        {"rows": [[_panel(study, brush, panel) for panel in row] for row in figure.rows]},
        ensure_ascii=False,
        separators=(",", ":"),
    ).replace("</", "<\\/")


def _panel(study: Study, brush: Brush, panel: Panel | HeatMap) -> dict[str, Any]:
    if isinstance(panel, HeatMap):
        colors = ramp(len(panel.values))
        lines = [
            {"name": f"layer {n}", "layer": n, "color": color, "width": 1.6, **_points(panel.steps, row)}
            for n, color, row in zip(panel.layers, colors, panel.values, strict=True)
        ]
        return {"title": panel.title, "y": panel.label, "x": "optimizer step", "log": True, "lines": lines}
    return {
        "title": panel.title,
        "y": panel.ylabel,
        "x": panel.xlabel,
        "log": panel.log,
        "xlog": panel.xlog,
        **({} if math.isnan(panel.top) else {"top": panel.top}),
        "lines": [_line(study, brush, line) for line in panel.lines if len(line.steps)],
    }


def _line(study: Study, brush: Brush, line: Line) -> dict[str, Any]:
    of = "median over seeds" if line.seed is None else f"seed {line.seed}"
    thick = line.role == "median" or line.alone
    style = brush.styles.get(line.modality, STYLES[0])
    dash = [2, 3] if line.role == "bound" else [] if style == "-" else [2 * length for length in style[1]]
    return {
        "name": ", ".join(filter(None, (study.label(line.arm), CALCULATED.get(line.role, of)))),
        "arm": study.label(line.arm),
        "modality": line.modality,
        "seed": CALCULATED.get(line.role, "median" if line.seed is None else line.seed),
        "color": line.color or brush.colors.get(line.arm, "#8b929b"),
        "dash": dash,
        "width": 2.4 if thick else 1.0,
        "marker": bool(line.marker),
        **_points(line.steps, line.values),
    }


def _points(steps: NDArray[np.float64], values: NDArray[np.float64]) -> dict[str, Any]:
    return {"at": [_rounded(x) for x in steps], "is": [_rounded(y) for y in values]}


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
