"""What the first probe of somebody else's model says: one line, and a warning where a modality has no tokens."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Collection, Mapping, Sequence

import torch.distributed as dist

from mmqk.monitors.third_party.boundary import Section
from mmqk.monitors.third_party.layers import Layers
from mmqk.store.formatting import percent, plain
from mmqk.store.tags import parsed_tag


def is_first_rank() -> bool:
    """Whether this process is the one that says and writes things."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def introduction(
    layers: Layers,
    tokens: Mapping[str, int],
    sections: Sequence[Section],
    seconds: float,
    gaps: Sequence[float],
    every_n_steps: int,
) -> str:
    """The line: layers seen of how many, tokens by modality, cost, and what was left out.

    Args:
        layers: what was seen.
        tokens: of each modality.
        sections: what each call told.
        seconds: of the probe.
        gaps: seconds between optimizer steps so far.
        every_n_steps: between probes.
    """
    cost = f"probe {plain(1000 * seconds)} ms"
    if gaps:
        share = seconds / statistics.median(gaps)
        cost += f", {percent(share, 3)} of a step, {percent(share / every_n_steps)} of training"
    said = [
        _layers_line(layers, sections),
        "tokens " + ", ".join(f"{n} {name}" for name, n in tokens.items()),
        cost,
    ]
    return "mmqk: " + " · ".join(said + _notes(sections))


# What a module or an addition gives, by layer but for the last.
SERIES = (
    "attn_in_norm", "q_raw_norm", "k_raw_norm", "q_weight_gain", "k_weight_gain", "attn_out_norm", "mlp_out_norm",
    "resid_norm", "final_norm",
)  # fmt: skip


def missing_series(found: Collection[str], names: Collection[str]) -> str:
    """Which series beyond the attention call are not there, or only for some layers; empty where all are.

    Args:
        found: tags.
        names: of the modalities.
    """
    by_statistic: dict[str, set[int | None]] = {}
    for tag in map(parsed_tag, found):
        if tag.modality in names:
            by_statistic.setdefault(tag.statistic, set()).add(tag.layer)
    layers = len(by_statistic.get("q_norm", ()))
    absent = [name for name in SERIES if name not in by_statistic]
    partly = [
        f"{name} of {layers - len(there)} of {layers} layers"
        for name in SERIES
        if (there := by_statistic.get(name)) and name != "final_norm" and len(there) < layers
    ]
    return (
        f" · not found: {', '.join(absent + partly)} (an adapter names their modules)"
        if absent + partly
        else ""
    )


def warn_of_absent(tokens: Mapping[str, int]) -> None:
    """A share of 0 % (or 100 %) is more often a wrong range than a batch without the others."""
    absent = [name for name, n in tokens.items() if not n]
    if absent:
        warnings.warn(
            f"mmqk: no token of the first probe is {' or '.join(absent)}, {sum(tokens.values())} are others: "
            "check the ranges or the function given as modality",
            stacklevel=5,
        )


def _layers_line(layers: Layers, sections: Sequence[Section]) -> str:
    seen = len(layers.numbers)
    if not layers.of and any(section.call for section in sections):
        return "no attention call could be measured"
    if not layers.of:
        return (
            "no attention call seen: torch's scaled_dot_product_attention and flex_attention are, flash_attn's, and "
            "transformers' dense one"
        )
    line = f"attention of {seen} of {layers.of} layers seen"
    if layers.hidden:
        line += f", not that of {', '.join(layers.hidden)}: no maximum here is one over all layers"
    return line


def _notes(sections: Sequence[Section]) -> list[str]:
    """Which calls were left out, and which have no weights, with the reason, once for each reason."""
    reasons: dict[str, list[str]] = {}
    for section in sections:
        if section.cross and section.left_out is None:
            reasons.setdefault("cross-attention seen", []).append(section.path)
        if section.left_out is not None:
            reasons.setdefault(f"left out ({section.left_out})", []).append(section.path)
        elif section.no_weights is not None:
            reasons.setdefault(f"without entropy, mass and rank ({section.no_weights})", []).append(
                section.path
            )
    return [
        f"{why}: {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        for why, paths in reasons.items()
    ]
