"""The metrics that a claim can name, computed from the files of a run.

A name is a key of `METRICS` (metrics of one run) or `FAMILY_METRICS` (metrics of the runs of a family at one seed).
The suffix ``/modality`` selects one modality. Examples: ``largest_attention_logit``,
``largest_attention_logit/text`` (text queries), ``final_loss/image``, ``lr_sensitivity/text``.
`docs/metrics.md` lists all metrics.

probes        attention logits, entropy, norms and their slopes; the order in which the statistics of one run grew
outcomes      initial, best and final loss; divergence, late failure; diverged, stalled, regime not reached
families      learning-rate sensitivity, first unstable learning rate; extrapolation over model size
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import numpy as np

from mmqk.lab.metrics import outcomes, probes
from mmqk.lab.metrics.families import Measured, NotMeasured, first_unstable_lr, logit_extrapolation, lr_sensitivity
from mmqk.lab.metrics.probes import EARLY, SLOPE_FROM_SHARE, BySeries
from mmqk.lab.runs import Run, Series, once_per_run
from mmqk.store import UserError

Scale = Literal["log", "linear"]
End = Literal["high", "low"]


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
        ends: function that returns the series whose end the metric measures, if there is one.
        by_modality: whether the metric needs a modality.
        counts_failures: whether the value of a diverged run is exact; otherwise it is a bound.
    """

    measure: Callable[[Run, str | None], float]
    ends: BySeries | None = None
    by_modality: bool = False
    counts_failures: bool = False

    def series(self, run: Run, modality: str | None = None) -> Series:
        """Return the series whose end the metric measures; if there is none, the value at the last step of the run."""
        if self.ends is not None:
            return self.ends(run, modality)
        return np.array([run.last_step]), np.array([self.measure(run, modality)])

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
        compute: function that returns the number or raises `NotMeasured`. Its arguments are the runs, in any order,
            and a modality or None.
        of_rates: whether the metric measures the learning rates at which runs fail. If True, a run that learned
            nothing still counts, provided that a run at another learning rate learned, with the same seed and the
            same values on the other axes.
    """

    compute: Callable[[Sequence[Run], str | None], Measured]
    of_rates: bool = False

    def measured(
        self, runs: Sequence[Run], modality: str | None = None, planned: Collection[Mapping[str, Any]] = ()
    ) -> Measured:
        """Return the number, or NaN with the reason.

        Args:
            runs: verdict runs of one family at one seed, without selection runs.
            modality: the modality, if the metric has one.
            planned: the points of the grid; the number is NaN if a point has no run.
        """
        try:
            if not runs:
                raise NotMeasured("there are no runs")
            if len({run.seed for run in runs}) > 1:
                raise NotMeasured("the runs have several seeds: give the runs of one seed")
            for point in planned:
                if all(dict(run.point) != dict(point) for run in runs):
                    label = ", ".join(f"{name} {value}" for name, value in point.items())
                    raise NotMeasured(f"there is no run at {label}")
            return self.compute(runs, modality)
        except NotMeasured as why:
            return Measured(math.nan, str(why))

    def measure(self, runs: Sequence[Run], modality: str | None = None) -> float:
        """Return only the number; NaN if there is no value."""
        return self.measured(runs, modality).value


def probed(label: str, series: BySeries, unit: str = "", scale: Scale = "log", worst: End = "high") -> Metric:
    """Return the metric that measures the end of a series of probes: the median of the last three."""

    def measure(run: Run, modality: str | None = None) -> float:
        return probes.end_of(series(run, modality), math.inf if worst == "high" else -math.inf)

    return Metric(label, unit, scale, worst, measure, series)


def slope_of(label: str, statistic: str, start: float = SLOPE_FROM_SHARE, end: float = 1.0) -> Metric:
    """Return the metric that measures `norm_slope` in a window."""
    measure = partial(probes.norm_slope, statistic=statistic, start=start, end=end)
    return Metric(label, "per 1,000 steps", "linear", "high", measure)


def _loss(label: str, name: str) -> Metric:
    """Return the metric that measures the final value of a loss series of one modality."""

    def measure(run: Run, modality: str | None = None) -> float:
        return outcomes.final_loss(run, modality or "", name).value

    return Metric(label, "nats", "linear", "high", measure, lambda run, m: run.series(f"{name}/{m}"), by_modality=True)


METRICS = {
    "largest_attention_logit": probed("largest attention logit", probes.combined("attn_logit_absmax", np.max)),
    "attention_entropy": probed("attention entropy", probes.combined("attn_entropy", np.min), "nats", "linear", "low"),
    "attention_mass_other": probed("attention mass on other modalities", probes.mass_other_series, "", "linear", "low"),
    "logit_mean": probed("mean attention logit", probes.combined("attn_logit_mean", probes.root_mean_square)),
    "logit_offset": probed("offset between modalities", probes.deviation_series("attn_logit_offset_var")),
    "logit_spread": probed("spread within a modality", probes.deviation_series("attn_logit_spread_var")),
    "final_loss": _loss("final loss", "loss"),
    "final_excess": _loss("final excess", "excess"),
    "final_log_z": Metric("final log Z", "nats", "linear", "high", outcomes.final_log_z, outcomes.log_z_series, True),
    "loss_rise": Metric("rise of the held-out loss", "nats", "linear", "high", outcomes.loss_rise, by_modality=True),
    "final_norm": probed("last-layer output norm", probes.combined("final_norm")),
    "q_norm": probed("query norm", probes.combined("q_norm")),
    "k_norm": probed("key norm", probes.combined("k_norm")),
    "qk_norm_product": probed("product of query and key norm", probes.norm_product_series),
    "resid_norm": probed("residual norm", probes.combined("resid_norm")),
    "norms_over_alignment": probed("power of q and k over their alignment", probes.norms_over_alignment),
    "weight_growth": probed("growth of W_q and W_k", probes.weight_growth_series, "per 1,000 steps", "linear"),
    "logit_slope": slope_of("growth rate of the largest attention logit", "attn_logit_absmax"),
    "final_norm_slope": slope_of("growth rate of the last-layer output norm", "final_norm"),
    "q_norm_slope": slope_of("growth rate of the query norm", "q_norm"),
    "k_norm_slope": slope_of("growth rate of the key norm", "k_norm"),
    "resid_norm_slope": slope_of("growth rate of the residual norm", "resid_norm"),
    "early_final_norm_slope": slope_of("early growth rate of the last-layer output norm", "final_norm", *EARLY),
    "early_logit_slope": slope_of("early growth rate of the largest attention logit", "attn_logit_absmax", *EARLY),
    "grad_norm": Metric("gradient norm", "", "log", "high", outcomes.grad_norm),
    "diverged": Metric("divergence", "", "linear", "high", outcomes.diverged, counts_failures=True),
    "late_failure": Metric("late failure", "", "linear", "high", outcomes.late_failure, counts_failures=True),
    "late_rise": Metric("late rise of the loss", "", "linear", "high", outcomes.late_rise, counts_failures=True),
    "time_of_failure": Metric(
        "time to failure", "of the run", "linear", "low", outcomes.time_of_failure, counts_failures=True
    ),
}
FAMILY_METRICS = {
    "lr_sensitivity": FamilyMetric("learning-rate sensitivity", "nats", "linear", "high", lr_sensitivity, True),
    "first_unstable_lr": FamilyMetric("first unstable learning rate", "", "log", "low", first_unstable_lr, True),
    "logit_extrapolation": FamilyMetric(
        "predicted divided by actual largest logit of the held-out largest model", "", "log", "high",
        logit_extrapolation,
    ),
}  # fmt: skip
# Metrics of a whole run.
WITHOUT_MODALITY = ("grad_norm", "diverged", "late_failure", "time_of_failure")


@cache
def find_metric(name: str) -> tuple[Metric | FamilyMetric, str | None]:
    """Return the metric and the modality that a claim names.

    For example ``q_norm/image``.

    Raises:
        UserError: no metric has this name, the metric needs a modality and the name has none, or the name has a
            modality that the metric does not take.
    """
    base, _, modality = name.partition("/")
    metric: Metric | FamilyMetric | None = METRICS.get(base) or FAMILY_METRICS.get(base)
    if metric is None:
        names = ", ".join([*METRICS, *FAMILY_METRICS])
        raise UserError(f"metric {name!r} is unknown: use one of {names}")
    if isinstance(metric, Metric) and metric.by_modality and not modality:
        raise UserError(f"metric {name!r} needs a modality: write for example {base}/text")
    if modality and base in WITHOUT_MODALITY:
        raise UserError(f"metric {name!r} has no modality: write {base}")
    return metric, modality or None


@once_per_run
def metric_value(run: Run, name: str) -> float:
    """Return a metric of a run."""
    metric, modality = find_metric(name)
    assert isinstance(metric, Metric)
    return metric.measure(run, modality)
