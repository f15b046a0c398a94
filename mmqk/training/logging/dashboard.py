"""Defines the TensorBoard charts of a run: few tags, with all modalities in one chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mmqk.store import parsed_tag

# NumPy returns NaN if any value is NaN. With Python's max and min, the result would depend on the order of values.
REDUCERS: dict[str, Callable[[list[float]], Any]] = {"max": np.max, "min": np.min, "median": np.median}


class Chart(NamedTuple):
    """One chart of a page: statistics of all modalities, or of pairs of modalities.

    Attributes:
        title: Title of the chart.
        statistics: Names of the statistics.
        reducer: Reduction over layers; None for a statistic without layers.
    """

    title: str
    statistics: tuple[str, ...]
    reducer: str | None = None


PAGES: dict[str, tuple[Chart, ...]] = {
    "Norm competition": (
        Chart("Largest attention logit (max over layers)", ("attn_logit_absmax",), "max"),
        Chart("Attention entropy (median over layers)", ("attn_entropy",), "median"),
        Chart("Attention entropy (min over layers)", ("attn_entropy",), "min"),
        Chart("Query norm (max over layers)", ("q_norm",), "max"),
        Chart("Query norm (median over layers)", ("q_norm",), "median"),
        Chart("Key norm (max over layers)", ("k_norm",), "max"),
        Chart("Key norm (median over layers)", ("k_norm",), "median"),
        Chart("Value norm, not part of the logits (max over layers)", ("v_norm",), "max"),
        Chart("Last-layer output norm", ("final_norm",)),
        Chart("log Z", ("log_z",)),
        Chart("Loss, and its excess where the floor is known", ("loss", "excess")),
        Chart("Validation loss", ("val_loss",)),
    ),
    "Drift, competition, sharpening": (
        Chart("Attention, drift: mean logit (median over layers)", ("attn_logit_mean",), "median"),
        Chart("Attention, competition: variance between blocks (max)", ("attn_logit_offset_var",), "max"),
        Chart("Attention, sharpening: variance within blocks (max)", ("attn_logit_spread_var",), "max"),
        Chart("Output, drift: mean logit", ("out_logit_mean",)),
        Chart("Output, competition: mass on the wrong block", ("out_wrong_mass",)),
        Chart("Output, sharpening: log Z - log V - mean logit", ("out_logit_spread",)),
        Chart("Log alignment of queries and keys (max over layers)", ("logit_alignment",), "max"),
    ),
    "Blocks": (
        Chart("Residual norm (max over layers)", ("resid_norm",), "max"),
        Chart("Attention output (max over layers)", ("attn_out_norm",), "max"),
        Chart("MLP output (max over layers)", ("mlp_out_norm",), "max"),
    ),
}
# Statistics without modalities: by layer, and of the whole run.
OF_LAYER = {"attn_rank": "min", "qk_clip_logit": "max", "qk_clip_gamma": "min"}
OF_RUN = ("loss", "grad_norm", "lr", "tokens_per_s", "alarms")
RUN_PAGE = {
    "Gradient norm": "grad_norm",
    "Alarms so far": "alarms",
    "Attention rank (min over layers)": "attn_rank/min",
    "Tokens per second": "tokens_per_s",
}

_CHARTS = [chart for charts in PAGES.values() for chart in charts]
_BY_LAYER: dict[str, list[str]] = {statistic: [reducer] for statistic, reducer in OF_LAYER.items()}
for _chart in _CHARTS:
    if _chart.reducer is not None:
        for _name in _chart.statistics:
            _BY_LAYER.setdefault(_name, []).append(_chart.reducer)
_WHOLE = {name for chart in _CHARTS if chart.reducer is None for name in chart.statistics} | set(OF_RUN)


def over_layers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the tags of the charts: statistics by layer are reduced over layers, as in ``q_norm/image/max``.

    For two modalities these are at most 60 tags; metrics.jsonl has all values.
    """
    kept: dict[str, float] = {}
    layers: dict[str, list[float]] = {}
    for name, value in metrics.items():
        parsed = parsed_tag(name)
        if parsed.head is not None:
            continue
        if parsed.layer is None:
            if parsed.statistic in _WHOLE:
                kept[name] = value
        elif parsed.statistic in _BY_LAYER:
            layers.setdefault(name.rpartition("/")[0], []).append(value)
    for series, values in layers.items():
        for reducer in _BY_LAYER[series.split("/")[0]]:
            kept[f"{series}/{reducer}"] = float(REDUCERS[reducer](values))
    return kept


def custom_scalars(modalities: tuple[str, ...]) -> dict[str, dict[str, list]]:
    """Return the layout of the custom-scalars page: one chart per statistic with all modalities."""
    names = "|".join(modalities)

    def pattern(chart: Chart) -> str:
        end = "" if chart.reducer is None else f"/{chart.reducer}"
        return rf"^({'|'.join(chart.statistics)})(/({names})(-({names}))?)?{end}$"

    pages = {
        page: {chart.title: ["Multiline", [pattern(chart)]] for chart in charts}
        for page, charts in PAGES.items()
    }
    pages["Run"] = {title: ["Multiline", [f"^{name}$"]] for title, name in RUN_PAGE.items()}
    return pages
