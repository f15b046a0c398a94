"""How figures look: the color of each arm, and the drawing of a figure as PNG.

If the arms are points of a few families, each family has a color, and its arms have shades of this color, which
become darker along the axis. If there are more arms than colors, the arms that no figure or claim names are gray.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image

from mmqk.lab.page.figure import CALCULATED, DASHES, INK, Figure, Line, Panel, keys
from mmqk.lab.verdicts.study import Study

# The Okabe-Ito palette for color-blind readers; yellow is last, because it is faint on white.
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
# For the arms after the first eight: the muted palette of Paul Tol, also for color-blind readers, and then his light
# palette.
MORE = (
    *("#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#117733", "#6699CC"),
    *("#EE8866", "#AAAA00", "#77AADD", "#FFAABB", "#BBCC33"),
)
GRAY = "#b3bac2"
PALEST = 0.62
FAINT = "#8b929b"
RC: Any = {
    "font.family": "DejaVu Sans", "font.size": 11, "axes.labelsize": 11, "axes.titlesize": 12,
    # Dollar signs are plain text in labels, not mathematics.
    "text.parse_math": False,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 7, "axes.labelpad": 3,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e6e9ec", "grid.linewidth": 0.8, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "xtick.major.size": 3, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0,
    "path.simplify": True,
}  # fmt: skip
WIDTH, HEIGHT, LOW = 5.2, 3.2, 2.4  # of a panel in inches; LOW is the height in a figure of many rows
MANY_ROWS = 5
MOST_KEYS = 12
DPI = 130
# With this number of colors, the PNG of a line drawing is a third as large, without a visible difference.
COLORS = 192
# With more runs than this, the lines of single runs are thinner and paler.
MANY_LINES = 24
TICK_STEPS = (1, 2, 2.5, 5, 10)
# An axis is linear if the ratio of its ends is smaller than this, because a log axis would have too few ticks.
FEWEST_LOG_RATIO = 5


def families(study: Study) -> dict[str, list[str]]:
    """Return the arms by family, sorted by their points."""

    def order(value: Any) -> tuple[int, float, str]:
        return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))

    groups: dict[str, list[str]] = {}
    for arm in study.arms.values():
        groups.setdefault(arm.family or arm.name, []).append(arm.name)
    for arms in groups.values():
        arms.sort(key=lambda name: [order(value) for value in study.arms[name].point.values()])
    return groups


def arm_colors(study: Study) -> dict[str, str]:
    """Return one color per arm, the same on the whole page."""
    groups = families(study)
    # The palette is small: the arms of the first figures and of the claims get its colors first.
    claimed = [arm.name for claim in study.claims for name in claim.compared for arm in study.arms_of(name)]
    first = dict.fromkeys([*study.hero, *study.outcomes, *claimed, *study.shown, *study.arms])
    family_of = {arm: family for family, members in groups.items() for arm in members}
    few = len(groups) <= len(PALETTE)
    order = list(groups) if few else list(dict.fromkeys(family_of[arm] for arm in first))
    base = dict(zip(order, [*PALETTE, *MORE, *[GRAY] * len(order)], strict=False))
    colors: dict[str, str] = {}
    for family, arms in groups.items():
        for j, arm in enumerate(arms):
            pale = PALEST * (1 - j / (len(arms) - 1)) if len(arms) > 1 else 0.0
            red, green, blue = (c + (1 - c) * pale for c in to_rgb(base[family]))
            blended = to_hex((red, green, blue)).upper()
            colors[arm] = GRAY if base[family] == GRAY else blended
    return colors


def ramp(count: int) -> list[str]:
    """Return ``count`` colors for an ordered quantity, light to dark, readable on white."""
    return [to_hex(colormaps["viridis_r"](0.12 + 0.88 * i / max(count - 1, 1))) for i in range(count)]


def png(study: Study, colors: Mapping[str, str], figure: Figure) -> bytes:
    """Return the figure as PNG: all panels below its title and legend."""
    columns = max(len(row) for row in figure.rows)
    width = WIDTH * max(columns, 2)
    title = textwrap.wrap(figure.title, int(width * 8.7))
    handles = _handles(study, colors, figure)
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    per_row = max(1, min(len(handles), int(width / (0.75 + 0.08 * longest))))
    head = 0.27 * len(title) + 0.35 + 0.23 * -(-len(handles) // per_row)
    height = LOW if len(figure.rows) > MANY_ROWS else HEIGHT
    total = head + height * len(figure.rows)
    with matplotlib.rc_context(RC):
        canvas = Canvas(figsize=(width, total), dpi=DPI)
        # Fixed margins in inches: Matplotlib's constrained layout takes three times as long.
        canvas.subplots_adjust(
            left=0.75 / width, right=1 - 0.2 / width, bottom=0.65 / total, top=1 - (head + 0.3) / total,
            wspace=0.95 / (width / columns - 0.95), hspace=0.95 / (height - 0.95),
        )  # fmt: skip
        for r, row in enumerate(figure.rows):
            for c, panel in enumerate(row):
                _draw(canvas.add_subplot(len(figure.rows), columns, r * columns + c + 1), study, colors, row, panel)
        canvas.legend(
            handles=handles, title="\n".join(title), title_fontproperties={"size": 13, "weight": "bold"},
            alignment="left", loc="upper left", ncols=per_row, frameon=False, handlelength=2.6,
        )  # fmt: skip
        drawn, out = FigureCanvasAgg(canvas), io.BytesIO()
        drawn.draw()
    picture = Image.fromarray(np.asarray(drawn.buffer_rgba())).convert("RGB")
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(out, format="png", dpi=(DPI, DPI))
    return out.getvalue()


def _handles(study: Study, colors: Mapping[str, str], figure: Figure) -> list[Line2D]:
    shown = list(keys(study, colors, figure).items())
    points = all(line.marker for line in figure.lines)
    look: dict[str, Any] = {"linestyle": "", "marker": "o"} if points else {"linewidth": 2.2}
    handles = [Line2D([], [], color=color, label=" ".join(name.split()), **look) for name, color in shown[:MOST_KEYS]]
    if len(shown) > MOST_KEYS:
        handles.append(Line2D([], [], color=GRAY, label=f"and {len(shown) - MOST_KEYS} others"))
    modalities = [m for m in study.modalities if any(line.modality == m for line in figure.lines)]
    if len(modalities) > 1:
        handles += [Line2D([], [], color=INK, linestyle=_style(study, m), label=m) for m in modalities]
    return handles


def _style(study: Study, modality: str) -> Any:
    dashes = DASHES[study.modalities.index(modality) % len(DASHES)] if modality in study.modalities else ()
    return (0, dashes) if dashes else "-"


def _draw(axes: Axes, study: Study, colors: Mapping[str, str], row: Sequence[Panel], panel: Panel) -> None:
    axes.set_title(textwrap.fill(panel.title, 50))
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)
    runs = sum(line.role == "run" for line in panel.lines)
    for line in panel.lines:
        _draw_line(axes, line, line.color or colors.get(line.arm, INK), _style(study, line.modality), runs)
    _set_x(axes, panel)
    panels = [p for p in row if p.shared] if panel.shared else [panel]
    values = np.concatenate([line.y for p in panels for line in p.lines] or [np.zeros(0)])
    values = values[np.isfinite(values) & (values > (0 if panel.log else -math.inf))]
    if not len(values):
        return
    low, high = float(values.min()), float(values.max())
    if panel.log:
        pad = max((high / low) ** 0.06, 1.08)
        low, high = low / pad, high * pad * 1.1
    else:
        high = max(float(np.fmin(high, panel.top)), low)
        pad = max(0.05 * (high - low), 0.02)
        low, high = low - pad, high + pad
    if panel.log and high / low > FEWEST_LOG_RATIO:
        axes.set_yscale("log")
        _log_ticks(axes.yaxis, low, high)
    else:
        axes.locator_params("y", nbins=6, steps=TICK_STEPS)
        axes.yaxis.set_major_formatter(tick)
    axes.set_ylim(low, high)


def _draw_line(axes: Axes, line: Line, color: str, style: Any, runs: int) -> None:
    many, gray = runs > MANY_LINES, color == GRAY
    if line.role in CALCULATED:
        axes.plot(line.x, line.y, color=color, linewidth=1.3, linestyle=(0, (1, 1.4)), zorder=2)
    elif line.marker:
        face = "white" if line.marker == "D" else color
        axes.plot(line.x, line.y, line.marker, color=color, markersize=6, mew=1.4, mfc=face, zorder=2.5)
    else:
        axes.plot(
            line.x, line.y, color=color, linestyle=style, solid_capstyle="round",
            linewidth=2.2 if line.thick else 0.7 if many or gray else 0.9,
            alpha=1 if line.thick else 0.5 if runs < 4 * MANY_LINES else 0.3,
            zorder=4 if line.thick else 1.9 if gray else 2.5,
        )  # fmt: skip
    if line.diverged:
        size, edge = (6, 1.4) if many else (9, 2.2)
        axes.plot(line.x[-1:], line.y[-1:], "x", color=color, markersize=size, mew=edge, clip_on=False)


def _set_x(axes: Axes, panel: Panel) -> None:
    if panel.ticks:
        axes.set_xlim(-0.6, len(panel.ticks) - 0.4)
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        axes.grid(False, axis="x")
        return
    # Set ticks at measured values, not at the x values of fits.
    at = np.unique(np.concatenate([line.x for line in panel.lines if line.role != "fit"] or [np.ones(1)]))
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


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 60 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(tick)


def tick(value: float, _position: float = 0) -> str:
    """Format a value on an axis: 0.003, 1e-4, 250, 1.5k, 2.4M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 1e-3 else f"{value:g}".replace("e+", "e")
