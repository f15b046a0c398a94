"""The figure of the bench: how often each rule is right, by kind of fault."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mmqk.bench.score import Score


def draw(rows: Sequence[Score]) -> bytes:
    """Draw a row per rule and a column per kind of fault, darker for more hits; return a PNG."""
    rows = sorted(rows, key=lambda row: -row.hits)
    kinds = sorted({kind for row in rows for kind in row.kinds})
    shares = np.array([[hits / runs for hits, runs in (row.kinds[kind] for kind in kinds)] for row in rows])
    canvas = Figure(figsize=(3.2 + 0.5 * len(kinds), 1.2 + 0.28 * len(rows)), layout="constrained")
    axes = canvas.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.2, aspect="auto")
    for y, row in enumerate(rows):
        for x, kind in enumerate(kinds):
            hits, runs = row.kinds[kind]
            color = "white" if hits > 0.6 * runs else "#1b1f24"
            axes.text(x, y, f"{hits}/{runs}", ha="center", va="center", fontsize=7, color=color)
    names = [f"{row.rule}  {row.hits / row.faults:.0%}, false {row.accused}/{row.healthy}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_xticks(range(len(kinds)), kinds, fontsize=8, rotation=45, ha="left")
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    png = io.BytesIO()
    FigureCanvasAgg(canvas).print_png(png, metadata={"Software": None})
    return png.getvalue()
