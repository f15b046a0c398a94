"""All metrics by the name that a claim uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from mmqk.lab.metrics.failures import (
    diverged,
    grad_norm_spike_score,
    late_failure,
    late_rise,
    spike_score,
    time_of_divergence,
    time_of_failure,
)
from mmqk.lab.metrics.families import (
    first_unstable_lr,
    logit_extrapolation,
    lr_sensitivity,
)
from mmqk.lab.metrics.losses import final_log_z, final_loss, log_z_series
from mmqk.lab.metrics.metric import End, FamilyMetric, Metric, alone
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
from mmqk.lab.runs import Run, Series
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
    "diverged": _of_failures("divergence", "", diverged, "high"),
    "time_of_divergence": _of_failures("time to divergence", "of the run", time_of_divergence, "low"),
    "late_failure": _of_failures("late failure", "", late_failure, "high"),
    "late_rise": _of_failures("late rise of the loss", "", late_rise, "high"),
    "time_of_failure": _of_failures("time to failure", "of the run", time_of_failure, "low"),
}
_EXTRAPOLATION = "predicted divided by actual largest logit of the held-out largest model"
FAMILY_METRICS = {
    "lr_sensitivity": FamilyMetric(
        "learning-rate sensitivity", "nats", "linear", "high", lr_sensitivity, True
    ),
    "first_unstable_lr": FamilyMetric(
        "first unstable learning rate", "", "log", "low", first_unstable_lr, True
    ),
    "logit_extrapolation": FamilyMetric(_EXTRAPOLATION, "", "log", "high", logit_extrapolation),
}
# Metrics of a whole run.
WITHOUT_MODALITY = (
    "diverged", "time_of_divergence", "late_failure", "time_of_failure", "grad_norm_spike_score",
)  # fmt: skip


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
        raise UserError(f"metric {name!r} of a claim is unknown: use one of {names}")
    if isinstance(metric, Metric) and metric.by_modality and not modality:
        raise UserError(f"metric {name!r} of a claim needs a modality: write for example {base}/text")
    if modality and base in WITHOUT_MODALITY:
        raise UserError(f"metric {name!r} of a claim has no modality: write {base}")
    return metric, modality or None

