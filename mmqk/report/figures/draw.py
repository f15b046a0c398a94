"""Draw panels on axes. Color shows the arm, line style the modality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mmqk.analysis.verdicts.study import Study
from mmqk.report.figures.shapes import Figure, HeatMap, Line, Panel
from mmqk.report.figures.style import GRAY, INK, RC, STYLES, arm_colors
from mmqk.report.figures.svg import svg_element
from mmqk.store.formatting import plain

PANEL_INCHES = (5.4, 3.5)
HEAT_INCHES = (5.4, 2.5)
# Three or more panels in a row: text keeps its size.
THIRD_INCHES = (3.9, 3.1)
WIDE_INCHES = 9.6
LABEL_INCHES = 0.48
# Below this ratio of its ends an axis is linear: a log axis would have too few ticks.
WORTH_A_LOG = 5
NICE = (1, 2, 2.5, 5, 10)
# With more lines than this, thin lines are thinner and paler.
MANY_LINES = 24


@dataclass(frozen=True)
class Brush:
    """Colors by arm and line styles by modality."""

    colors: Mapping[str, str]
    styles: Mapping[str, Any]

    @classmethod
    def of(cls, study: Study) -> Brush:
        """The brush of a study."""
        styles = {m: STYLES[i % len(STYLES)] for i, m in enumerate(study.modalities)}
        return cls(arm_colors(study), styles)


def svg_panels(brush: Brush, figure: Figure) -> list[str]:
    """Every panel as an SVG element for a page, with unique ids."""
    drawn = []
    heat = heat_range(figure)
    with matplotlib.rc_context(RC):
        for r, row in enumerate(figure.rows):
            for c, panel in enumerate(row):
                canvas = Canvas(figsize=_inches(panel, len(row)))
                FigureCanvasSVG(canvas)
                draw(brush, canvas.add_axes(_frame(panel, len(row))), panel, limits(row, panel), heat)
                what = panel.label if isinstance(panel, HeatMap) else panel.ylabel
                by = "optimizer step" if isinstance(panel, HeatMap) else panel.xlabel or "arm"
                drawn.append(svg_element(canvas, f"{figure.name}-{r}{c}", f"{panel.title}: {what} by {by}"))
    return drawn


def _inches(panel: Panel | HeatMap, abreast: int) -> tuple[float, float]:
    if isinstance(panel, HeatMap):
        return HEAT_INCHES
    if panel.height:
        return WIDE_INCHES, panel.height
    return THIRD_INCHES if abreast > 2 else PANEL_INCHES


def _frame(panel: Panel | HeatMap, abreast: int) -> tuple[float, float, float, float]:
    """The position of the axes in a single panel: left, bottom, width, height."""
    if isinstance(panel, HeatMap):
        return (0.135, 0.215, 0.82, 0.655)
    if panel.height:
        return (0.01, 0.55 / panel.height, 0.98, 1 - 0.65 / panel.height)
    if abreast > 2 and panel.right is None:
        return (0.185, 0.17, 0.77, 0.725)
    return (0.135, 0.16, 0.845 if panel.right is None else 0.745, 0.735)


def draw(
    brush: Brush,
    axes: Axes,
    panel: Panel | HeatMap,
    y_limits: tuple[float, float] | None,
    heat: tuple[float, float] | None,
) -> None:
    """Draw one panel on its axes."""
    axes.set_title(panel.title, pad=7)
    if isinstance(panel, HeatMap):
        assert heat is not None
        axes.set_xlabel("optimizer step", labelpad=3)
        _draw_heat(axes, panel, heat)
        return
    axes.set_xlabel(panel.xlabel, labelpad=3)
    runs = sum(line.role == "seed" for line in panel.lines)
    for line in panel.lines:
        _draw_line(axes, line, brush, runs > MANY_LINES, 0.5 if runs < 4 * MANY_LINES else 0.3)
    _name_bound(axes, [line for line in panel.lines if line.role == "bound"])
    for x, y, text, side in panel.notes:
        axes.annotate(
            text,
            (x, y),
            xytext=(3 if side == "right" else -3, 3),
            textcoords="offset points",
            ha="left" if side == "right" else "right",
            va="bottom",
            fontsize=9.5,
        )
    _set_x(axes, panel)
    if panel.height:
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(False, axis="y")
        if y_limits is not None:
            axes.set_ylim(y_limits[0] - 0.3, y_limits[1] + 0.9)
        return
    axes.set_ylabel(panel.ylabel)
    # The same distance from the axis in every panel, so that labels of a column align.
    assert axes.figure is not None
    inches = axes.get_position().width * cast(Canvas, axes.figure).get_figwidth()
    axes.yaxis.set_label_coords(-LABEL_INCHES / inches, 0.5)
    _set_y(axes, panel, y_limits)


def _set_y(axes: Axes, panel: Panel, y_limits: tuple[float, float] | None) -> None:
    if y_limits is not None:
        if panel.log and y_limits[1] / y_limits[0] > WORTH_A_LOG:
            axes.set_yscale("log")
            narrow = y_limits[1] / y_limits[0] < 60
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=NICE))
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        axes.set_ylim(*y_limits)
    if panel.right is not None:
        label, factor = panel.right
        forward, inverse = (lambda v: np.asarray(v) * factor), (lambda v: np.asarray(v) / factor)
        second = axes.secondary_yaxis("right", functions=(forward, inverse))
        second.set_ylabel(label, labelpad=3)
        second.spines["right"].set_visible(False)
        second.yaxis.set_major_formatter(FuncFormatter(_plain))


def _set_x(axes: Axes, panel: Panel) -> None:
    # Ticks and limits ignore the x of fits.
    measured = [line.steps for line in panel.lines if line.role != "fit"]
    at = np.concatenate(measured) if measured else np.ones(1)
    if panel.ticks:
        axes.set_xlim(-0.6, len(panel.ticks) - 0.4)
        axes.xaxis.set_major_locator(FixedLocator(range(len(panel.ticks))))
        axes.set_xticklabels(panel.ticks)
        axes.grid(False, axis="x")
    elif panel.xlog:
        axes.set_xscale("log")
        low, high = float(at.min()), float(at.max())
        pad = max((high / low) ** 0.06, 1.15)
        axes.set_xlim(low / pad, high * pad)
        # Ticks at the values themselves if they are few.
        values = sorted(set(at.tolist()))
        near = math.log(high / low) / 9 if high > low else 0
        kept = [v for i, v in enumerate(values) if i == 0 or math.log(v / values[i - 1]) > near]
        axes.xaxis.set_major_locator(FixedLocator(kept if len(kept) <= 9 else [values[0], values[-1]]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
    else:
        axes.set_xlim(0, 1.015 * max(float(at.max()), 1.0) if panel.lines else 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=NICE))
        axes.xaxis.set_major_formatter(FuncFormatter(_commas))


def _draw_line(axes: Axes, line: Line, brush: Brush, many: bool, alpha: float) -> None:
    color = line.color or brush.colors.get(line.arm, INK)
    if line.role == "bound":
        axes.plot(line.steps, line.values, color=color, linewidth=1.4, linestyle=(0, (1, 1.4)))
        return
    if line.role == "fit":
        axes.plot(line.steps, line.values, color=color, linewidth=1.3, linestyle=(0, (5, 2)), zorder=2)
        return
    thick = line.role == "median" or (line.alone and not many)
    gray = color == GRAY
    style = line.dash if line.dash is not None else brush.styles.get(line.modality, "-")
    axes.plot(
        line.steps,
        line.values,
        color=color,
        linestyle="none" if line.scatter else style,
        linewidth=2.2 if thick else 0.7 if many or gray else 0.9,
        alpha=1 if thick or line.scatter else alpha,
        zorder=4 if thick else 1.9 if gray else 2.5,
        solid_capstyle="round",
        marker=line.marker or None,
        markersize=6 if line.scatter else 5,
        markeredgewidth=1.6 if line.marker == "x" else 1.2,
        markerfacecolor="white" if line.marker == "D" else color,
    )
    if line.diverged:
        axes.plot(
            line.steps[-1:],
            line.values[-1:],
            "x",
            color=color,
            markersize=6 if many else 9,
            markeredgewidth=1.4 if many else 2.2,
            clip_on=False,
        )


def _name_bound(axes: Axes, bounds: Sequence[Line]) -> None:
    """Label the dotted lines once, above the highest."""
    if not bounds:
        return
    highest = max(bounds, key=lambda line: line.values[-1])
    axes.annotate(
        "QK-Norm bound (by construction)",
        (highest.steps[-1], float(highest.values.max())),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9.5,
        color=INK,
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
    axes.set_ylabel("layer")
    axes.yaxis.set_major_locator(MaxNLocator(min(layers, 8), integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=NICE))
    axes.xaxis.set_major_formatter(FuncFormatter(_commas))
    assert axes.figure is not None
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06)
    narrow = heat[1] / heat[0] < 60
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    cast(Any, bar.outline).set_visible(False)


def limits(row: Sequence[Panel | HeatMap], panel: Panel | HeatMap) -> tuple[float, float] | None:
    """The y-range of a panel: panels of a row share it, so that modalities can be compared."""
    if isinstance(panel, HeatMap):
        return None
    panels = [p for p in row if isinstance(p, Panel) and p.shared] if panel.shared else [panel]
    values = [line.values[np.isfinite(line.values)] for p in panels for line in p.lines]
    together = np.concatenate(values) if values else np.zeros(0)
    if panels[0].log:
        together = together[together > 0]
    if not len(together):
        return None
    low, high = float(together.min()), float(together.max())
    if panels[0].log:
        pad = max((high / low) ** 0.06, 1.08)
        return low / pad, high * pad * 1.1
    if np.isfinite(panels[0].top):
        high = max(min(high, panels[0].top), low)
    pad = max(0.05 * (high - low), 0.02)
    return low - pad, high + pad


def heat_range(figure: Figure) -> tuple[float, float] | None:
    """One color scale for the heat maps of a figure; None if it has no heat maps."""
    maps = [panel.values for panel in figure.panels if isinstance(panel, HeatMap)]
    if not maps:
        return None
    values = np.concatenate([v[np.isfinite(v) & (v > 0)] for v in maps])
    low, high = (float(values.min()), float(values.max())) if len(values) else (1.0, 10.0)
    return low, max(high, low * 1.01)


def _plain(value: float, _position: int | None = None) -> str:
    """Format a value on an axis: 250, 10k, 2e6."""
    if abs(value) >= 1e6:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def _short(value: float, _position: int | None = None) -> str:
    """Format a learning rate or a number of parameters: 0.003, 1e-4, 2.4M."""
    if value >= 1e3:
        for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
            if value >= size:
                return f"{plain(value / size)}{letter}"
    return f"{value:.0e}".replace("e-0", "e-") if value < 1e-3 else f"{value:g}"


def _commas(value: float, _position: int | None = None) -> str:
    """Format a step on an axis: 1,500."""
    return f"{value:,.0f}"
