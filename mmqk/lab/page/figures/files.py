"""Figures as SVG for a page, and as PNG and SVG files with title and legend."""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from PIL import Image

from mmqk.lab.page.figures.draw import Brush, draw
from mmqk.lab.page.figures.shapes import Figure, HeatMap, Key, Panel
from mmqk.lab.page.figures.style import RC

PANEL_INCHES, HEAT_INCHES = (5.4, 3.5), (5.4, 2.5)
# Size of a panel in a row of three or more panels; the font size does not change.
THIRD_INCHES = (3.9, 3.1)
WIDE_INCHES = 9.6
# Panels of a figure with more than MANY_ROWS rows have the height LOW_INCHES.
MANY_ROWS, LOW_INCHES = 5, 2.3
DPI = 130
# With this number of colors, the PNG of a line drawing is a third as large, without a visible difference.
COLORS = 192
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# A date, a version or a link would make equal figures differ.
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def svg_panels(brush: Brush, figure: Figure) -> list[list[str]]:
    """Return every panel, row by row, as an SVG element for a page, with unique ids."""
    rows: list[list[str]] = []
    with matplotlib.rc_context(RC):
        for r, row in enumerate(figure.rows):
            rows.append([])
            for c, panel in enumerate(row):
                width, height = _inches(panel, len(row))
                low = len(figure.rows) > MANY_ROWS and isinstance(panel, Panel)
                canvas = Canvas(figsize=(width, LOW_INCHES if low else height))
                draw(brush, canvas.add_subplot(), figure, row, panel)
                _frame(canvas, panel)
                what, by = (
                    (panel.label, "layer") if isinstance(panel, HeatMap) else (panel.ylabel, panel.xlabel)
                )
                svg = _svg(canvas, f"{figure.name}-{r}{c}", f"{panel.title}: {what} by {by or 'arm'}")
                rows[-1].append(svg[svg.index("<svg") :])
    return rows


def _inches(panel: Panel | HeatMap, columns: int) -> tuple[float, float]:
    if isinstance(panel, HeatMap):
        return HEAT_INCHES
    if panel.height:
        return WIDE_INCHES, panel.height
    return THIRD_INCHES if columns > 2 else PANEL_INCHES


def _frame(canvas: Canvas, panel: Panel | HeatMap) -> None:
    """Set fixed margins in inches, so that the axes of a page align. Matplotlib's constrained layout would take
    three times as long."""
    width, height = canvas.get_size_inches()
    left, top, right = 0.73, 0.37, 0.15
    if isinstance(panel, HeatMap) or panel.right is not None:
        right = 0.75
    elif panel.height:
        left, top = 0.1, 0.1
    bottom = 0.7 if isinstance(panel, Panel) and panel.ticks else 0.56  # room for three lines
    canvas.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)


def figure_files(brush: Brush, figure: Figure) -> dict[str, bytes]:
    """Return the figure as files: {"png": ..., "svg": ...}."""
    with matplotlib.rc_context(RC):
        canvas, out = _canvas(brush, figure), io.BytesIO()
        canvas.set_dpi(DPI)
        drawn = FigureCanvasAgg(canvas)
        drawn.draw()  # applies the layout and draws once; savefig would draw twice
        canvas.set_layout_engine(None)  # the SVG keeps the layout
        picture = Image.fromarray(np.asarray(drawn.buffer_rgba())).convert("RGB")
        picture.quantize(COLORS, dither=Image.Dither.NONE).save(out, format="png", dpi=(DPI, DPI))
        return {"png": out.getvalue(), "svg": _svg(canvas, figure.name, figure.reading).encode()}


def _canvas(brush: Brush, figure: Figure) -> Canvas:
    """Return a canvas with all panels below the title of the figure, which is drawn as the title of the legend."""
    columns = max(len(row) for row in figure.rows)
    width = 5.2 * max(columns, 2)
    title = textwrap.wrap(figure.reading, int(width * 8.7))
    per_row = _legend_columns(figure.legend, width)
    head = 0.27 * len(title) + 0.3 + 0.23 * -(-len(figure.legend) // per_row)
    height = LOW_INCHES if len(figure.rows) > MANY_ROWS else 3.2
    heights = [2.4 if isinstance(row[0], HeatMap) else row[0].height or height for row in figure.rows]
    canvas = Canvas(figsize=(width, head + sum(heights)), layout="constrained")
    grid = canvas.add_gridspec(len(figure.rows), columns)
    for r, row in enumerate(figure.rows):
        for c, panel in enumerate(row):
            draw(brush, canvas.add_subplot(grid[r, c]), figure, row, panel)
    canvas.align_ylabels()
    canvas.legend(
        handles=[_handle(key) for key in figure.legend],
        title="\n".join(title),
        title_fontproperties={"size": 13, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=per_row,
        frameon=False,
        handlelength=2.6,
    )
    return canvas


def _legend_columns(keys: Sequence[Key], width: float) -> int:
    """Return the number of columns of a legend: as many as fit into ``width`` inches, at least one."""
    for columns in range(max(2, int(width / 3.4)), 1, -1):
        rows = -(-len(keys) // columns)
        longest = [max(len(key.label) for key in keys[i : i + rows]) for i in range(0, len(keys), rows or 1)]
        if sum(0.65 + 0.075 * characters for characters in longest) <= width:
            return columns
    return 1


def _handle(key: Key) -> Line2D:
    label = " ".join(key.label.split())
    if key.marker:
        return Line2D([], [], color=key.color, linestyle="", marker=key.marker, mfc="white", label=label)
    return Line2D([], [], color=key.color, linewidth=2.2, linestyle=key.style, label=label)


def _svg(canvas: Canvas, prefix: str, label: str) -> str:
    """Return a figure as SVG with an ``aria-label``; its ids begin with ``prefix``, which makes them unique on a
    page."""
    out = io.StringIO()
    canvas.savefig(out, format="svg", metadata=_NO_METADATA)
    svg = out.getvalue().replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{prefix}-", svg).replace("'DejaVu Sans'", _FONT)
    # Coordinates get two decimal places; numbers in labels are not changed.
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag[0]), svg)
    return re.sub(r"\n\s*", "\n", svg)
