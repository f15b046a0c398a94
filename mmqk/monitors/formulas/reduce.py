"""Reduces tensors by modality, and measures the output softmax by modality of the target.

A mean is stored as its count and sum, so that the parts of several chunks, heads or ranks add up exactly. An absent
modality has count 0.

Shapes: B batch, H heads, T query tokens, S key tokens, V vocabulary, M modalities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class OutputStatistics:
    """Statistics by modality of the target.

    ``log_z = logit_mean + log V + logit_spread`` separates drift from sharpening.

    Attributes:
        log_z: log Z of the softmax, nats.
        logit_mean: mean logit over the vocabulary; a constant added to all logits changes only logit_mean and log_z.
        logit_spread: log Z - log V - mean logit; 0 for equal logits.
        block_log_z: log Z over the ids of one modality, for each modality.
        wrong_mass: probability of ids outside the target's modality.
    """

    log_z: Sums
    logit_mean: Sums
    logit_spread: Sums
    block_log_z: tuple[Sums, ...]
    wrong_mass: Sums


def output_statistics(
    logits_BTV: Tensor, target_modality_BT: Tensor, selected_MBT: Tensor, vocab_sizes: Mapping[str, int]
) -> OutputStatistics:
    """Return the statistics of the logits that the loss uses (after the final softcap).

    Args:
        logits_BTV: in fp32.
        target_modality_BT: modality of each position's target.
        selected_MBT: which targets belong to each modality, from `mmqk.monitors.formulas.reduce.selection`.
        vocab_sizes: number of ids of each modality, in id order.
    """
    mean_BT = logits_BTV.mean(-1)
    block_BTM = torch.stack([_log_z(part) for part in logits_BTV.split(list(vocab_sizes.values()), -1)], -1)
    log_z_BT = block_BTM.logsumexp(-1)
    target_block_BT = block_BTM.gather(-1, target_modality_BT[..., None])[..., 0]  # log Z of the target's modality
    log_v = math.log(logits_BTV.shape[-1])
    return OutputStatistics(
        log_z=sums(log_z_BT, selected_MBT),
        logit_mean=sums(mean_BT, selected_MBT),
        logit_spread=sums(log_z_BT - log_v - mean_BT, selected_MBT),
        block_log_z=tuple(sums(block_BTM[..., m], selected_MBT) for m in range(len(vocab_sizes))),
        wrong_mass=sums(-torch.expm1(target_block_BT - log_z_BT), selected_MBT),
    )


def _log_z(logits_BTV: Tensor) -> Tensor:
    """Return the logsumexp. The fused log_softmax takes half the time of `torch.logsumexp`."""
    return logits_BTV.amax(-1) - torch.log_softmax(logits_BTV, -1).amax(-1)
