"""Defines the TensorBoard charts of a run: few tags, with all modalities in one chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mmqk.monitors import record
from mmqk.store import parsed_tag


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
# Statistics of the whole run, without modalities.
OF_RUN = ("loss", "grad_norm", "lr", "tokens_per_s", "alarms")
RUN_PAGE = {
    "Gradient norm": "grad_norm",
    "Alarms so far": "alarms",
    "Attention rank (min over layers)": "attn_rank/min",
    "Tokens per second": "tokens_per_s",
}

_CHARTS = [chart for charts in PAGES.values() for chart in charts]
_WHOLE = {name for chart in _CHARTS if chart.reducer is None for name in chart.statistics} | set(OF_RUN)


def over_layers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the tags of the charts: statistics by layer are reduced over layers, as in ``q_norm/image/max``.

    For two modalities these are at most 60 tags; metrics.jsonl has all values.
    """
    kept = {name: value for name, value in metrics.items() if _is_whole(name)}
    return kept | record.over_layers(metrics)


def _is_whole(name: str) -> bool:
    parsed = parsed_tag(name)
    return parsed.head is None and parsed.layer is None and parsed.statistic in _WHOLE


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
