"""A figure before it is drawn: lines in panels, their CSV, and the same numbers as JSON for the charts of a page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmqk.lab.verdicts.study import Study

STEP = "optimizer step"
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.6), (6, 1.5, 1, 1.5), (1, 1))  # by modality
CALCULATED = {"bound": "QK-Norm bound", "fit": "fit"}
FEW_ARMS = 8
INK = "#1b1f24"


@dataclass(frozen=True)
class Line:
    """A curve or points of one run (role "run"), of the median over runs, of an arm's QK-Norm bound, or of a fit.

    Attributes:
        alone: whether this is the only run of its arm, which is drawn like a median.
        diverged: whether the run diverged at the end of the line.
        run: name of the run; empty for a line over several runs.
        color: color of the line; empty for the color of the arm.
        marker: marker, if points are drawn instead of a line; else empty.
        group: name of the line in the legend; empty for the label of the arm.
    """

    arm: str
    modality: str
    seed: int | None
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    role: Literal["run", "median", "bound", "fit"] = "run"
    layer: int | None = None
    alone: bool = False
    diverged: bool = False
    run: str = ""
    color: str = ""
    marker: str = ""
    group: str = ""

    @property
    def thick(self) -> bool:
        """Whether the line stands for its arm."""
        return self.role == "median" or self.alone


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a statistic against optimizer steps, or against ``xlabel``.

    Attributes:
        statistic: name of the statistic in the CSV.
        x: name of x in the CSV.
        top: upper limit of y; NaN for none.
        ticks: labels of x = 0, 1, 2, …, for categories.
        shared: whether the panels of its row share its y-axis.
    """

    statistic: str
    title: str
    ylabel: str
    lines: tuple[Line, ...]
    log: bool = False
    top: float = math.nan
    xlabel: str = STEP
    x: str = "step"
    xlog: bool = False
    ticks: tuple[str, ...] = ()
    shared: bool = True


@dataclass(frozen=True)
class Figure:
    """Panels with a title and a caption, which says how to read them.

    Attributes:
        name: name of its files.
        rows: the panels; the panels of a row share their y-axis.
        like: the published figure to compare it with; empty if there is none.
    """

    name: str
    title: str
    caption: str
    rows: tuple[tuple[Panel, ...], ...]
    like: str = ""

    @property
    def lines(self) -> list[Line]:
        """The lines of all panels."""
        return [line for row in self.rows for panel in row for line in panel.lines]

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms whose runs it shows."""
        return tuple(dict.fromkeys(line.arm for line in self.lines if line.arm))

    def csv(self) -> str:
        """Return the plotted numbers, one per line; the column ``run`` is empty for a median, a bound or a fit."""
        panels = [panel for row in self.rows for panel in row]
        names = {panel.x for panel in panels} or {"step"}
        several = ["x_is"] if len(names) > 1 else []
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        x = "x" if several else names.pop()
        writer.writerow(["statistic", "arm", "modality", "seed", "layer", *several, x, "value", "run"])
        for panel in panels:
            for line in panel.lines:
                fit = {"bound": "attn_logit_bound", "fit": f"{panel.statistic} (fit)"}
                seed = "median" if line.seed is None else line.seed
                layer = "" if line.layer is None else line.layer
                cells = [fit.get(line.role, panel.statistic), line.arm, line.modality, seed, layer]
                cells += [panel.x] if several else []
                for at, value in zip(line.x, line.y, strict=True):
                    writer.writerow([*cells, _cell(at), _cell(value), line.run])
        return out.getvalue()


def groups(study: Study, figure: Figure) -> dict[str, str]:
    """Return the name of each arm in the legend: its label; of many arms, the label of its family."""
    family = {arm: study.arms[arm].family if arm in study.arms else arm for arm in figure.arms}
    many = len(family) > FEW_ARMS
    return {arm: study.label(family[arm] if many else arm) for arm in family}


def keys(study: Study, colors: Mapping[str, str], figure: Figure) -> dict[str, str]:
    """Return the legend: the color of each group of lines."""
    names = groups(study, figure)
    named = {line.group or names.get(line.arm, ""): line.color or colors.get(line.arm, INK) for line in figure.lines}
    return {name: color for name, color in named.items() if name}


def chart_data(study: Study, colors: Mapping[str, str], figure: Figure) -> str:
    """Return the panels of a figure as JSON for the script of the page, with five digits."""
    names = groups(study, figure)

    def line_data(line: Line) -> dict[str, Any]:
        of = CALCULATED.get(line.role) or ("median" if line.seed is None else f"seed {line.seed}")
        place = study.modalities.index(line.modality) if line.modality in study.modalities else 0
        group = line.group or names.get(line.arm, "")
        layer = "" if line.layer is None else f"layer {line.layer}"
        return {
            "name": ", ".join(filter(None, (study.label(line.arm) or line.group, layer, of))),
            "group": group,
            "modality": line.modality,
            "seed": "" if line.layer is not None else of,
            "color": line.color or colors.get(line.arm, INK),
            "dash": [2, 3] if line.role in CALCULATED else [2 * length for length in DASHES[place % len(DASHES)]],
            "width": 2.4 if line.thick else 1.0,
            "marker": bool(line.marker),
            "at": [_rounded(x) for x in line.x],
            "is": [_rounded(y) for y in line.y],
        }

    def panel_data(panel: Panel) -> dict[str, Any]:
        return {
            "title": panel.title,
            "y": panel.ylabel,
            "x": panel.xlabel,
            "log": panel.log,
            "xlog": panel.xlog,
            "top": _rounded(panel.top),
            "ticks": panel.ticks,
            "lines": [line_data(line) for line in panel.lines if len(line.x)],
        }

    rows = [[panel_data(panel) for panel in row] for row in figure.rows]
    return json.dumps({"rows": rows}, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def _cell(value: float) -> str:
    return f"{value:.6g}" if abs(value) < 1e6 or not math.isfinite(value) else f"{value:.0f}"


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
