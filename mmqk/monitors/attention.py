"""Raw attention logits and attention entropy, exact over all visible pairs, a chunk of queries at a time.

Shapes: B batch, H heads, T query tokens (C of them in a chunk), S key tokens, K head width, M modalities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmqk.monitors.reduce import Moments, moments, selection

# Entropy is left out where a row can see fewer keys than this: it is bounded by their number.
FEWEST_KEYS = 8
TAIL = 1e-3
CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class AttentionStatistics:
    """Of one layer. Logits are raw: after scale and QK-Norm, before cap and mask.

    Attributes:
        count: visible pairs by query and key modality, over all heads, (M, M).
        max: largest signed logit, (M, M); -inf where there is no pair.
        absmax: largest absolute logit, (M, M).
        p999: absolute logit that one pair in a thousand exceeds or equals, (M, M).
        entropy: of the attention rows that see at least 8 keys, nats, by query modality.
    """

    count: Tensor
    max: Tensor
    absmax: Tensor
    p999: Tensor
    entropy: Moments


def visible_pairs(valid_BT: Tensor, document_BT: Tensor | None = None, window: int = 0) -> Tensor:
    """(B, T, S) bool: pairs that causal attention uses, padding left out on both sides; window 0 is none."""
    T = valid_BT.shape[1]
    causal_TS = torch.ones(T, T, dtype=torch.bool, device=valid_BT.device).tril()
    if window:
        causal_TS = causal_TS.triu(1 - window)
    visible_BTS = causal_TS & valid_BT[:, :, None] & valid_BT[:, None, :]
    if document_BT is not None:
        visible_BTS = visible_BTS & (document_BT[:, :, None] == document_BT[:, None, :])
    return visible_BTS


def attention_statistics(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    scale: float,
    modality_BT: Tensor,
    visible_BTS: Tensor,
    n_modalities: int,
    softcap: float | None = None,
) -> AttentionStatistics:
    """Exact statistics of the attention logits ``scale * q.k`` over every visible pair.

    Args:
        q_BHTK: queries as they enter the dot product: after QK-Norm and RoPE.
        k_BHSK: keys likewise.
        scale: factor on the dot product.
        modality_BT: of each token.
        visible_BTS: from `visible_pairs`.
        n_modalities: M.
        softcap: applied before the softmax of the entropy; the logits reported are before it.
    """
    q, k = q_BHTK.float(), k_BHSK.float()
    B, H, T, _ = q.shape
    M = n_modalities
    everywhere_BT = torch.ones_like(modality_BT, dtype=torch.bool)
    of_MBT = selection(modality_BT, everywhere_BT, M)
    pair_counts = torch.stack(
        [
            (visible_BTS & of_MBT[a][:, :, None] & of_MBT[b][:, None, :]).sum()
            for a in range(M)
            for b in range(M)
        ]
    )
    count_MM = (pair_counts * H).view(M, M)
    tail = [max(1, round(n * TAIL)) for n in count_MM.flatten().tolist()]
    largest: list[list[Tensor]] = [[] for _ in range(M * M)]
    signed: list[list[Tensor]] = [[] for _ in range(M * M)]
    entropy: Moments | None = None

    chunk = max(1, CHUNK_ELEMENTS // (B * H * T))
    for start in range(0, T, chunk):
        rows = slice(start, start + chunk)
        logits_BHCS = scale * q[:, :, rows] @ k.transpose(-1, -2)
        visible_B1CS = visible_BTS[:, None, rows]
        for a in range(M):
            for b in range(M):
                pairs_B1CS = visible_B1CS & of_MBT[a][:, None, rows, None] & of_MBT[b][:, None, None, :]
                values_N = logits_BHCS.masked_select(pairs_B1CS)
                if len(values_N):
                    i = a * M + b
                    signed[i].append(values_N.max())
                    magnitude_N = values_N.abs()
                    largest[i].append(magnitude_N.topk(min(tail[i], len(values_N))).values)
        row_entropy_BHC = _entropy(logits_BHCS, visible_B1CS, softcap)
        enough_BC = visible_BTS[:, rows].sum(-1) >= FEWEST_KEYS
        part = moments(row_entropy_BHC, of_MBT[:, :, rows] & enough_BC)
        entropy = part if entropy is None else entropy + part

    assert entropy is not None
    none = q.new_tensor(-torch.inf)
    tops = [
        torch.cat(parts).topk(n).values if parts else none.view(1)
        for parts, n in zip(largest, tail, strict=True)
    ]
    return AttentionStatistics(
        count=count_MM,
        max=torch.stack([torch.stack(parts).max() if parts else none for parts in signed]).view(M, M),
        absmax=torch.stack([top[0] for top in tops]).view(M, M),
        p999=torch.stack([top[-1] for top in tops]).view(M, M),
        entropy=entropy,
    )


def _entropy(logits_BHCS: Tensor, visible_B1CS: Tensor, softcap: float | None) -> Tensor:
    """Entropy of each softmax row, nats. Shifted by the row's maximum, or large logits would cancel."""
    if softcap is not None:
        logits_BHCS = softcap * torch.tanh(logits_BHCS / softcap)
    hidden = logits_BHCS.masked_fill(~visible_B1CS, -torch.inf)
    # A row that sees nothing (padding) has maximum -inf; it is not selected afterwards.
    shifted = logits_BHCS - hidden.amax(-1, keepdim=True)
    weight = torch.where(visible_B1CS, shifted.exp(), 0.0)
    total = weight.sum(-1)
    mean = torch.where(visible_B1CS, weight * shifted, 0.0).sum(-1) / total
    return total.log() - mean
