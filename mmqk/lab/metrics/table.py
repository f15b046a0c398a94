"""All metrics by the name that a claim uses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache

from mmqk.lab.metrics.late import late_failure, late_rise, time_of_failure
from mmqk.lab.metrics.losses import final_log_z, final_loss, log_z_series
from mmqk.lab.metrics.metric import End, FamilyMetric, Measured, Metric, alone
from mmqk.lab.metrics.probes import (
    EARLY_SHARE,
    deviation_series,
    entropy_series,
    growth_series,
    logit_mean_series,
    logit_series,
    mass_other_series,
    norm_product_series,
    norm_series,
    norms_over_alignment,
    probed,
    slope_of,
    weight_growth_series,
)
from mmqk.lab.metrics.rates import (
    dose_response,
    first_diverging_lr,
    first_unstable_lr,
    lr_sensitivity,
)
from mmqk.lab.metrics.scaling import logit_extrapolation
from mmqk.lab.metrics.stability import (
    WARNINGS,
    alarm_lead_time,
    diverged,
    grad_norm_spike_score,
    spike_rate,
    spike_score,
    time_of_divergence,
)
from mmqk.lab.runs.load import Run, Series
from mmqk.store import UserError


def _loss(label: str, name: str) -> Metric:
    """Return the metric that measures the final value of a loss series of one modality."""

    def measure(run: Run, modality: str | None = None) -> float:
        return final_loss(run, modality or "", name).value

    def series(run: Run, modality: str | None = None) -> Series:
        return run.series(f"{name}/{modality}")

    return Metric(label, "nats", "linear", "high", measure, series, by_modality=True)


def _of_failures(label: str, unit: str, measure: Callable[[Run, str | None], float], worst: End) -> Metric:
    """Return a metric that has no series and whose value in a diverged run is exact, not a bound."""
    return Metric(label, unit, "linear", worst, measure, alone(measure), counts_failures=True)


METRICS = {
    "largest_attention_logit": probed("largest attention logit", logit_series),
    "logit_growth": probed("growth of the largest attention logit", growth_series),
    "attention_entropy": probed("attention entropy", entropy_series, "nats", "linear", "low"),
    "attention_mass_other": probed(
        "attention mass on other modalities", mass_other_series, "", "linear", "low"
    ),
    "logit_mean": probed("mean attention logit", logit_mean_series),
    "logit_offset": probed("offset between modalities", deviation_series("attn_logit_offset_var")),
    "logit_spread": probed("spread within a modality", deviation_series("attn_logit_spread_var")),
    "final_loss": _loss("final loss", "loss"),
    "final_excess": _loss("final excess", "excess"),
    "final_log_z": Metric(
        "final log Z", "nats", "linear", "high", final_log_z, log_z_series, by_modality=True
    ),
    "final_norm": probed("last-layer output norm", norm_series("final_norm")),
    "q_norm": probed("query norm", norm_series("q_norm")),
    "k_norm": probed("key norm", norm_series("k_norm")),
    "qk_norm_product": probed("product of query and key norm", norm_product_series),
    "resid_norm": probed("residual norm", norm_series("resid_norm")),
    "norms_over_alignment": probed("power of q and k over their alignment", norms_over_alignment),
    "weight_growth": probed("growth of W_q and W_k", weight_growth_series, "per 1,000 steps", "linear"),
    "logit_slope": slope_of("growth rate of the largest attention logit", "attn_logit_absmax"),
    "final_norm_slope": slope_of("growth rate of the last-layer output norm", "final_norm"),
    "q_norm_slope": slope_of("growth rate of the query norm", "q_norm"),
    "k_norm_slope": slope_of("growth rate of the key norm", "k_norm"),
    "resid_norm_slope": slope_of("growth rate of the residual norm", "resid_norm"),
    "early_final_norm_slope": slope_of(
        "early growth rate of the last-layer output norm", "final_norm", 0.0, EARLY_SHARE
    ),
    "early_logit_slope": slope_of(
        "early growth rate of the largest attention logit", "attn_logit_absmax", 0.0, EARLY_SHARE
    ),
    "spike_score": _of_failures("spike score", "% of steps", spike_score, "high"),
    "grad_norm_spike_score": _of_failures(
        "spike score of the gradient norm", "% of steps", grad_norm_spike_score, "high"
    ),
    "spike_rate": _of_failures("spike rate", "per 10,000 steps", spike_rate, "high"),
    "diverged": _of_failures("divergence", "", diverged, "high"),
    "time_of_divergence": _of_failures("time to divergence", "of the run", time_of_divergence, "low"),
    "late_failure": _of_failures("late failure", "", late_failure, "high"),
    "late_rise": _of_failures("late rise of the loss", "", late_rise, "high"),
    "time_of_failure": _of_failures("time to failure", "of the run", time_of_failure, "low"),
    "alarm_lead_time": _of_failures("lead time of the first warning", "steps", alarm_lead_time, "low"),
}
_EXTRAPOLATION = "predicted divided by actual largest logit of the held-out largest model"
FAMILY_METRICS = {
    "lr_sensitivity": FamilyMetric(
        "learning-rate sensitivity", "nats", "linear", "high", lr_sensitivity, True
    ),
    "first_diverging_lr": FamilyMetric(
        "first diverging learning rate", "", "log", "low", first_diverging_lr, True
    ),
    "first_unstable_lr": FamilyMetric(
        "first unstable learning rate", "", "log", "low", first_unstable_lr, True
    ),
    "logit_extrapolation": FamilyMetric(_EXTRAPOLATION, "", "log", "high", logit_extrapolation),
}
DOSE = ("dose_response", "dose_monotonicity")
# Metrics of a whole run.
WITHOUT_MODALITY = (
    "diverged", "time_of_divergence", "late_failure", "time_of_failure", "grad_norm_spike_score",
)  # fmt: skip
_CALL = re.compile(r"(\w+)\(([^()]*)\)")


@cache
def find_metric(name: str) -> tuple[Metric | FamilyMetric, str | None]:
    """Return the metric and the modality that a claim names.

    Examples of names: ``q_norm/image``; ``alarm_lead_time(growth)/text`` (one kind of warning);
    ``dose_response(q_norm/image)`` or ``dose_response(q_norm/image, data.dial.entropy.image)`` (a metric of one run
    along an axis).

    Raises:
        UserError: no metric has this name, the metric needs a modality and the name has none, or the name has a
            modality that the metric does not take.
    """
    if match := _CALL.match(name):
        return _called(name, match[1], [part.strip() for part in match[2].split(",")], name[match.end() :])
    base, _, modality = name.partition("/")
    metric: Metric | FamilyMetric | None = METRICS.get(base) or FAMILY_METRICS.get(base)
    if metric is None:
        names = ", ".join([*METRICS, *FAMILY_METRICS, *(f"{dose}(METRIC)" for dose in DOSE)])
        raise UserError(f"metric {name!r} of a claim is unknown: use one of {names}")
    if isinstance(metric, Metric) and metric.by_modality and not modality:
        raise UserError(f"metric {name!r} of a claim needs a modality: write for example {base}/text")
    if modality and base in WITHOUT_MODALITY:
        raise UserError(f"metric {name!r} of a claim has no modality: write {base}")
    return metric, modality or None


def _called(name: str, base: str, given: list[str], rest: str) -> tuple[Metric | FamilyMetric, str | None]:
    if base == "alarm_lead_time" and (not rest or rest.startswith("/")):
        if unknown := [alarm for alarm in given if alarm not in WARNINGS]:
            raise UserError(
                f"metric {name!r} of a claim names the alarm {unknown[0]!r}: use one of {', '.join(WARNINGS)}"
            )

        def lead(run: Run, modality: str | None = None) -> float:
            return alarm_lead_time(run, modality, given)

        label = f"lead time of the first warning ({', '.join(given)})"
        return _of_failures(label, "steps", lead, "low"), rest[1:] or None
    if base not in DOSE or rest or not 1 <= len(given) <= 2:
        raise UserError(
            f"metric {name!r} of a claim is unknown: only alarm_lead_time(ALARM), dose_response(METRIC, AXIS) and"
            " dose_monotonicity(METRIC, AXIS) have arguments in brackets"
        )
    inner, modality = find_metric(given[0])
    if isinstance(inner, FamilyMetric):
        raise UserError(
            f"metric {name!r} of a claim: {given[0]} is a metric of a family: give a metric of one run"
        )
    return _dose(base, inner, given[1] if len(given) == 2 else ""), modality


def _dose(base: str, inner: Metric, axis: str) -> FamilyMetric:
    slope = base == "dose_response"

    def response(run: Run, modality: str | None) -> float:
        if run.status.status == "diverged" and not inner.counts_failures:
            return math.inf if inner.worst == "high" else -math.inf
        return inner.on_scale(inner.measure(run, modality)) if run.status.finished else math.nan

    def compute(runs: Sequence[Run], modality: str | None = None) -> Measured:
        return dose_response(runs, lambda run: response(run, modality), axis, slope)

    per = axis or "the axis"
    if not slope:
        return FamilyMetric(f"monotonicity of the {inner.label} in {per}", "", "linear", inner.worst, compute)
    unit = f"{'log' if inner.scale == 'log' else inner.unit} per unit of {per}".strip()
    return FamilyMetric(f"slope of the {inner.label} on {per}", unit, "linear", inner.worst, compute)
