"""The numbers of a figure, before anything is drawn: what a CSV holds and a panel shows."""

from __future__ import annotations

import csv
import functools
import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmqk.analysis.runs import EMPTY, Run, Series
from mmqk.analysis.study import Study

POINTS = 120


@dataclass(frozen=True)
class Line:
    """A curve of one run (role "seed"), of an arm's median over seeds, or of an arm's QK-Norm bound.

    Attributes:
        alone: the only run of its arm, and so drawn like a median.
        diverged: the run was stopped where the line ends.
    """

    arm: str
    modality: str
    seed: int | None
    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    role: Literal["seed", "median", "bound"] = "seed"
    alone: bool = False
    diverged: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes: steps against a statistic.

    Attributes:
        statistic: its name in the CSV.
        title: the modality, as a rule.
        ylabel: with its unit.
        log: logarithmic values.
        top: nothing above is drawn; NaN for no such limit.
        right: label and factor of a second scale on the right.
    """

    statistic: str
    title: str
    ylabel: str
    lines: tuple[Line, ...]
    log: bool = False
    top: float = math.nan
    right: tuple[str, float] | None = None


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
class Figure:
    """Panels with a title that says what they show.

    Attributes:
        name: of its files.
        reading: one sentence, from the numbers.
        caption: how to read it.
        rows: the panels; those of a row share their y-axis.
        arms: for the legend.
        modalities: for the legend.
    """

    name: str
    reading: str
    caption: str
    rows: tuple[tuple[Panel | HeatMap, ...], ...]
    arms: tuple[str, ...]
    modalities: tuple[str, ...]

    @property
    def panels(self) -> list[Panel | HeatMap]:
        """All of them, row by row."""
        return [panel for row in self.rows for panel in row]

    def csv(self) -> str:
        """The plotted numbers, one a line; the seed of a line over several is "median"."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["statistic", "arm", "modality", "seed", "layer", "step", "value"])
        for panel in self.panels:
            if isinstance(panel, HeatMap):
                for layer, row in enumerate(panel.values):
                    for step, value in zip(panel.steps, row, strict=True):
                        cells = [panel.statistic, panel.arm, panel.modality, "median", layer]
                        writer.writerow([*cells, _cell(step), _cell(value)])
                continue
            for line in panel.lines:
                statistic = "attn_logit_bound" if line.role == "bound" else panel.statistic
                seed = "median" if line.seed is None else line.seed
                for step, value in zip(line.steps, line.values, strict=True):
                    writer.writerow([statistic, line.arm, line.modality, seed, "", _cell(step), _cell(value)])
        return out.getvalue()


def _cell(value: float) -> str:
    return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"


def binned(series: Series, width: int) -> Series:
    """A series by means over ``width`` steps, at the middle of each bin; non-finite values are left out."""
    steps, values = series
    keep = np.isfinite(values)
    steps, values = steps[keep], values[keep]
    if width <= 1 or not len(steps):
        return steps, values
    index = np.unique((steps - 1) // width, return_inverse=True)[1]
    count = np.bincount(index)
    return np.bincount(index, steps) / count, np.bincount(index, values) / count


def bin_width(study: Study) -> int:
    """Steps a point of a per-step curve stands for, one number for the whole study."""
    return max(1, math.ceil(max((run.last_step for run in study.runs), default=1) / POINTS))


def arm_lines(
    study: Study, arms: Sequence[str], modality: str, series: Callable[[Run], Series]
) -> tuple[Line, ...]:
    """A thin line a seed and the median of each arm, up to the last step that all its seeds reached."""
    lines: list[Line] = []
    for arm in arms:
        found = [(run, *series(run)) for run in study.of_arm(arm)]
        found = [(run, steps, values) for run, steps, values in found if len(steps)]
        for run, steps, values in found:
            lines.append(
                Line(
                    arm,
                    modality,
                    run.seed,
                    steps.astype(float),
                    values,
                    alone=len(found) == 1,
                    diverged=run.status.status == "diverged",
                )
            )
        if len(found) > 1:
            steps, values = median_over([(s, v) for _, s, v in found])
            if len(steps):
                lines.append(Line(arm, modality, None, steps.astype(float), values, role="median"))
    return tuple(lines)


def median_over(series: Sequence[Series]) -> Series:
    """The median of several series over the steps that all of them have."""
    if not series:
        return EMPTY
    steps = series[0][0]
    for other, _ in series[1:]:
        steps = np.intersect1d(steps, other)
    if not len(steps):
        return EMPTY
    table = np.stack([values[np.searchsorted(at, steps)] for at, values in series])
    return steps, np.median(table, axis=0)


def bound_lines(study: Study, arms: Sequence[str], modality: str) -> tuple[Line, ...]:
    """The bound of QK-Norm on the logits, √head_dim·g² with the gains of the time, largest over layers."""
    lines = []
    for arm in arms:
        series = [run.combined("attn_logit_bound", np.max) for run in study.of_arm(arm)]
        steps, values = median_over([s for s in series if len(s[0])])
        if len(steps):
            lines.append(Line(arm, modality, None, steps.astype(float), values, role="bound"))
    return tuple(lines)


def layer_map(study: Study, arm: str, statistic: str, modality: str) -> tuple[NDArray, NDArray] | None:
    """(steps, values of shape (L, steps)): a statistic's largest by layer, median over an arm's seeds.

    The steps are those at which every seed measured something; the median is over the seeds that have the layer
    there, NaN where none has. None without such a step.
    """
    runs: list[dict[int, list[Series]]] = []
    for run in study.of_arm(arm):
        by_layer: dict[int, list[Series]] = {}
        for name, tag in run.tags.items():
            query = tag.pair[0] if tag.pair else tag.modality
            if (
                tag.statistic == statistic
                and tag.layer is not None
                and tag.head is None
                and query == modality
            ):
                by_layer.setdefault(tag.layer, []).append(run.series(name))
        if by_layer:
            runs.append(by_layer)
    if not runs:
        return None
    # Steps of one run are joined, as a pair is absent from probes without its tokens; those of unlike runs are not,
    # or the end of the map would be of the seeds that lived longest.
    unions = [np.unique(np.concatenate([at for row in run.values() for at, _ in row])) for run in runs]
    steps = functools.reduce(np.intersect1d, unions)
    if not len(steps):
        return None
    layers = sorted(set().union(*runs))
    stacked = np.full((len(runs), len(layers), len(steps)), np.nan)
    for table, by_layer in zip(stacked, runs, strict=True):
        for row, layer in zip(table, layers, strict=True):
            for at, values in by_layer.get(layer, []):
                _, here, there = np.intersect1d(steps, at, return_indices=True)
                row[here] = np.fmax(row[here], _worst(values[there]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a cell that no seed has
        return steps.astype(float), np.nanmedian(stacked, axis=0)


def _worst(values: NDArray) -> NDArray:
    """With infinity for what is not a number."""
    return np.where(np.isnan(values), np.inf, values)
