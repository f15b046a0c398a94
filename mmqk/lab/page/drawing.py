"""A figure: lines in panels, their numbers as CSV, as JSON for the charts of a page, and as PNG; which arms the figures
show, and their colors.

Each arm has a color. If the arms are points of a few families, each family has a color, and its arms have shades of
it, which become darker along the axis. Of more arms than colors, those that no figure or claim names are gray.
"""

from __future__ import annotations

import io
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray
from PIL import Image

from mmqk.lab.formatting import TEMPLATES, short
from mmqk.lab.study import Study

STEP = "optimizer step"
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.6), (6, 1.5, 1, 1.5), (1, 1))  # by modality
INK = "#1b1f24"
RC = matplotlib.rc_params_from_file(TEMPLATES / "figure.mplstyle", use_default_template=False)
WIDTH, HEIGHT, LOW = 5.2, 3.2, 2.4  # of a panel in inches; LOW is the height in a figure of many rows
MANY_ROWS, MOST_KEYS, DPI = 5, 12, 130
# With this number of colors, the PNG of a line drawing is a third as large, without a visible difference.
COLORS = 192
# With more runs than this, the lines of single runs are thinner and paler.
MANY_LINES = 24
# An axis is linear if the ratio of its ends is smaller than this, because a log axis would have too few ticks.
FEWEST_LOG_RATIO = 5
FEW_ARMS, FIRST_ARMS_AT_MOST = 8, 6
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


# Arms and colors ----------------------------------------------------------------------------------------------------


def first_arms(study: Study) -> tuple[str, ...]:
    """Return the arms of the first figures: those that the grid lists, else those of its claims, else its first six;
    without a grid, all arms."""
    named = _crossed(study, study.named("hero"))
    claimed = _crossed(study, (arm for c in study.claims if c.decided for arm in c.compared))
    shown = set(shown_arms(study))
    rest = [name for name in study.arms if name not in shown][: FIRST_ARMS_AT_MOST if study.registered else None]
    return next((arms for names in (named, claimed, rest, study.arms) if (arms := measured(study, names))), ())


def shown_arms(study: Study) -> tuple[str, ...]:
    """Return the arms that the page shows without a verdict."""
    named = _crossed(study, study.named("shown"))
    return measured(study, named or [arm.name for arm in study.arms.values() if arm.block == "shown"])


def outcome_arms(study: Study) -> tuple[str, ...]:
    """Return the arms with runs whose outcomes the page draws: those that the grid lists, or those of the first
    figure."""
    named = first_arms(study) if study.report.get("outcomes") is True else _crossed(study, study.named("outcomes"))
    return measured(study, named)


def measured(study: Study, names: Iterable[str]) -> tuple[str, ...]:
    """Return the arms that have runs with metrics."""
    have = {run.arm for run in study.runs if run.tags}
    return tuple(name for name in names if name in have)


def _crossed(study: Study, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(arm.name for name in names for arm in study.arms_of(name)))


def families(study: Study) -> dict[str, list[str]]:
    """Return the arms by family, sorted by their points."""

    def order(name: str) -> list[tuple[float, str]]:
        point = study.arms[name].point.values()
        return [(value, "") if isinstance(value, int | float) else (math.inf, str(value)) for value in point]

    groups: dict[str, list[str]] = {}
    for arm in study.arms.values():
        groups.setdefault(arm.family or arm.name, []).append(arm.name)
    return {family: sorted(arms, key=order) for family, arms in groups.items()}


def arm_colors(study: Study) -> dict[str, str]:
    """Return one color per arm, the same on the whole page."""
    groups = families(study)
    # The palette is small: the arms of the first figures and of the claims get its colors first.
    claimed = _crossed(study, (name for claim in study.claims for name in claim.compared))
    first = dict.fromkeys([*first_arms(study), *outcome_arms(study), *claimed, *shown_arms(study), *study.arms])
    family_of = {arm: family for family, members in groups.items() for arm in members}
    few = len(groups) <= len(PALETTE)
    order = list(groups) if few else list(dict.fromkeys(family_of[arm] for arm in first))
    base = dict(zip(order, [*PALETTE, *MORE, *[GRAY] * len(order)], strict=False))
    colors: dict[str, str] = {}
    for family, arms in groups.items():
        for j, arm in enumerate(arms):
            pale = PALEST * (1 - j / (len(arms) - 1)) if len(arms) > 1 else 0.0
            red, green, blue = (c + (1 - c) * pale for c in to_rgb(base[family]))
            colors[arm] = GRAY if base[family] == GRAY else to_hex((red, green, blue)).upper()
    return colors


