"""The line that `attach` prints after the first probe, and its warning about modalities without tokens."""

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
    """Whether this process prints and writes files: the one with rank 0."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def introduction(
    layers: Layers,
    tokens: Mapping[str, int],
    sections: Sequence[Section],
    seconds: float,
    gaps: Sequence[float],
    every_n_steps: int,
) -> str:
    """The line: layers with measured attention, tokens by modality, cost of a probe, and calls that were left out.

    Args:
        layers: layers with and without measured attention.
        tokens: number of tokens of each modality.
        sections: the attention calls.
        seconds: duration of the probe.
        gaps: seconds between optimizer steps so far.
        every_n_steps: steps between probes.
    """
    cost = f"probe {plain(1000 * seconds)} ms"
    if gaps:
        share = seconds / statistics.median(gaps)
        cost += f", {percent(share, 3)} of a step, {percent(share / every_n_steps)} of training"
    parts = [
        _layers_line(layers, sections),
        "tokens " + ", ".join(f"{n} {name}" for name, n in tokens.items()),
        cost,
    ]
    return "mmqk: " + " · ".join(parts + _notes(sections))


# Statistics that need more than the attention calls; all but the last are by layer.
SERIES = (
    "attn_in_norm", "q_raw_norm", "k_raw_norm", "q_weight_gain", "k_weight_gain", "attn_out_norm", "mlp_out_norm",
    "resid_norm", "final_norm",
)  # fmt: skip


def missing_series(tags: Collection[str], names: Collection[str]) -> str:
    """Names the `SERIES` that were not measured, or not in all layers; empty if none is missing.

    Args:
        tags: the measured tags.
        names: names of the modalities.
    """
    by_statistic: dict[str, set[int | None]] = {}
    for tag in map(parsed_tag, tags):
        if tag.modality in names:
            by_statistic.setdefault(tag.statistic, set()).add(tag.layer)
    layers = len(by_statistic.get("q_norm", ()))
    absent = [name for name in SERIES if name not in by_statistic]
    partly = [
        f"{name} in {layers - len(measured)} of {layers} layers"
        for name in SERIES
        if (measured := by_statistic.get(name)) and name != "final_norm" and len(measured) < layers
    ]
    return (
        f" · not measured: {', '.join(absent + partly)} (pass an adapter that lists their modules)"
        if absent + partly
        else ""
    )


def warn_of_absent(tokens: Mapping[str, int]) -> None:
    """Warn of modalities without tokens: a wrong range is more likely than a batch without that modality."""
    absent = [name for name, n in tokens.items() if not n]
    if absent:
        warnings.warn(
            f"mmqk: no token of the first probe is {' or '.join(absent)} ({sum(tokens.values())} tokens are of other "
            "modalities): check the ranges or the function that attach gets as modality",
            stacklevel=5,
        )


def _layers_line(layers: Layers, sections: Sequence[Section]) -> str:
    seen = len(layers.numbers)
    if not layers.of and any(section.call for section in sections):
        return "no attention call could be measured"
    if not layers.of:
        return (
            "no attention call seen (attach sees torch's scaled_dot_product_attention, flex_attention and "
            "varlen_attn, flash_attn, and transformers' eager attention)"
        )
    line = f"attention of {seen} of {layers.of} layers seen"
    if layers.hidden:
        line += f", not that of {', '.join(layers.hidden)} (maxima over layers leave these out)"
    return line


def _notes(sections: Sequence[Section]) -> list[str]:
    """One note for each reason why calls were left out or have no weights."""
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
