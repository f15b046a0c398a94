"""Reduces statistics by layer to their maximum, median or minimum over layers, as in ``q_norm/image/max``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from mmqk.store.tags import parsed_tag


def _all(reducer: Callable[[Sequence[float]], float]) -> Callable[[Sequence[float]], float]:
    """Return a reducer that gives NaN if any value is NaN; Python's max would depend on the order of values."""
    return lambda values: math.nan if any(map(math.isnan, values)) else reducer(values)


REDUCERS = {"max": _all(max), "min": _all(min), "median": _all(statistics.median)}
# The reducers of each statistic by layer.
BY_LAYER = {
    "attn_logit_absmax": ("max",),
    "attn_entropy": ("median", "min"),
    "q_norm": ("max", "median"),
    "k_norm": ("max", "median"),
    "v_norm": ("max",),
    "attn_logit_mean": ("median",),
    "attn_logit_offset_var": ("max",),
    "attn_logit_spread_var": ("max",),
    "logit_alignment": ("max",),
    "resid_norm": ("max",),
    "attn_out_norm": ("max",),
    "mlp_out_norm": ("max",),
    "attn_rank": ("min",),
    "qk_clip_logit": ("max",),
    "qk_clip_gamma": ("min",),
}


def over_layers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the reductions over layers of the statistics in `BY_LAYER`; values by head are ignored."""
    layers: dict[str, list[float]] = {}
    for name, value in metrics.items():
        parsed = parsed_tag(name)
        if parsed.head is None and parsed.layer is not None and parsed.statistic in BY_LAYER:
            layers.setdefault(name.rpartition("/")[0], []).append(value)
    return {
        f"{series}/{reducer}": float(REDUCERS[reducer](values))
        for series, values in layers.items()
        for reducer in BY_LAYER[series.split("/")[0]]
    }
