"""The classes of metrics. A metric is a number of one run, or of the runs of one family at one seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from mmqk.lab.runs import Run, Series

BySeries = Callable[[Run, str | None], Series]
Scale = Literal["log", "linear"]
End = Literal["high", "low"]


class Measured(NamedTuple):
    """A measured number, or NaN with the reason.

    Attributes:
        value: the number; if ``towards`` is not 0, a bound.
        why: why the value is NaN or a bound; else empty.
        towards: 1 if the true value is at least ``value``, -1 if it is at most ``value``, 0 if it is ``value``.
    """

    value: float
    why: str = ""
    towards: int = 0


@dataclass(frozen=True)
class _Quantity:
    """The fields of every metric.

    Attributes:
        label: the name of the metric in a sentence.
        unit: the unit; empty for a pure number.
        scale: "log" when effects are ratios, "linear" when they are differences.
        worst: the bad end of the scale; a value that is not finite ranks at this end.
    """

    label: str
    unit: str
    scale: Scale
    worst: End

    def on_scale(self, value: float) -> float:
        """Return the value itself if the scale is linear, its logarithm if the scale is log; NaN if there is no
        logarithm."""
        if self.scale == "linear":
            return value
        return math.log(value) if value > 0 else math.nan


@dataclass(frozen=True)
class Metric(_Quantity):
    """A metric with one value for each run.

    Attributes:
        measure: computes the number; infinite if the last value of the run is not finite, NaN if there is no value.
        series: function that returns the series whose end the metric measures; if there is no such series, the result
            of `alone`.
        by_modality: whether the metric needs a modality.
        counts_failures: whether the value of a diverged run is exact; otherwise it is a bound.
    """

    measure: Callable[[Run, str | None], float]
    series: BySeries
    by_modality: bool = False
    counts_failures: bool = False

    def worst_seen(self, run: Run, modality: str | None) -> float:
        """Return the worst finite value of the whole run; NaN if no value is finite."""
        values = self.series(run, modality)[1]
        values = values[np.isfinite(values)]
        if not len(values):
            return math.nan
        return float(values.max() if self.worst == "high" else values.min())


@dataclass(frozen=True)
class FamilyMetric(_Quantity):
    """A metric with one value for each family and seed, from the runs at all values of the family's axes.

    Attributes:
        compute: function that returns the number. Its arguments are the runs, in any order, and a modality or None.
        of_rates: whether the metric measures the learning rates at which runs fail. If True, a run that learned
            nothing still counts, provided that a run at another learning rate learned, with the same seed and the
            same values on the other axes.
    """

    compute: Callable[[Sequence[Run], str | None], Measured]
    of_rates: bool = False

    def measured(
        self,
        runs: Sequence[Run],
        modality: str | None = None,
        planned: Collection[Mapping[str, Any]] = (),
    ) -> Measured:
        """Return the number, or NaN with the reason.

        Args:
            runs: verdict runs of one family at one seed, without selection runs.
            modality: the modality, if the metric has one.
            planned: the points of the grid; the number is NaN if a point has no run.
        """
        if not runs:
            return Measured(math.nan, "there are no runs")
        if len({run.seed for run in runs}) > 1:
            return Measured(math.nan, "the runs have several seeds: give the runs of one seed")
        for point in planned:
            if all(dict(run.point) != dict(point) for run in runs):
                label = ", ".join(f"{name} {value}" for name, value in point.items())
                return Measured(math.nan, f"there is no run at {label}")
        return self.compute(runs, modality)

    def measure(self, runs: Sequence[Run], modality: str | None = None) -> float:
        """Return only the number; NaN if there is no value."""
        return self.measured(runs, modality).value


def alone(measure: Callable[[Run, str | None], float]) -> BySeries:
    """Return a function for the field ``series`` of a metric that has no series. The function returns one
    point: the last step of the run and the value of the metric."""

    def series(run: Run, modality: str | None = None) -> Series:
        return np.array([run.last_step]), np.array([measure(run, modality)])

    return series


def warmup_steps(run: Run) -> int:
    """Return the number of warm-up steps of the learning rate; 0 if not recorded."""
    return run.setting("optim.warmup_steps", 0)


def planned_steps(run: Run) -> int:
    """Return the configured length of the run in optimizer steps; if not recorded, its last step."""
    return run.setting("trainer.max_steps", 0) or run.last_step