# Figures ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A curve or points of one run (role "run"), of the median over runs, or of an arm's QK-Norm bound.

    Attributes:
        alone: whether this is the only run of its arm, which is drawn like a median.
        diverged: whether the run diverged at the end of the line.
        run: name of the run; empty for a line over several runs.
        color: color of the line; empty for the color of the arm.
        marker: marker, if points are drawn instead of a line; else empty.
        group: name of the line in the legend; empty for the label of the arm.
    """

    arm: str
    modality: str
    seed: int | None
    x: NDArray[Any]
    y: NDArray[np.float64]
    role: Literal["run", "median", "bound"] = "run"
    layer: int | None = None
    alone: bool = False
    diverged: bool = False
    run: str = ""
    color: str = ""
    marker: str = ""
    group: str = ""

    @property
    def thick(self) -> bool:
        """Whether the line stands for its arm."""
        return self.role == "median" or self.alone


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a statistic against optimizer steps, or against ``xlabel``.

    Attributes:
        statistic: name of the statistic in the CSV.
        x: name of x in the CSV.
        top: upper limit of y; NaN for none.
        ticks: labels of x = 0, 1, 2, …, for categories.
    """

    statistic: str
    title: str
    ylabel: str
    lines: tuple[Line, ...]
    log: bool = False
    top: float = math.nan
    xlabel: str = STEP
    x: str = "step"
    xlog: bool = False
    ticks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """Panels with a title; `captions.yaml` has their captions.

    Attributes:
        name: name of its files.
        rows: the panels.
        like: the published figure to compare it with; empty if there is none.
        shared: whether the panels of a row share their y-axis.
    """

    name: str
    title: str
    rows: tuple[tuple[Panel, ...], ...]
    like: str = ""
    shared: bool = True

    @property
    def lines(self) -> list[Line]:
        """The lines of all panels."""
        return [line for row in self.rows for panel in row for line in panel.lines]

    def csv(self) -> str:
        """Return the plotted numbers, one per line, each x in the column of its quantity; the column ``run`` is empty
        for a median or a bound."""
        frames = []
        for panel in (panel for row in self.rows for panel in row):
            for line in panel.lines:
                cells = {
                    "statistic": "attn_logit_bound" if line.role == "bound" else panel.statistic,
                    "arm": line.arm,
                    "modality": line.modality,
                    "seed": line.seed if line.role == "run" else "median",
                    "layer": line.layer,
                    panel.x: [f"{x:.10g}" for x in line.x],
                    "value": [f"{y:.6g}" for y in line.y],
                    "run": line.run,
                }
                frames.append(pd.DataFrame(cells, dtype=object))
        return pd.concat(frames).to_csv(index=False, lineterminator="\n")


