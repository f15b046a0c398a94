"""Reduces tensors by modality. Shapes: B batch, H heads, T query tokens, S key tokens, M modalities.

A mean is stored as its count and sum, so that the parts of several chunks, heads or ranks add up exactly. An absent
modality has count 0.
"""

from __future__ import annotations

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
        count=selected_MBHT.sum(dim=(1, 2, 3)).float(),
        sum=torch.where(selected_MBHT, values, 0.0).sum(dim=(1, 2, 3)),
    )


def sum_of_squares(matrices: Tensor) -> Tensor:
    """Return the sum of squares of each matrix (last two axes). It makes no copy, and sums row by row, which is more
    accurate in fp32."""
    return torch.linalg.vector_norm(matrices, dim=-1).square().sum(-1)
