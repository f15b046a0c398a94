"""What a figure is before it is drawn: lines in panels, and the CSV of their numbers."""

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
    """A curve of one run (role "seed"), of an arm's median over seeds, of its QK-Norm bound, or of a fit.

    Attributes:
        steps: its x: optimizer steps, unless the panel says otherwise.
        alone: the only run of its arm, and so drawn like a median.
        diverged: the run was stopped where the line ends.
        run: name of the run, empty for a line over several.
        colour: empty for that of the arm.
        dash: style of the line; None for that of the modality.
        marker: of every point, empty for none; "o" and "x" join no line when ``scatter``.
        scatter: points alone.
    """

    arm: str
    modality: str
    seed: int | None
    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    role: Literal["seed", "median", "bound", "fit"] = "seed"
    alone: bool = False
    diverged: bool = False
    run: str = ""
    colour: str = ""
    dash: Any = None
    marker: str = ""
    scatter: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes: steps, or whatever ``xlabel`` says, against a statistic.

    Attributes:
        statistic: its name in the CSV.
        title: the modality, as a rule.
        ylabel: with its unit.
        log: logarithmic values.
        top: nothing above is drawn; NaN for no such limit.
        right: label and factor of a second scale on the right.
        xlabel: with its unit.
        x: name of x in the CSV.
        xlog: logarithmic x.
        ticks: labels of x = 0, 1, 2, …, for categories.
        shared: whether its y-axis is that of its row.
        notes: words on it: x, y, text, and on which side of x they stand ("left" or "right").
        height: of a panel as wide as the page and without a y-axis, in inches; 0 for one of the usual size.
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
    height: float = 0.0


@dataclass(frozen=True)
class HeatMap:
    """One statistic of one arm by layer and step, the median over seeds; ``values`` has shape (L, steps)."""

    statistic: str
    title: str
    label: str
    arm: str
    modality: str
    steps: NDArray[np.float64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Key:
    """An entry of a legend: words, colour, dash as in an SVG attribute, marker, and the arms it stands for."""

    label: str
    colour: str
    dash: str = ""
    width: float = 3
    marker: str = ""
    arms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """Panels with a title that says what they show.

    Attributes:
        name: of its files.
        reading: one sentence, from the numbers.
        caption: how to read it.
        rows: the panels; those of a row share their y-axis.
        arms: whose runs it shows.
        legend: what its colours and dashes mean; may be empty.
        like: the published figure beside which it can be held, empty for none.
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
        """All of them, row by row."""
        return [panel for row in self.rows for panel in row]

    def csv(self) -> str:
        """The plotted numbers, one a line, with the run that each is of: empty for a median, a bound or a fit."""
        names = {panel.x for panel in self.panels if isinstance(panel, Panel)} or {"step"}
        x = names.pop() if len(names) == 1 else "x"
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        several = ["x_is"] if x == "x" else []
        writer.writerow(["statistic", "arm", "modality", "seed", "layer", *several, x, "value", "run"])
        for panel in self.panels:
            if isinstance(panel, HeatMap):
                for layer, row in enumerate(panel.values):
                    for step, value in zip(panel.steps, row, strict=True):
                        cells = [panel.statistic, panel.arm, panel.modality, "median", layer]
                        writer.writerow([*cells, *several, _cell(step), _cell(value), ""])
                continue
            axis = [panel.x] if several else []
            for line in panel.lines:
                statistic = {"bound": "attn_logit_bound", "fit": f"{panel.statistic} (fit)"}.get(
                    line.role, panel.statistic
                )
                seed = "median" if line.seed is None else line.seed
                cells = [statistic, line.arm, line.modality, seed, "", *axis]
                for step, value in zip(line.steps, line.values, strict=True):
                    writer.writerow([*cells, _cell(step), _cell(value), line.run])
        return out.getvalue()


def _cell(value: float) -> str:
    return f"{value:.6g}" if abs(value) < 1e6 or not math.isfinite(value) else f"{value:.0f}"
