"""Figures as SVG panels, which a page can reflow, and as one PNG. Colour is arm, line style is modality."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

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

# Okabe and Ito's palette, which keeps apart for colour-blind eyes; its yellow is last, being faint on white.
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
STYLES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (6, 1.5, 1, 1.5)), (0, (1, 1)))
DASHES = ("", "7 3", "9 2.5 2 2.5", "2 2")
INK, FAINT = "#1b1f24", "#8b929b"
PANEL_INCHES = (5.4, 3.5)
HEAT_INCHES = (5.4, 2.5)
DPI = 130

RC = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ec",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "svg.fonttype": "none",
    "svg.hashsalt": "mmqk",
    "path.simplify": True,
}
_SVG_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def arm_colours(study: Study) -> dict[str, str]:
    """A colour an arm, the same on the whole page."""
    return {arm: PALETTE[i % len(PALETTE)] for i, arm in enumerate(study.arms)}


def modality_dashes(study: Study) -> dict[str, str]:
    """The line style of a modality as an SVG dash array, for legends."""
    return {m: DASHES[i % len(DASHES)] for i, m in enumerate(study.modalities)}


def svg_panels(study: Study, figure: Figure) -> list[str]:
    """Every panel as an SVG element for a page; ids are unique to the figure, and no file name or date in it."""
    drawn = []
    with matplotlib.rc_context(RC):
        for r, row in enumerate(figure.rows):
            limits = _limits(row)
            for c, panel in enumerate(row):
                canvas = Canvas(figsize=HEAT_INCHES if isinstance(panel, HeatMap) else PANEL_INCHES)
                FigureCanvasSVG(canvas)
                axes = canvas.add_axes((0.135, 0.16, 0.845, 0.735))
                if isinstance(panel, HeatMap):
                    axes.set_position((0.135, 0.215, 0.845, 0.655))
                _draw(study, axes, panel, limits, _heat_range(figure))
                out = io.StringIO()
                canvas.savefig(out, format="svg", transparent=True, metadata=_no_metadata())
                drawn.append(_clean(out.getvalue(), f"{figure.name}-{r}{c}", panel))
    return drawn


def png(study: Study, figure: Figure) -> bytes:
    """The whole figure with its title and legend."""
    rows, columns = len(figure.rows), max(len(row) for row in figure.rows)
    heat = isinstance(figure.rows[0][0], HeatMap)
    width = 5.2 * max(columns, 2)
    title = textwrap.wrap(figure.reading, int(width * 10.2))
    head = 0.34 * len(title) + (0.25 if heat else 0.25 + 0.3 * -(-_legend_entries(figure) // 3))
    height = head + rows * (2.4 if heat else 3.2)
    with matplotlib.rc_context(RC):
        canvas = Canvas(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(canvas)
        grid = canvas.add_gridspec(
            rows,
            columns,
            left=0.075,
            right=0.985,
            top=1 - (head + 0.35) / height,
            bottom=0.55 / height,
            wspace=0.17,
            hspace=0.55 if heat else 0.36,
        )
        for r, row in enumerate(figure.rows):
            limits = _limits(row)
            for c, panel in enumerate(row):
                _draw(study, canvas.add_subplot(grid[r, c]), panel, limits, _heat_range(figure))
        canvas.text(
            0.012, 1 - 0.1 / height, "\n".join(title), va="top", fontsize=13, fontweight="bold", linespacing=1.3
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
    axes.set_ylabel(panel.ylabel, labelpad=4)
    if panel.log:
        axes.set_yscale("log")
    if limits is not None:
        axes.set_ylim(*limits)
        if panel.log:
            narrow = limits[1] / limits[0] < 60
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
            axes.yaxis.set_major_formatter(FuncFormatter(_plain))
            axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(left=0)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))


def _draw_line(axes: Axes, line: Line, colours: Mapping[str, str], styles: Mapping[str, Any]) -> None:
    colour = colours.get(line.arm, INK)
    if line.role == "bound":
        axes.plot(line.steps, line.values, color=colour, linewidth=1.4, linestyle=(0, (1, 1.4)))
        axes.annotate(
            "QK-Norm bound (by construction)",
            (line.steps[-1], line.values[-1]),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=9.5,
            color=colour,
        )
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
            line.steps[-1:], line.values[-1:], "x", color=colour, markersize=9, markeredgewidth=2.2, clip_on=False
        )


def _draw_heat(axes: Axes, panel: HeatMap, heat: tuple[float, float]) -> None:
    step = float(np.diff(panel.steps).mean()) if len(panel.steps) > 1 else 1.0
    layers = len(panel.values)
    image = axes.imshow(
        np.clip(np.where(np.isfinite(panel.values), panel.values, heat[1]), *heat),
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
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    assert axes.figure is not None
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06)
    bar.set_label("largest |logit|")
    narrow = heat[1] / heat[0] < 60
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.outline.set_visible(False)  # type: ignore[operator]


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


def _legend_entries(figure: Figure) -> int:
    return len(figure.arms) + (len(figure.modalities) if len(figure.modalities) > 1 else 0)


def _legend(study: Study, figure: Figure) -> list[Line2D]:
    colours = arm_colours(study)
    handles = [Line2D([], [], color=colours[arm], linewidth=2.4, label=study.label(arm)) for arm in figure.arms]
    if len(figure.modalities) > 1:
        handles += [
            Line2D([], [], color=INK, linewidth=1.6, linestyle=STYLES[i % len(STYLES)], label=modality)
            for i, modality in enumerate(figure.modalities)
        ]
    return handles


def _plain(value: float, _position: int | None = None) -> str:
    return f"{value:,.0f}" if abs(value) >= 1 or value == 0 else f"{value:g}"


def _no_metadata() -> dict[str, None]:
    return dict.fromkeys(("Date", "Creator", "Format", "Type"))


def _clean(svg: str, prefix: str, panel: Panel | HeatMap) -> str:
    """An element that can stand in a page beside others: the page's font, ids of its own, short numbers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', _opening(panel), svg, count=1)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    svg = re.sub(r"(\d+\.\d\d)\d+", r"\1", svg)
    svg = svg.replace("'DejaVu Sans'", _SVG_FONT)
    return re.sub(r"\n\s*", "\n", svg).strip()


def _opening(panel: Panel | HeatMap) -> str:
    what = panel.label if isinstance(panel, HeatMap) else panel.ylabel
    label = re.sub(r"[<>&\"]", "", f"{panel.title}: {what} by optimizer step")
    return (
        r'<svg viewBox="\1" role="img" '
        f'aria-label="{label}" '
        r'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
