"""Figures as SVG panels, which a page can reflow, and as one PNG. Colour is arm, line style is modality."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mmqk.analysis.curves import Figure, HeatMap, Line, Panel
from mmqk.analysis.study import Study
from mmqk.analysis.style import INK, RC, STYLES, arm_colours
from mmqk.analysis.svg import svg_element

PANEL_INCHES = (5.4, 3.5)
HEAT_INCHES = (5.4, 2.5)
DPI = 130
# Below this ratio of its ends a logarithmic axis has no ticks worth reading.
WORTH_A_LOG = 5
NICE = (1, 2, 2.5, 5, 10)


def svg_panels(study: Study, figure: Figure) -> list[str]:
    """Every panel as an SVG element for a page; with ids of its own."""
    drawn = []
    with matplotlib.rc_context(RC):
        for r, row in enumerate(figure.rows):
            limits = _limits(row)
            for c, panel in enumerate(row):
                canvas = Canvas(figsize=HEAT_INCHES if isinstance(panel, HeatMap) else PANEL_INCHES)
                FigureCanvasSVG(canvas)
                axes = canvas.add_axes(_frame(panel))
                _draw(study, axes, panel, limits, _heat_range(figure))
                what = panel.label if isinstance(panel, HeatMap) else panel.ylabel
                label = f"{panel.title}: {what} by optimizer step"
                drawn.append(svg_element(canvas, f"{figure.name}-{r}{c}", label))
    return drawn


def png(study: Study, figure: Figure) -> bytes:
    """The whole figure with its title and legend."""
    rows, columns = len(figure.rows), max(len(row) for row in figure.rows)
    heat = isinstance(figure.rows[0][0], HeatMap)
    width = 5.2 * max(columns, 2)
    title = textwrap.wrap(figure.reading, int(width * 8.7))
    head = 0.27 * len(title) + (0.2 if heat else 0.2 + 0.23 * -(-_legend_entries(figure) // 3))
    height = head + rows * (2.4 if heat else 3.2)
    with matplotlib.rc_context(RC):
        canvas = Canvas(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(canvas)
        grid = canvas.add_gridspec(
            rows,
            columns,
            left=0.075,
            right=0.935 if _has_right(figure) else 0.97,
            top=1 - (head + 0.35) / height,
            bottom=0.55 / height,
            wspace=0.32 if _has_right(figure) else 0.2,
            hspace=0.55 if heat else 0.36,
        )
        for r, row in enumerate(figure.rows):
            limits = _limits(row)
            for c, panel in enumerate(row):
                _draw(study, canvas.add_subplot(grid[r, c]), panel, limits, _heat_range(figure))
        canvas.text(
            0.012,
            1 - 0.1 / height,
            "\n".join(title),
            va="top",
            fontsize=13,
            fontweight="bold",
            linespacing=1.3,
        )
        if not heat:
            canvas.legend(
                handles=_legend(study, figure),
                loc="upper left",
                bbox_to_anchor=(0.006, 1 - (0.08 + 0.27 * len(title)) / height),
                ncols=3,
                frameon=False,
                handlelength=2.6,
            )
        out = io.BytesIO()
        canvas.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def _frame(panel: Panel | HeatMap) -> tuple[float, float, float, float]:
    """Where the axes of a panel of its own lie in it: left, bottom, width, height."""
    if isinstance(panel, HeatMap):
        return (0.135, 0.215, 0.82, 0.655)
    return (0.135, 0.16, 0.845 if panel.right is None else 0.745, 0.735)


def _draw(
    study: Study,
    axes: Axes,
    panel: Panel | HeatMap,
    limits: tuple[float, float] | None,
    heat: tuple[float, float] | None,
) -> None:
    axes.set_title(panel.title, pad=7)
    axes.set_xlabel("optimizer step", labelpad=3)
    if isinstance(panel, HeatMap):
        assert heat is not None
        _draw_heat(axes, panel, heat)
        return
    colours = arm_colours(study)
    styles = {m: STYLES[i % len(STYLES)] for i, m in enumerate(study.modalities)}
    for line in panel.lines:
        _draw_line(axes, line, colours, styles)
    _name_bound(axes, [line for line in panel.lines if line.role == "bound"])
    axes.set_ylabel(panel.ylabel)
    axes.yaxis.set_label_coords(-0.105, 0.5)
    if limits is not None:
        logarithmic = panel.log and limits[1] / limits[0] > WORTH_A_LOG
        if logarithmic:
            axes.set_yscale("log")
            narrow = limits[1] / limits[0] < 60
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=NICE))
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        axes.set_ylim(*limits)
    if panel.right is not None:
        label, factor = panel.right
        there, back = (lambda v: np.asarray(v) * factor), (lambda v: np.asarray(v) / factor)
        second = axes.secondary_yaxis("right", functions=(there, back))
        second.set_ylabel(label, labelpad=3)
        second.spines["right"].set_visible(False)
        second.yaxis.set_major_formatter(FuncFormatter(_plain))
    last = max((line.steps[-1] for line in panel.lines), default=1.0)
    axes.set_xlim(0, 1.015 * last)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=NICE))
    axes.xaxis.set_major_formatter(FuncFormatter(_commas))


def _draw_line(axes: Axes, line: Line, colours: Mapping[str, str], styles: Mapping[str, Any]) -> None:
    colour = colours.get(line.arm, INK)
    if line.role == "bound":
        axes.plot(line.steps, line.values, color=colour, linewidth=1.4, linestyle=(0, (1, 1.4)))
        return
    thick = line.role == "median" or line.alone
    # Over-long dashes would swallow a thin line's shape; its style is that of its modality all the same.
    axes.plot(
        line.steps,
        line.values,
        color=colour,
        linestyle=styles.get(line.modality, "-"),
        linewidth=2.2 if thick else 0.9,
        alpha=1 if thick else 0.5,
        zorder=3 if thick else 2,
        solid_capstyle="round",
    )
    if line.diverged:
        axes.plot(
            line.steps[-1:],
            line.values[-1:],
            "x",
            color=colour,
            markersize=9,
            markeredgewidth=2.2,
            clip_on=False,
        )


def _name_bound(axes: Axes, bounds: Sequence[Line]) -> None:
    """Say once what the dotted lines are, above the highest."""
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
        np.clip(panel.values, *heat),  # infinite is the worst colour; what was not measured stays blank
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
    assert axes.figure is not None
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06)
    narrow = heat[1] / heat[0] < 60
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    cast(Any, bar.outline).set_visible(False)


def _limits(row: Sequence[Panel | HeatMap]) -> tuple[float, float] | None:
    """One y-range for the panels of a row, so that modalities can be compared by eye."""
    panels = [panel for panel in row if isinstance(panel, Panel)]
    values = [line.values[np.isfinite(line.values)] for panel in panels for line in panel.lines]
    together = np.concatenate(values) if values else np.zeros(0)
    if not len(together):
        return None
    if panels[0].log:
        together = together[together > 0]
        low, high = float(together.min()), float(together.max())
        pad = max((high / low) ** 0.06, 1.08)
        return low / pad, high * pad * 1.1
    low, high = float(together.min()), float(together.max())
    if np.isfinite(panels[0].top):
        high = min(high, panels[0].top)
    pad = max(0.05 * (high - low), 0.02)
    return low - pad, high + pad


def _heat_range(figure: Figure) -> tuple[float, float] | None:
    maps = [panel.values for panel in figure.panels if isinstance(panel, HeatMap)]
    if not maps:
        return None
    values = np.concatenate([v[np.isfinite(v) & (v > 0)] for v in maps])
    low, high = (float(values.min()), float(values.max())) if len(values) else (1.0, 10.0)
    return low, max(high, low * 1.01)


def _has_right(figure: Figure) -> bool:
    return any(isinstance(panel, Panel) and panel.right is not None for panel in figure.panels)


def _legend_entries(figure: Figure) -> int:
    return len(figure.arms) + (len(figure.modalities) if len(figure.modalities) > 1 else 0)


def _legend(study: Study, figure: Figure) -> list[Line2D]:
    colours = arm_colours(study)
    handles = [
        Line2D([], [], color=colours[arm], linewidth=2.4, label=study.label(arm)) for arm in figure.arms
    ]
    if len(figure.modalities) > 1:
        handles += [
            Line2D([], [], color=INK, linewidth=1.6, linestyle=STYLES[i % len(STYLES)], label=modality)
            for i, modality in enumerate(figure.modalities)
        ]
    return handles


def _plain(value: float, _position: int | None = None) -> str:
    """A value on an axis: 250, 10k, 2e6."""
    if abs(value) >= 1e6:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def _commas(value: float, _position: int | None = None) -> str:
    """A step on an axis: 1,500."""
    return f"{value:,.0f}"
