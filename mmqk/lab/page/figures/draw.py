"""Draw panels on axes. Color shows the arm, line style the modality."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from mmqk.lab.page.figures.shapes import STEP, Figure, HeatMap, Line, Panel
from mmqk.lab.page.figures.style import GRAY, INK, arm_colors, modality_styles
from mmqk.lab.verdicts.study import Study

# An axis is linear if the ratio of its ends is smaller than this, because a log axis would have too few ticks.
FEWEST_LOG_RATIO = 5
TICK_STEPS = (1, 2, 2.5, 5, 10)
# With more lines than this, the lines of single runs are thinner and paler.
MANY_LINES = 24
TITLE_WIDTH = 50
# Lines that are calculated: (width, line style).
CALCULATED: dict[str, tuple[float, Any]] = {"bound": (1.4, (0, (1, 1.4))), "fit": (1.3, (0, (5, 2)))}


@dataclass(frozen=True)
class Brush:
    """Colors by arm and line styles by modality."""

    colors: Mapping[str, str]
    styles: Mapping[str, Any]

    @classmethod
    def of(cls, study: Study) -> Brush:
        """Return the brush of a study."""
        return cls(arm_colors(study), modality_styles(study))


def draw(
    brush: Brush, axes: Axes, figure: Figure, row: Sequence[Panel | HeatMap], panel: Panel | HeatMap
) -> None:
    """Draw one panel of a row of a figure on its axes."""
    axes.set_title(textwrap.fill(panel.title, TITLE_WIDTH))
    if isinstance(panel, HeatMap):
        _draw_heat(axes, panel, heat_range(figure))
        return
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)
    runs = sum(line.role == "seed" for line in panel.lines)
    for line in panel.lines:
        _draw_line(axes, line, brush, runs)
    for x, y, text, side in panel.notes:
        left = side == "right"
        axes.annotate(
            text, (x, y), xytext=(3 if left else -3, 3), textcoords="offset points",
            ha="left" if left else "right", va="bottom", fontsize=9.5, in_layout=False,
        )  # fmt: skip
    _set_x(axes, panel)
    ends = limits([p for p in row if isinstance(p, Panel)], panel)
    if panel.height:
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        if ends is not None:
            axes.set_ylim(ends[0] - 0.3, ends[1] + 0.9)
    else:
        _set_y(axes, panel, ends)


def _set_y(axes: Axes, panel: Panel, ends: tuple[float, float] | None) -> None:
    if ends is not None:
        if panel.log and ends[1] / ends[0] > FEWEST_LOG_RATIO:
            axes.set_yscale("log")
            _log_ticks(axes.yaxis, *ends)
        else:
            axes.locator_params("y", nbins=6, steps=TICK_STEPS)
            axes.yaxis.set_major_formatter(tick)
        axes.set_ylim(*ends)
    if panel.right is not None:
        label, factor = panel.right
        forward, inverse = (lambda v: np.asarray(v) * factor), (lambda v: np.asarray(v) / factor)
        second = axes.secondary_yaxis("right", functions=(forward, inverse))
        second.set_ylabel(label)
        second.spines["right"].set_visible(False)
        second.yaxis.set_major_formatter(tick)


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 60 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(tick)


def _set_x(axes: Axes, panel: Panel) -> None:
    if panel.ticks:
        axes.set_xlim(-0.6, len(panel.ticks) - 0.4)
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        axes.grid(False, axis="x")
        return
    # Set ticks at measured values, not at the x values of fits.
    at = np.unique(np.concatenate([line.steps for line in panel.lines if line.role != "fit"] or [np.ones(1)]))
    low, high = float(at[0]), float(at[-1])
    if panel.xlog:
        axes.set_xscale("log")
        pad = max((high / low) ** 0.06, 1.15)
        axes.set_xlim(low / pad, high * pad)
        apart = np.diff(np.log(at), prepend=-math.inf) > math.log(high / low) / 9
        axes.set_xticks(at[apart] if apart.sum() <= 9 else [low, high])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        steps = panel.x == "step"
        axes.set_xlim(0, 1.015 * (max(high, 1.0) if steps else high))
        axes.locator_params("x", nbins=6, integer=steps, steps=TICK_STEPS)
    axes.xaxis.set_major_formatter(tick)


def _draw_line(axes: Axes, line: Line, brush: Brush, runs: int) -> None:
    color = line.color or brush.colors.get(line.arm, INK)
    if line.role in CALCULATED:
        width, style = CALCULATED[line.role]
        axes.plot(line.steps, line.values, color=color, linewidth=width, linestyle=style, zorder=2)
        return
    many, gray = runs > MANY_LINES, color == GRAY
    if line.marker:
        face = "white" if line.marker == "D" else color
        edge = 1.6 if line.marker == "x" else 1.2
        axes.plot(
            line.steps, line.values, line.marker, color=color, markersize=6, mew=edge, mfc=face, zorder=2.5
        )
        return
    thick = line.role == "median" or (line.alone and not many)
    axes.plot(
        line.steps,
        line.values,
        color=color,
        linestyle=brush.styles.get(line.modality, "-"),
        linewidth=2.2 if thick else 0.7 if many or gray else 0.9,
        alpha=1 if thick else 0.5 if runs < 4 * MANY_LINES else 0.3,
        zorder=4 if thick else 1.9 if gray else 2.5,
        solid_capstyle="round",
    )
    if line.diverged:
        size, edge = (6, 1.4) if many else (9, 2.2)
        axes.plot(
            line.steps[-1:], line.values[-1:], "x", color=color, markersize=size, mew=edge, clip_on=False
        )


def _draw_heat(axes: Axes, panel: HeatMap, heat: tuple[float, float]) -> None:
    step = float(np.diff(panel.steps).mean()) if len(panel.steps) > 1 else 1.0
    layers = len(panel.values)
    image = axes.imshow(
        np.clip(panel.values, *heat),  # infinity has the color of the largest value; NaN stays blank
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap="cividis",
        norm=LogNorm(*heat),
        extent=(panel.steps[0] - step / 2, panel.steps[-1] + step / 2, -0.5, layers - 0.5),
    )
    axes.grid(False)
    axes.set_xlabel(STEP)
    axes.set_ylabel("layer")
    axes.locator_params("y", nbins=min(layers, 8), integer=True)
    axes.yaxis.set_major_formatter(lambda row, _: f"{panel.layers[int(row)]}" if 0 <= row < layers else "")
    axes.locator_params("x", nbins=6, integer=True, steps=TICK_STEPS)
    axes.xaxis.set_major_formatter(tick)
    assert axes.figure is not None
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06, label=panel.label)
    _log_ticks(bar.ax.yaxis, *heat)
    cast(Any, bar.outline).set_visible(False)


def limits(row: Sequence[Panel], panel: Panel) -> tuple[float, float] | None:
    """Return the y-range of a panel: panels of a row share it, so that modalities can be compared."""
    panels = [p for p in row if p.shared] if panel.shared else [panel]
    log, top = panels[0].log, panels[0].top
    values = _finite([line.values for p in panels for line in p.lines], above=0 if log else -math.inf)
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if log:
        pad = max((high / low) ** 0.06, 1.08)
        return low / pad, high * pad * 1.1
    high = max(float(np.fmin(high, top)), low)
    pad = max(0.05 * (high - low), 0.02)
    return low - pad, high + pad


def heat_range(figure: Figure) -> tuple[float, float]:
    """Return one color scale for the heat maps of a figure."""
    values = _finite([panel.values for panel in figure.panels if isinstance(panel, HeatMap)], above=0)
    low, high = (float(values.min()), float(values.max())) if len(values) else (1.0, 10.0)
    return low, max(high, low * 1.01)


def _finite(arrays: Sequence[NDArray], above: float) -> NDArray:
    values = np.concatenate([np.zeros(0), *(array.ravel() for array in arrays)])
    return values[np.isfinite(values) & (values > above)]


def tick(value: float, _position: float = 0) -> str:
    """Format a value on an axis: 0.003, 1e-4, 250, 1.5k, 2.4M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 1e-3 else f"{value:g}".replace("e+", "e")
