"""Curves of runs: means of per-step values, thinned series, medians over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mmqk.lab.page.figure import Line
from mmqk.lab.runs import EMPTY, Run, Series, aligned
from mmqk.lab.verdicts.study import Study

# A line has at most POINTS points. If the lines of a panel (in the first figure, of all panels) would have more than
# ALL_POINTS points, they are thinned further, but not below FEWEST points. A page with 300 runs is then below 5 MB.
POINTS, ALL_POINTS, FEWEST = 120, 14_000, 16


def points_a_line(lines: int) -> int:
    """Return how many points each of ``lines`` lines may have."""
    return min(POINTS, max(FEWEST, ALL_POINTS // max(lines, 1)))


def thinned(series: Series, points: int) -> Series:
    """Return a series of at most ``points`` points: the lowest and the highest of each interval, and both ends.

    Spikes are kept, because nothing is averaged.
    """
    steps, values = series
    if len(steps) <= points:
        return series
    bins = max(1, (points - 2) // 2)
    indices = {0, len(steps) - 1}
    for part in np.array_split(np.arange(len(steps)), bins):
        finite = part[np.isfinite(values[part])]
        if len(finite):
            indices |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
        indices |= {int(part[-1])} if len(finite) < len(part) else set()
    at = np.array(sorted(indices))
    return steps[at], values[at]


def finite(series: Series) -> Series:
    """Return a series without its non-finite values."""
    steps, values = series
    keep = np.isfinite(values)
    return steps[keep], values[keep]


def binned(series: Series, width: int) -> Series:
    """Return the means of a series over ``width`` steps, at the middle of each bin, without non-finite values."""
    steps, values = finite(series)
    if width <= 1 or not len(steps):
        return steps, values
    index = np.unique((steps - 1) // width, return_inverse=True)[1]
    count = np.bincount(index)
    return np.bincount(index, steps) / count, np.bincount(index, values) / count


def bin_width(study: Study, points: int = POINTS) -> int:
    """Return the number of steps over which each point of a per-step curve is averaged; all curves use this
    number."""
    return max(1, math.ceil(max((run.last_step for run in study.runs), default=1) / points))


def reduced(statistic: str, reduce: Callable, modality: str) -> Callable[[Run], Series]:
    """Return a function that returns a statistic of a run, reduced over layers, without its non-finite values."""
    return lambda run: finite(run.combined(statistic, reduce, modality))


def arm_lines(
    study: Study, arms: Sequence[str], modality: str, series: Callable[[Run], Series], points: int = POINTS
) -> tuple[Line, ...]:
    """Return a thin line per run and the median of each arm, up to the last step that all its runs reached.

    Each line is thinned to at most ``points`` points (`thinned`).
    """
    lines: list[Line] = []
    for arm in arms:
        curves = [(run, *series(run)) for run in study.of_arm(arm)]
        curves = [(run, steps, values) for run, steps, values in curves if len(steps)]
        for run, steps, values in curves:
            x, y = _as_line((steps, values), points)
            diverged = run.status.status == "diverged"
            alone = len(curves) == 1
            lines.append(Line(arm, modality, run.seed, x, y, alone=alone, diverged=diverged, run=run.name))
        if len(curves) > 1:
            median = median_over([(s, v) for _, s, v in curves])
            if len(median[0]):
                lines.append(Line(arm, modality, None, *_as_line(median, points), role="median"))
    return tuple(lines)


def _as_line(series: Series, points: int) -> tuple[NDArray, NDArray]:
    steps, values = thinned(series, points)
    return steps.astype(float), values


def median_over(series: Sequence[Series]) -> Series:
    """Return the median of several series at their common steps."""
    if not series:
        return EMPTY
    steps, table = aligned(series)
    return (steps, np.median(table, axis=0)) if len(steps) else EMPTY


def bound_lines(study: Study, arms: Sequence[str], modality: str) -> tuple[Line, ...]:
    """Return the bound of QK-Norm on the logits, √head_dim·g² with the gains g of each step, largest over layers."""
    lines = []
    for arm in arms:
        series = [run.combined("attn_logit_bound", np.max) for run in study.of_arm(arm)]
        median = median_over([s for s in series if len(s[0])])
        if len(median[0]):
            lines.append(Line(arm, modality, None, *_as_line(median, POINTS), role="bound"))
    return tuple(lines)


def layer_lines(
    study: Study, arm: str, statistic: str, modality: str, colors: Callable[[int], Sequence[str]]
) -> tuple[Line, ...]:
    """Return a line per layer: the largest value of a statistic, median over the runs of an arm that measured the
    layer, at the steps that all of them have."""
    runs = study.of_arm(arm)
    found = {tag.layer for run in runs for tag in run.tags.values() if tag.statistic == statistic}
    layers = sorted(layer for layer in found if layer is not None)
    lines = []
    for layer, color in zip(layers, colors(len(layers)), strict=True):
        series = [run.combined(statistic, np.max, modality, layer) for run in runs]
        median = median_over([one for one in series if len(one[0])])
        if len(median[0]):
            x, y = _as_line(median, POINTS)
            name = f"layer {layer}"
            lines.append(Line(arm, modality, None, x, y, "median", layer, color=color, group=name))
    return tuple(lines)
