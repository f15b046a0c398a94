"""Raw attention logits and attention entropy, exact over all visible pairs, a chunk of queries at a time.

Shapes: B batch, H heads, T query tokens (C of them in a chunk), S key tokens, K head width, M modalities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmqk.monitors.pairs import Pairs
from mmqk.monitors.reduce import Moments, moments

TAIL = 1e-3
_BY_QUERY = (
    "mean", "variance", "offset_variance", "spread_variance", "entropy", "block_entropy", "within_entropy",
)  # fmt: skip


@dataclass(frozen=True)
class AttentionStatistics:
    """Of one layer, over all heads. Logits are raw: after scale and QK-Norm, before cap and mask.

    What is said of a row (a query) leaves out rows that see fewer than 8 keys. A row's logits are
    ``z_ij = mean_i + offset_i,block(j) + rest_ij``: the mean is a gauge that softmax cannot see, the offsets move
    attention between key modalities, and the rest sharpens it within one. Variances add up exactly:
    ``variance = offset_variance + spread_variance``. So do entropies: ``entropy = block_entropy + within_entropy``.

    Attributes:
        count: visible pairs by query and key modality, (M, M).
        max: largest signed logit, (M, M); -inf where there is no pair.
        absmax: largest absolute logit, (M, M).
        tail: the largest absolute logits of each query and key modality, in that order: of at least one pair in a
            thousand, over all ranks if the pairs are `collective`.
        mean: of a row's logits, by query modality.
        variance: of a row's logits, by query modality.
        offset_variance: of its block offsets, each weighted by its keys, by query modality.
        spread_variance: of its logits about the mean of their own block, by query modality.
        offset: of a key block's mean from the row's mean, by query modality, one for each key modality.
        mass: attention weight on a key block, by query modality, one for each key modality.
        entropy: of the attention row, nats, by query modality.
        block_entropy: of the row's masses on the key blocks, nats, by query modality.
        within_entropy: what is left, the entropy within each block weighted by its mass, nats.
    """

    count: Tensor
    max: Tensor
    absmax: Tensor
    tail: list[Tensor]
    mean: Moments
    variance: Moments
    offset_variance: Moments
    spread_variance: Moments
    offset: tuple[Moments, ...]
    mass: tuple[Moments, ...]
    entropy: Moments
    block_entropy: Moments
    within_entropy: Moments


def exceeded_by_one_in_a_thousand(tail_N: Tensor, count: Tensor) -> Tensor:
    """The logit that one pair in a thousand of `count` exceeds or equals."""
    place = (count * TAIL).round().clamp(min=1, max=len(tail_N)).long() - 1
    return tail_N.sort(descending=True).values[place]


@dataclass(frozen=True)
class _Rows:
    """What each query of a chunk sees; (B, H, C), and with one more axis (B, H, C, M) by key modality."""

    mean: Tensor
    variance: Tensor
    offset_variance: Tensor
    spread_variance: Tensor
    entropy: Tensor
    block_entropy: Tensor
    within_entropy: Tensor
    offset_BHCM: Tensor
    mass_BHCM: Tensor


def attention_statistics(
    q_BHTK: Tensor, k_BHSK: Tensor, scale: float, pairs: Pairs, softcap: float | None = None
) -> AttentionStatistics:
    """Exact statistics of the attention logits ``scale * q.k`` over every visible pair.

    Args:
        q_BHTK: queries as they enter the dot product: after QK-Norm and RoPE.
        k_BHSK: keys likewise.
        scale: factor on the dot product.
        pairs: who sees whom, and the modalities.
        softcap: applied before the softmax of the entropy; the logits reported are before it.
    """
    q, k = q_BHTK.float(), k_BHSK.float()
    H, M = q.shape[1], pairs.n_modalities
    count_MM = pairs.count_MM * H
    tail = [max(1, round(n * TAIL)) for n in (pairs.count_everywhere_MM * H).flatten().tolist()]
    largest: list[list[Tensor]] = [[] for _ in tail]
    signed: list[list[Tensor]] = [[] for _ in tail]
    found: dict[str, Moments] = {}

    def add(name: str, part: Moments) -> None:
        found[name] = found[name] + part if name in found else part

    for chunk in pairs.chunks:
        logits_BHCS = scale * q[:, :, chunk.rows] @ k.transpose(-1, -2)
        by_head_HN = logits_BHCS.transpose(0, 1).flatten(1)
        for i, index_N in enumerate(chunk.index):
            if len(index_N):
                values_HN = by_head_HN.index_select(1, index_N)
                signed[i].append(values_HN.max())
                magnitude_N = values_HN.abs().flatten()
                largest[i].append(magnitude_N.topk(min(tail[i], len(magnitude_N))).values)
        seen = _rows(
            logits_BHCS, chunk.visible_BCS[:, None], pairs.of_key_BSM[:, None], chunk.sees_BCM, softcap
        )
        for name in _BY_QUERY:
            add(name, moments(getattr(seen, name), chunk.queries_MBC))
        for b in range(M):
            sees_BC = chunk.sees_BCM[..., b] > 0
            add(f"offset{b}", moments(seen.offset_BHCM[..., b], chunk.queries_MBC & sees_BC))
            add(f"mass{b}", moments(seen.mass_BHCM[..., b], chunk.queries_MBC))

    none = q.new_tensor(-torch.inf)
    tops = []
    for parts, n in zip(largest, tail, strict=True):
        found_N = torch.cat([none.expand(n), *parts])  # as long as that of every other rank
        tops.append(found_N.topk(n).values)
    return AttentionStatistics(
        count=count_MM,
        max=torch.stack([torch.stack(parts).max() if parts else none for parts in signed]).view(M, M),
        absmax=torch.stack([top[0] for top in tops]).view(M, M),
        tail=tops,
        offset=tuple(found[f"offset{b}"] for b in range(M)),
        mass=tuple(found[f"mass{b}"] for b in range(M)),
        **{name: found[name] for name in _BY_QUERY},
    )


def _rows(
    logits_BHCS: Tensor, visible_B1CS: Tensor, of_key_B1SM: Tensor, sees_BCM: Tensor, softcap: float | None
) -> _Rows:
    """The parts of every row. Rows that see nothing (padding) come out as NaN and are not selected afterwards."""
    n_BC1 = sees_BCM.sum(-1, keepdim=True)
    share_B1CM, n_B1C1 = (sees_BCM / n_BC1)[:, None], n_BC1[:, None]

    # What is not visible is set to 0 once: sums over a row or a block of it are then plain.
    zeroed = logits_BHCS.masked_fill(~visible_B1CS, 0.0)
    mean_BHC1 = zeroed.sum(-1, keepdim=True) / n_B1C1
    centred = (zeroed - mean_BHC1) * visible_B1CS
    offset_BHCM = centred @ of_key_B1SM / sees_BCM.clamp_min(1)[:, None]
    about_block = (centred - offset_BHCM @ of_key_B1SM.transpose(-1, -2)) * visible_B1CS
    spread_BHC = about_block.square().sum(-1) / n_B1C1[..., 0]
    offset_variance_BHC = (share_B1CM * offset_BHCM.square()).sum(-1)

    capped = logits_BHCS if softcap is None else softcap * torch.tanh(logits_BHCS / softcap)
    hidden = capped.masked_fill(~visible_B1CS, -torch.inf)
    # Shifted by the row's maximum, or large logits would cancel.
    shifted = hidden - hidden.amax(-1, keepdim=True)
    weight = shifted.exp()
    total_BHC1 = weight.sum(-1, keepdim=True)
    mass_BHCM = weight @ of_key_B1SM / total_BHC1
    block_entropy_BHC = torch.special.entr(mass_BHCM).sum(-1)
    mean_shifted_BHC = (weight * shifted.masked_fill(~visible_B1CS, 0.0)).sum(-1) / total_BHC1[..., 0]
    entropy_BHC = total_BHC1[..., 0].log() - mean_shifted_BHC
    return _Rows(
        mean=mean_BHC1[..., 0],
        variance=offset_variance_BHC + spread_BHC,
        offset_variance=offset_variance_BHC,
        spread_variance=spread_BHC,
        entropy=entropy_BHC,
        block_entropy=block_entropy_BHC,
        within_entropy=entropy_BHC - block_entropy_BHC,
        offset_BHCM=offset_BHCM,
        mass_BHCM=mass_BHCM,
    )