class Drawing:
    """A figure with the names and colors that the arms of a study have on a page: its legend, chart and PNG.

    Of more than eight arms, the legend names the families.
    """

    def __init__(self, study: Study, colors: Mapping[str, str], figure: Figure):
        self.study, self.colors, self.figure = study, colors, figure
        arms = {line.arm: study.arms.get(line.arm) for line in figure.lines if line.arm}
        many = len(arms) > FEW_ARMS
        self.names = {name: study.label(arm.family if arm and many else name) for name, arm in arms.items()}

    def group(self, line: Line) -> str:
        """Return the name of a line in the legend; empty if it has none."""
        return line.group or self.names.get(line.arm, "")

    def color(self, line: Line) -> str:
        return line.color or self.colors.get(line.arm, INK)

    def dashes(self, modality: str) -> tuple[float, ...]:
        names = self.study.modalities
        return DASHES[names.index(modality) % len(DASHES)] if modality in names else ()

    def style(self, modality: str) -> Any:
        return (0, self.dashes(modality)) if self.dashes(modality) else "-"

    def chart(self) -> str:
        """Return the panels as JSON for the script of the page, with five digits."""

        def line_data(line: Line) -> dict[str, Any]:
            bound = line.role == "bound"
            of = "QK-Norm bound" if bound else "median" if line.seed is None else f"seed {line.seed}"
            layer = "" if line.layer is None else f"layer {line.layer}"
            dashes = (1, 1.5) if bound else self.dashes(line.modality)
            return {
                "name": ", ".join(filter(None, (self.study.label(line.arm) or line.group, layer, of))),
                "group": self.group(line),
                "modality": line.modality,
                "seed": "" if layer else of,
                "color": self.color(line),
                "dash": [2 * length for length in dashes],
                "width": 2.4 if line.thick else 1.0,
                "marker": bool(line.marker),
                "at": [_short(x) for x in line.x],
                "is": [_short(y) for y in line.y],
            }

        def panel_data(panel: Panel) -> dict[str, Any]:
            lines = [line_data(line) for line in panel.lines if len(line.x)]
            names = {"title": panel.title, "y": panel.ylabel, "x": panel.xlabel, "ticks": panel.ticks}
            return {**names, "log": panel.log, "xlog": panel.xlog, "top": _short(panel.top), "lines": lines}

        panels = [panel_data(panel) for row in self.figure.rows for panel in row]
        return json.dumps(panels, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")

    def png(self) -> bytes:
        """Return the figure as PNG: all panels below its title and legend."""
        rows, columns = self.figure.rows, max(len(row) for row in self.figure.rows)
        width = WIDTH * max(columns, 2)
        title = textwrap.wrap(self.figure.title, int(width * 8.7))
        handles = self._handles()
        longest = max((len(str(handle.get_label())) for handle in handles), default=0)
        per_row = max(1, min(len(handles), int(width / (0.75 + 0.08 * longest))))
        head = 0.27 * len(title) + 0.35 + 0.23 * -(-len(handles) // per_row)
        height = LOW if len(rows) > MANY_ROWS else HEIGHT
        total = head + height * len(rows)
        with matplotlib.rc_context(RC):
            canvas = Canvas(figsize=(width, total), dpi=DPI)
            # Fixed margins in inches: Matplotlib's constrained layout takes three times as long.
            canvas.subplots_adjust(
                left=0.75 / width, right=1 - 0.2 / width, bottom=0.65 / total, top=1 - (head + 0.3) / total,
                wspace=0.95 / (width / columns - 0.95), hspace=0.95 / (height - 0.95),
            )  # fmt: skip
            for r, row in enumerate(rows):
                for c, panel in enumerate(row):
                    axes = canvas.add_subplot(len(rows), columns, r * columns + c + 1)
                    self._draw(axes, panel, row if self.figure.shared else [panel])
            canvas.legend(
                handles=handles, title="\n".join(title), title_fontproperties={"size": 13, "weight": "bold"},
                alignment="left", loc="upper left", ncols=per_row, frameon=False, handlelength=2.6,
            )  # fmt: skip
            drawn, out = FigureCanvasAgg(canvas), io.BytesIO()
            drawn.draw()
        picture = Image.fromarray(np.asarray(drawn.buffer_rgba())).convert("RGB")
        picture.quantize(COLORS, dither=Image.Dither.NONE).save(out, format="png", dpi=(DPI, DPI))
        return out.getvalue()

    def _handles(self) -> list[Line2D]:
        shown = list({name: self.color(line) for line in self.figure.lines if (name := self.group(line))}.items())
        points = all(line.marker for line in self.figure.lines)
        look: dict[str, Any] = {"linestyle": "", "marker": "o"} if points else {"linewidth": 2.2}
        named = [(" ".join(name.split()), color) for name, color in shown[:MOST_KEYS]]
        handles = [Line2D([], [], color=color, label=name, **look) for name, color in named]
        if len(shown) > MOST_KEYS:
            handles.append(Line2D([], [], color=GRAY, label=f"and {len(shown) - MOST_KEYS} others"))
        found = {line.modality for line in self.figure.lines}
        modalities = [modality for modality in self.study.modalities if modality in found]
        if len(modalities) > 1:
            handles += [Line2D([], [], color=INK, linestyle=self.style(m), label=m) for m in modalities]
        return handles

    def _draw(self, axes: Axes, panel: Panel, row: Sequence[Panel]) -> None:
        """Draw a panel; its y-axis covers the values of the panels ``row``."""
        axes.set_title(textwrap.fill(panel.title, 50))
        axes.set_xlabel(panel.xlabel)
        axes.set_ylabel(panel.ylabel)
        runs = sum(line.role == "run" for line in panel.lines)
        for line in panel.lines:
            self._draw_line(axes, line, runs)
        _set_x(axes, panel)
        values = np.concatenate([line.y for p in row for line in p.lines] or [np.zeros(0)])
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
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 60 else (1,)))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(low, high)
        axes.yaxis.set_major_formatter(short)

    def _draw_line(self, axes: Axes, line: Line, runs: int) -> None:
        color, many = self.color(line), runs > MANY_LINES
        if line.role == "bound":
            axes.plot(line.x, line.y, color=color, linewidth=1.3, linestyle=(0, (1, 1.4)), zorder=2)
        elif line.marker:
            axes.plot(line.x, line.y, line.marker, color=color, markersize=6, mew=1.4, zorder=2.5)
        else:
            axes.plot(
                line.x, line.y, color=color, linestyle=self.style(line.modality),
                linewidth=2.2 if line.thick else 0.7 if many else 0.9, solid_capstyle="round",
                alpha=1 if line.thick else 0.5 if runs < 4 * MANY_LINES else 0.3,
                zorder=4 if line.thick else 1.9 if color == GRAY else 2.5,
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
    at = np.unique(np.concatenate([line.x for line in panel.lines] or [np.ones(1)]))
    low, high = float(at[0]), float(at[-1])
    if panel.xlog:
        axes.set_xscale("log")
        pad = max((high / low) ** 0.06, 1.15)
        axes.set_xlim(low / pad, high * pad)
        apart = np.diff(np.log(at), prepend=-math.inf) > math.log(high / low) / 9
        axes.set_xticks(at[apart] if apart.sum() <= 9 else [low, high])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, 1.015 * max(high, 1.0 if panel.x == "step" else high))
    axes.xaxis.set_major_formatter(short)


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
