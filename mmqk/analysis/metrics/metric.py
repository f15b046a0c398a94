"""What a metric is: a number of one run, or of the runs of one family at one seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from mmqk.analysis.runs.load import Run, Series

BySeries = Callable[[Run, str | None], Series]
Scale = Literal["log", "linear"]
End = Literal["high", "low"]


class Measured(NamedTuple):
    """A number, or NaN and one sentence that says why there is none.

    Attributes:
        value: the number; where ``towards`` is not 0, the nearest that it can be.
        why: what is the matter with it, empty for nothing.
        towards: 1 where the true value lies at ``value`` or above, -1 at or below, 0 where it is the value.
    """

    value: float
    why: str = ""
    towards: int = 0


@dataclass(frozen=True)
class Metric:
    """A number of a run.

    Attributes:
        label: how a sentence names it.
        unit: empty for a pure number.
        scale: "log" when effects are ratios, "linear" when they are differences.
        worst: which end is the bad one; what is not a number counts as that.
        measure: the function; infinite when the run's last value is not finite, NaN when it has none.
        series: the series over steps that it is the end of; of a number that is no end, that number alone.
        by_modality: it needs a modality.
        counts_failures: what it says of a run that diverged is the value itself, not a bound that the run
            would have gone beyond.
    """

    label: str
    unit: str
    scale: Scale
    worst: End
    measure: Callable[[Run, str | None], float]
    series: BySeries
    by_modality: bool = False
    counts_failures: bool = False

    def on_scale(self, value: float) -> float:
        """The value on the scale on which effects are differences."""
        return on_scale(self.scale, value)

    def worst_seen(self, run: Run, modality: str | None) -> float:
        """The worst finite value of the whole run, NaN if it has none."""
        values = self.series(run, modality)[1]
        values = values[np.isfinite(values)]
        if not len(values):
            return math.nan
        return float(values.max() if self.worst == "high" else values.min())


@dataclass(frozen=True)
class FamilyMetric:
    """A number of a family: of the runs of one arm over its axes, at one seed.

    Attributes:
        label: how a sentence names it.
        unit: empty for a pure number.
        scale: "log" when effects are ratios, "linear" when they are differences.
        worst: which end is the bad one.
        compute: the function of the runs, in any order, and a modality.
        by_modality: it needs a modality.
        of_rates: it is about the learning rates at which runs fail, so that a run that learnt nothing is part of it
            where another of the same seed and point learnt.
    """

    label: str
    unit: str
    scale: Scale
    worst: End
    compute: Callable[[Sequence[Run], str | None], Measured]
    by_modality: bool = False
    of_rates: bool = False

    def on_scale(self, value: float) -> float:
        """The value on the scale on which effects are differences."""
        return on_scale(self.scale, value)

    def measured(
        self,
        runs: Sequence[Run],
        modality: str | None = None,
        planned: Collection[Mapping[str, Any]] = (),
    ) -> Measured:
        """The number, or why there is none.

        Args:
            runs: of one family at one seed, learning-rate selection and replays left out.
            modality: where it goes by modality.
            planned: the points that the grid has: one of them without a run makes the number another one, so
                there is none. Runs alone cannot tell.
        """
        if not runs:
            return Measured(math.nan, "there are no runs")
        if len({run.seed for run in runs}) > 1:
            return Measured(math.nan, "the runs have several seeds: give those of one")
        for point in planned:
            if all(dict(run.point) != dict(point) for run in runs):
                said = ", ".join(f"{name} {value}" for name, value in point.items())
                return Measured(math.nan, f"there is no run at {said}")
        return self.compute(runs, modality)

    def measure(self, runs: Sequence[Run], modality: str | None = None) -> float:
        """The number alone, NaN where there is none."""
        return self.measured(runs, modality).value


def on_scale(scale: Scale, value: float) -> float:
    """The value, or its logarithm; NaN where it has none."""
    if scale == "linear":
        return value
    return math.log(value) if value > 0 else math.nan


def alone(measure: Callable[[Run, str | None], float]) -> BySeries:
    """The series of a number that is not the end of one: that number, at the run's last step."""

    def series(run: Run, modality: str | None = None) -> Series:
        return np.array([run.last_step]), np.array([measure(run, modality)])

    return series


def warmup_steps(run: Run) -> int:
    """Steps of learning-rate warm-up, 0 where not recorded."""
    value = run.setting("optim.warmup_steps", 0)
    return value if isinstance(value, int) else 0


def planned_steps(run: Run) -> int:
    """Length of the run in optimizer steps as configured; where not recorded, what it reached."""
    value = run.setting("trainer.max_steps", 0)
    return value if isinstance(value, int) and value > 0 else run.last_step
