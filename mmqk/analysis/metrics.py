"""What a claim measures: functions of one run, named in the grid.

A name is a metric of the table below, with ``/modality`` where it goes by modality:
``largest_attention_logit``, ``largest_attention_logit/text`` (text queries), ``final_loss/image``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mmqk.analysis.runs import Run, Series
from mmqk.store import UserError

LAST_PROBES = 3
LOSS_WINDOW = 50
LEARNT_NATS = 0.1
# Modalities of each kind of sequence in data.mix; a kind that is not here holds the one of its own name.
MODALITIES_OF = {"pair": ("text", "image")}


BySeries = Callable[[Run, str | None], Series]


@dataclass(frozen=True)
class Metric:
    """A number of a run.

    Attributes:
        label: how a sentence names it.
        unit: empty for a pure number.
        scale: "log" when effects are ratios, "linear" when they are differences.
        worst: which end is the bad one; what is not a number counts as that.
        measure: the function; infinite when the run's last value is not finite, NaN when it has none.
        series: the series over steps that it is the end of.
        by_modality: it needs a modality.
    """

    label: str
    unit: str
    scale: Literal["log", "linear"]
    worst: Literal["high", "low"]
    measure: Callable[[Run, str | None], float]
    series: BySeries
    by_modality: bool = False

    def on_scale(self, value: float) -> float:
        """The value on the scale on which effects are differences."""
        if self.scale == "linear":
            return value
        return math.log(value) if value > 0 else math.nan

    def worst_seen(self, run: Run, modality: str | None) -> float:
        """The worst finite value of the whole run, NaN if it has none."""
        values = self.series(run, modality)[1]
        values = values[np.isfinite(values)]
        if not len(values):
            return math.nan
        return float(values.max() if self.worst == "high" else values.min())


def _end(series: Series, worst: float) -> float:
    """Median of the last three probes; ``worst`` where the last one is not finite, NaN without any."""
    values = series[1][-LAST_PROBES:]
    if not len(values):
        return math.nan
    return (
        float(np.median(np.where(np.isfinite(values), values, worst))) if np.isfinite(values[-1]) else worst
    )


def logit_series(run: Run, modality: str | None = None) -> Series:
    """Largest absolute attention logit over layers, heads and modality pairs, by probe."""
    return run.combined("attn_logit_absmax", np.max, modality)


def growth_series(run: Run, modality: str | None = None) -> Series:
    """`logit_series` over its first value."""
    steps, values = logit_series(run, modality)
    return steps, values / values[:1] if len(values) else values


def entropy_series(run: Run, modality: str | None = None) -> Series:
    """Attention entropy of the layer where it is lowest, in nats, by probe."""
    return run.combined("attn_entropy", np.min, modality)


def norm_series(statistic: str) -> BySeries:
    """Mean of a norm by probe: over tokens in each layer and modality, and over these with equal weight."""

    def series(run: Run, modality: str | None = None) -> Series:
        return run.combined(statistic, np.mean, modality)

    return series


def largest_attention_logit(run: Run, modality: str | None = None) -> float:
    """`logit_series` at the end of the run, the median of the last three probes.

    For a run that diverged, the end is where it was stopped.
    """
    return _end(logit_series(run, modality), math.inf)


def attention_entropy(run: Run, modality: str | None = None) -> float:
    """`entropy_series` at the end of the run, the median of the last three probes."""
    return _end(entropy_series(run, modality), -math.inf)


@dataclass(frozen=True)
class FinalLoss:
    """A loss at the end of a run, in nats a token.

    Attributes:
        value: infinite when it ended so, NaN when none was measured.
        held_out: on held-out data at the last step, or the mean of the last 50 training steps.
    """

    value: float
    held_out: bool


def final_loss(run: Run, modality: str, series: str = "loss") -> FinalLoss:
    """The loss of a modality at the end: held-out where the run completed and its last step measured it.

    With ``series`` "excess" it is the loss over that of a model that knows the source.
    """
    steps, values = run.series(f"val_{series}/{modality}")
    if len(steps) and 0 < steps[-1] == run.status.step and run.status.status == "completed":
        return FinalLoss(math.inf if math.isnan(values[-1]) else float(values[-1]), True)
    training = run.series(f"{series}/{modality}")[1][-LOSS_WINDOW:]
    if not len(training):
        return FinalLoss(math.nan, False)
    return FinalLoss(float(np.where(np.isnan(training), math.inf, training).mean()), False)


def initial_loss(run: Run, modality: str) -> float:
    """The loss of a modality at initialisation: held-out at step 0, or else the first training step."""
    steps, values = run.series(f"val_loss/{modality}")
    if len(steps) and steps[0] == 0:
        return float(values[0])
    first = run.series(f"loss/{modality}")[1][:1]
    return float(first[0]) if len(first) else math.nan


def unigram_entropy(run: Run, modality: str) -> float:
    """What token frequencies and the form of a sequence give, on held-out data; NaN when not measured."""
    values = run.series(f"val_unigram/{modality}")[1][:1]
    return float(values[0]) if len(values) else math.nan


def best_loss(run: Run, modality: str) -> float:
    """The lowest loss of the run, held-out after step 0 or a 50-step training mean: what it ever reached."""
    steps, held_out = run.series(f"val_loss/{modality}")
    training = run.series(f"loss/{modality}")[1]
    training = training[np.isfinite(training)]
    window = min(LOSS_WINDOW, len(training))
    means = np.convolve(training, np.ones(window) / window, mode="valid") if window else training
    seen = np.concatenate([held_out[(steps > 0) & np.isfinite(held_out)], means])
    return float(seen.min()) if len(seen) else math.nan


def learnt(run: Run, modality: str) -> bool:
    """Whether the run ever got 0.1 nat below what token frequencies and the form of a sequence give, or,
    where that was not measured, below the loss at initialisation."""
    floor = unigram_entropy(run, modality)
    if math.isnan(floor):
        floor = initial_loss(run, modality)
    return best_loss(run, modality) < floor - LEARNT_NATS


def is_trained(run: Run, modality: str) -> bool:
    """Whether the run trains this modality: it has a loss, the data mix holds it, its weight is above 0.

    The special tokens around an image belong to the text, but an image alone does not train it.
    """
    if not len(run.series(f"loss/{modality}")[0]):
        return False
    mix = run.setting("data.mix")
    if isinstance(mix, Mapping):
        kinds = [kind for kind, share in mix.items() if share > 0]
        if not any(modality in MODALITIES_OF.get(kind, (kind,)) for kind in kinds):
            return False
    weight = run.setting(f"loss.weights.{modality}", 1.0)
    return not isinstance(weight, int | float) or weight > 0


def _final_loss(run: Run, modality: str | None = None) -> float:
    return final_loss(run, modality or "").value


def _final_excess(run: Run, modality: str | None = None) -> float:
    return final_loss(run, modality or "", "excess").value


def _excess_series(run: Run, modality: str | None = None) -> Series:
    return run.series(f"excess/{modality}")


def _loss_series(run: Run, modality: str | None = None) -> Series:
    return run.series(f"loss/{modality}")


def _probed(label: str, series: BySeries) -> Metric:
    def measure(run: Run, modality: str | None = None) -> float:
        return _end(series(run, modality), math.inf)

    return Metric(label, "", "log", "high", measure, series)


METRICS = {
    "largest_attention_logit": _probed("largest attention logit", logit_series),
    "logit_growth": _probed("growth of the largest attention logit", growth_series),
    "attention_entropy": Metric(
        "attention entropy", "nats", "linear", "low", attention_entropy, entropy_series
    ),
    "final_loss": Metric("final loss", "nats", "linear", "high", _final_loss, _loss_series, True),
    "final_excess": Metric("final excess", "nats", "linear", "high", _final_excess, _excess_series, True),
    "final_norm": _probed("last-layer output norm", norm_series("final_norm")),
    "q_norm": _probed("query norm", norm_series("q_norm")),
    "k_norm": _probed("key norm", norm_series("k_norm")),
    "resid_norm": _probed("residual norm", norm_series("resid_norm")),
}


def find_metric(name: str) -> tuple[Metric, str | None]:
    """The metric that a claim names, and the modality it asks for.

    Raises:
        UserError: there is none of that name, or it needs a modality.
    """
    base, _, modality = name.partition("/")
    if base not in METRICS:
        raise UserError(f"metric {name!r} of a claim is unknown: use one of {', '.join(METRICS)}")
    if METRICS[base].by_modality and not modality:
        raise UserError(f"metric {name!r} of a claim needs a modality: write {base}/text or the like")
    return METRICS[base], modality or None
