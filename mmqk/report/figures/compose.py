"""Draw a figure into one file, with title and legend: PNG and SVG."""

from __future__ import annotations

import io
import textwrap
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from PIL import Image

from mmqk.report.figures.draw import Brush, draw, heat_range, limits
from mmqk.report.figures.shapes import Figure, HeatMap, Key, Panel
from mmqk.report.figures.style import DASHES, RC, STYLES
from mmqk.report.figures.svg import svg_file

DPI = 130
# A palette of this size makes a line drawing a third as large, without a visible difference.
COLORS = 192


def figure_files(brush: Brush, figure: Figure) -> dict[str, bytes]:
    """The figure as files: {"png": ..., "svg": ...}."""
    with matplotlib.rc_context(RC):
        canvas = _canvas(brush, figure)
        agg = FigureCanvasAgg(canvas)
        canvas.set_dpi(DPI)
        agg.draw()
        picture = Image.fromarray(np.asarray(agg.buffer_rgba())[..., :3].copy()).quantize(
            COLORS, dither=Image.Dither.NONE
        )
        out = io.BytesIO()
        picture.save(out, format="png", dpi=(DPI, DPI))
        canvas.set_dpi(72)
        return {"png": out.getvalue(), "svg": svg_file(canvas, figure.name, figure.reading).encode()}


def _canvas(brush: Brush, figure: Figure) -> Canvas:
    rows, columns = len(figure.rows), max(len(row) for row in figure.rows)
    heat = isinstance(figure.rows[0][0], HeatMap)
    right = any(isinstance(panel, Panel) and panel.right is not None for panel in figure.panels)
    width = 5.2 * max(columns, 2)
    title = textwrap.wrap(figure.reading, int(width * 8.7))
    per_row = max(2, int(width / 3.4))
    head = 0.27 * len(title) + 0.2 + 0.23 * -(-len(figure.legend) // per_row)
    tall = next((p.height for p in figure.panels if isinstance(p, Panel) and p.height), 0.0)
    height = head + rows * (tall or (2.4 if heat else 3.2))
    canvas = Canvas(figsize=(width, height), facecolor="white")
    grid = canvas.add_gridspec(
        rows,
        columns,
        left=0.02 if tall else 0.15 / columns,
        right=0.935 if right else 0.97,
        top=1 - (head + 0.35) / height,
        bottom=0.55 / height,
        wspace=0.32 if right else 0.22,
        hspace=0.55 if heat else 0.36,
    )
    for r, row in enumerate(figure.rows):
        for c, panel in enumerate(row):
            draw(brush, canvas.add_subplot(grid[r, c]), panel, limits(row, panel), heat_range(figure))
    words = "\n".join(title)
    canvas.text(0.012, 1 - 0.1 / height, words, va="top", fontsize=13, fontweight="bold", linespacing=1.3)
    if figure.legend:
        canvas.legend(
            handles=[_handle(key) for key in figure.legend],
            loc="upper left",
            bbox_to_anchor=(0.006, 1 - (0.08 + 0.27 * len(title)) / height),
            ncols=per_row,
            frameon=False,
            handlelength=2.6,
        )
    return canvas


def _handle(key: Key) -> Line2D:
    style: Any = STYLES[DASHES.index(key.dash)] if key.dash in DASHES else "-"
    if key.marker:
        face = "white" if key.marker == "D" else key.color
        return Line2D(
            [],
            [],
            color=key.color,
            linestyle="none",
            marker=key.marker,
            markerfacecolor=face,
            label=key.label,
        )
    return Line2D([], [], color=key.color, linewidth=0.8 * key.width, linestyle=style, label=key.label)
