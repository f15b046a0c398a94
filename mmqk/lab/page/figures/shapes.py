"""Data of a figure before it is drawn: lines in panels, and the CSV of their numbers."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

STEP = "optimizer step"


@dataclass(frozen=True)
class Line:
    """A curve of one run (role "seed"), of an arm's median over seeds, of its QK-Norm bound, or of a fit; or an event
    of a run.

    Attributes:
        steps: x values: optimizer steps, unless the panel has another ``xlabel``.
        alone: whether this is the only run of its arm, which is drawn like a median.
        diverged: whether the run diverged at the end of the line.
        run: name of the run; empty for a line over several runs.
        color: color of the line; empty for the color of the arm.
        marker: marker, if points are drawn instead of a line; else empty.
    """

    arm: str
    modality: str
    seed: int | None
    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    role: Literal["seed", "median", "bound", "fit", "event"] = "seed"
    alone: bool = False
    diverged: bool = False
    run: str = ""
    color: str = ""
    marker: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a statistic against steps, or against ``xlabel``.

    Attributes:
        statistic: name of the statistic in the CSV.
        title: usually the modality.
        ylabel: label of y with its unit.
        log: log scale for y.
        top: upper limit of y; NaN for none.
        right: label and factor of a second scale on the right.
        xlabel: label of x with its unit.
        x: name of x in the CSV.
        xlog: log scale for x.
        ticks: labels of x = 0, 1, 2, …, for categories.
        shared: whether the panels of its row share its y-axis.
        notes: annotations: x, y, text, and the side of x ("left" or "right").
        labeled: whether the notes name the points; if they do, the panel needs no names by color.
        height: height in inches of a panel as wide as the page and without a y-axis; 0 for a panel of normal size.
    """

    statistic: str
    title: str
    ylabel: str
    lines: tuple[Line, ...]
    log: bool = False
    top: float = math.nan
    right: tuple[str, float] | None = None
    xlabel: str = STEP
    x: str = "step"
    xlog: bool = False
    ticks: tuple[str, ...] = ()
    shared: bool = True
    notes: tuple[tuple[float, float, str, str], ...] = ()
    labeled: bool = False
    height: float = 0.0


@dataclass(frozen=True)
class HeatMap:
    """One statistic of one arm by layer and step, the median over seeds; ``values`` has shape (L, steps), and
    ``layers`` has the number of each row."""

    statistic: str
    title: str
    label: str
    arm: str
    modality: str
    layers: tuple[int, ...]
    steps: NDArray[np.float64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Key:
    """An entry of a legend; a marker replaces the line."""

    label: str
    color: str
    style: Any = "-"
    marker: str = ""

    @property
    def dash(self) -> str:
        """The line style as an SVG dash array; empty for a solid line."""
        return "" if self.style == "-" else " ".join(f"{1.75 * length:g}" for length in self.style[1])


@dataclass(frozen=True)
class Figure:
    """Panels with a title and a caption.

    Attributes:
        name: name of its files.
        reading: the title, one sentence with the numbers.
        caption: how to read the figure.
        rows: the panels; the panels of a row share their y-axis.
        arms: the arms whose runs it shows.
        legend: the meaning of its colors and dashes; may be empty.
        like: the published figure to compare it with; empty if there is none.
    """

    name: str
    reading: str
    caption: str
    rows: tuple[tuple[Panel | HeatMap, ...], ...]
    arms: tuple[str, ...]
    legend: tuple[Key, ...] = ()
    like: str = ""

    @property
    def panels(self) -> list[Panel | HeatMap]:
        """All panels, row by row."""
        return [panel for row in self.rows for panel in row]

    def csv(self) -> str:
        """Return the plotted numbers, one per line; the column ``run`` is empty for a median, a bound or a fit."""
        names = {panel.x for panel in self.panels if isinstance(panel, Panel)} or {"step"}
        x = names.pop() if len(names) == 1 else "x"
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        several = ["x_is"] if x == "x" else []
        writer.writerow(["statistic", "arm", "modality", "seed", "layer", *several, x, "value", "run"])
        for panel in self.panels:
            if isinstance(panel, HeatMap):
                for layer, row in zip(panel.layers, panel.values, strict=True):
                    for step, value in zip(panel.steps, row, strict=True):
                        cells = [panel.statistic, panel.arm, panel.modality, "median", layer]
                        writer.writerow([*cells, *several, _cell(step), _cell(value), ""])
                continue
            axis = [panel.x] if several else []
            for line in panel.lines:
                roles = {"bound": "attn_logit_bound"} | {r: f"{panel.statistic} ({r})" for r in ("fit", "event")}
                statistic = roles.get(line.role, panel.statistic)
                seed = "median" if line.seed is None else line.seed
                cells = [statistic, line.arm, line.modality, seed, "", *axis]
                for step, value in zip(line.steps, line.values, strict=True):
                    writer.writerow([*cells, _cell(step), _cell(value), line.run])
        return out.getvalue()


def _cell(value: float) -> str:
    return f"{value:.6g}" if abs(value) < 1e6 or not math.isfinite(value) else f"{value:.0f}"
