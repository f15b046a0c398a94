"""Measures how unequal the channels of an activation are, by modality.

Shapes: B batch, T tokens, D channels, M modalities.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def channel_sums(x_BTD: Tensor, selected_MBT: Tensor) -> dict[str, Tensor]:
    """Return the sums over the selected tokens for `channel_statistics`; the sums of several batches can be added.

    Returns:
        ``square_MD``, the sum of x^2 by channel; ``kurtosis_M``, the sum over tokens of the kurtosis of x;
        ``count_M``, the number of tokens.
    """
    wide_BTD = x_BTD.detach().float()
    centered_BTD = wide_BTD - wide_BTD.mean(-1, keepdim=True)
    variance_BT = centered_BTD.square().mean(-1)
    kurtosis_BT = (centered_BTD.square().square().mean(-1) / variance_BT.square()).nan_to_num(0.0)
    # torch.where, because a product would spread a NaN to other modalities.
    square_MBTD = torch.where(selected_MBT[..., None], wide_BTD.square(), 0.0)
    return {
        "square_MD": square_MBTD.sum((1, 2)),
        "kurtosis_M": torch.where(selected_MBT, kurtosis_BT, 0.0).sum((1, 2)),
        "count_M": selected_MBT.sum((1, 2)).float(),
    }


def channel_statistics(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return four numbers for each modality, (M,) each, from the sums of `channel_sums`.

    ``rms``: root mean square over tokens and channels. ``kurtosis``: fourth central moment of the channels divided by
    their squared variance, mean over tokens; 3 for a normal distribution, about D if one channel dominates
    (Bondarenko et al. 2023, arXiv 2306.12929). ``channel_share``: the largest channel's share of the sum of squares,
    1 / D if all are equal (massive activations: Sun et al. 2024, arXiv 2402.17762). ``channel``: the index of the
    largest channel.
    """
    square_MD, count_M = sums["square_MD"], sums["count_M"]
    total_M = square_MD.sum(1)
    largest_M, channel_M = square_MD.max(1)
    return {
        "rms": (total_M / count_M / square_MD.shape[1]).sqrt(),
        "kurtosis": sums["kurtosis_M"] / count_M,
        "channel_share": largest_M / total_M,
        "channel": channel_M.float(),
    }
