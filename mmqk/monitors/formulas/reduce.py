"""Reduces tensors by modality and numbers over layers, and measures the output softmax by modality of the target.

A mean is stored as its count and sum, so that the parts of several chunks, heads or ranks add up exactly. An absent
modality has count 0.

Shapes: B batch, H heads, T tokens, V vocabulary, M modalities.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmqk.store.metrics import parse_tag


@dataclass(frozen=True)
class Sums:
    """Count and sum of one statistic for each modality, (M,) each, fp32."""

    count: Tensor
    sum: Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.count + other.count, self.sum + other.sum)

    @property
    def mean(self) -> Tensor:
        """Mean of each modality, (M,); NaN for an absent modality, whose count is 0."""
        return self.sum / self.count


def selection(modality_BT: Tensor, valid_BT: Tensor, n_modalities: int) -> Tensor:
    """Return (M, B, T) bool: the valid tokens of each modality. A token has at most one modality."""
    modality_M11 = torch.arange(n_modalities, device=modality_BT.device)[:, None, None]
    return (modality_BT == modality_M11) & valid_BT


def sums(values_BHT: Tensor, selected_MBT: Tensor) -> Sums:
    """Return, for each modality, the number and the sum of the selected values.

    Args:
        values_BHT: one value for each head and token; (B, T) if there is one value for each token.
        selected_MBT: True at the selected tokens of each modality.
    """
    values = values_BHT.float() if values_BHT.ndim == 3 else values_BHT.float()[:, None]
    selected_MBHT = selected_MBT[:, :, None].expand(-1, -1, values.shape[1], -1)
    # torch.where, since a product would spread a NaN from another modality's token.
    return Sums(
        count=selected_MBHT.sum(dim=(1, 2, 3)).float(), sum=torch.where(selected_MBHT, values, 0.0).sum(dim=(1, 2, 3))
    )


def sum_of_squares(matrices: Tensor) -> Tensor:
    """Return the sum of squares of each matrix (last two axes). It makes no copy, and sums row by row, which is more
    accurate in fp32."""
    return torch.linalg.vector_norm(matrices, dim=-1).square().sum(-1)


def kind_of(x: Tensor) -> str | None:
    """Return "NaN" or "infinite"; None if all values are finite."""
    if not x.is_floating_point() or torch.isfinite(x).all():
        return None
    return "NaN" if torch.isnan(x).any() else "infinite"


def output_statistics(
    logits_BTV: Tensor, target_modality_BT: Tensor, selected_MBT: Tensor, vocab_sizes: Mapping[str, int]
) -> tuple[dict[str, Sums], list[Sums]]:
    """Return the statistics of the logits that the loss uses (after the final softcap), by modality of the target.

    ``log_z = logit_mean + log V + logit_spread`` separates drift from sharpening.

    Args:
        logits_BTV: in fp32.
        target_modality_BT: modality of each position's target.
        selected_MBT: which targets belong to each modality, from `mmqk.monitors.formulas.reduce.selection`.
        vocab_sizes: number of ids of each modality, in id order.

    Returns:
        By name: out_log_z, the log Z of the softmax, nats; out_logit_mean over the vocabulary, which with log Z is all
        that a constant added to the logits changes; out_logit_spread, log Z - log V - mean logit, 0 for equal logits;
        out_wrong_mass, the probability of ids outside the target's modality. Then, for each modality, the log Z over
        its ids.
    """
    mean_BT = logits_BTV.mean(-1)
    block_BTM = torch.stack([log_z(part) for part in logits_BTV.split(list(vocab_sizes.values()), -1)], -1)
    log_z_BT = block_BTM.logsumexp(-1)
    target_block_BT = block_BTM.gather(-1, target_modality_BT[..., None])[..., 0]  # log Z of the target's modality
    log_v = math.log(logits_BTV.shape[-1])
    values = {
        "out_log_z": log_z_BT,
        "out_logit_mean": mean_BT,
        "out_logit_spread": log_z_BT - log_v - mean_BT,
        "out_wrong_mass": -torch.expm1(target_block_BT - log_z_BT),
    }
    by_name = {name: sums(values_BT, selected_MBT) for name, values_BT in values.items()}
    return by_name, [sums(block_BT, selected_MBT) for block_BT in block_BTM.unbind(-1)]


def log_z(logits_BTV: Tensor) -> Tensor:
    """Return the logsumexp. The fused log_softmax takes half the time of `torch.logsumexp`."""
    return logits_BTV.amax(-1) - torch.log_softmax(logits_BTV, -1).amax(-1)


# Reducers over layers, and the statistics that they reduce.
REDUCERS: dict[str, tuple[Callable[[list[float]], float], str]] = {
    "max": (
        max,
        "attn_logit_absmax q_norm k_norm v_norm attn_logit_offset_var attn_logit_spread_var logit_alignment resid_norm"
        " attn_out_norm mlp_out_norm qk_clip_logit",
    ),
    "median": (statistics.median, "attn_entropy q_norm k_norm attn_logit_mean"),
    "min": (min, "attn_entropy attn_rank qk_clip_gamma"),
}


def over_layers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the reductions over layers of the statistics in `REDUCERS`; values by head are ignored."""
    layers: dict[str, list[float]] = {}
    for name, value in metrics.items():
        parsed = parse_tag(name)
        if parsed.head is None and parsed.layer is not None:
            layers.setdefault(name.rpartition("/")[0], []).append(value)
    return {  # with a NaN, Python's max would depend on the order of values
        f"{series}/{name}": math.nan if any(map(math.isnan, values)) else float(reduce(values))
        for name, (reduce, reduced) in REDUCERS.items()
        for series, values in layers.items()
        if series.partition("/")[0] in reduced.split()
    }
