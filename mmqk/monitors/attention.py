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
        p999: absolute logit that one pair in a thousand exceeds or equals, (M, M).
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
    p999: Tensor
    mean: Moments
    variance: Moments
    offset_variance: Moments
    spread_variance: Moments
    offset: tuple[Moments, ...]
    mass: tuple[Moments, ...]
    entropy: Moments
    block_entropy: Moments
    within_entropy: Moments


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
    found: dict[str, Moments] = {}
    of_key_BSM = of_MBT.permute(1, 2, 0).to(q.dtype)

    def add(name: str, part: Moments) -> None:
        found[name] = found[name] + part if name in found else part

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
        sees_BCM = visible_BTS[:, rows].to(q.dtype) @ of_key_BSM
        seen = _rows(logits_BHCS, visible_B1CS, of_key_BSM, sees_BCM, softcap)
        queries_MBC = of_MBT[:, :, rows] & (sees_BCM.sum(-1) >= FEWEST_KEYS)
        for name in _BY_QUERY:
            add(name, moments(getattr(seen, name), queries_MBC))
        for b in range(M):
            add(f"offset{b}", moments(seen.offset_BHCM[..., b], queries_MBC & (sees_BCM[..., b] > 0)))
            add(f"mass{b}", moments(seen.mass_BHCM[..., b], queries_MBC))

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
        offset=tuple(found[f"offset{b}"] for b in range(M)),
        mass=tuple(found[f"mass{b}"] for b in range(M)),
        **{name: found[name] for name in _BY_QUERY},
    )


def _rows(
    logits_BHCS: Tensor, visible_B1CS: Tensor, of_key_BSM: Tensor, sees_BCM: Tensor, softcap: float | None
) -> _Rows:
    """The parts of every row. Rows that see nothing (padding) come out as NaN and are not selected afterwards."""
    share_B1CM = (sees_BCM / sees_BCM.sum(-1, keepdim=True))[:, None]
    keys_B1CM, of_key_B1SM = sees_BCM.clamp_min(1)[:, None], of_key_BSM[:, None]

    def by_block(values_BHCS: Tensor) -> Tensor:
        return torch.where(visible_B1CS, values_BHCS, 0.0) @ of_key_B1SM

    n_B1C1 = sees_BCM.sum(-1)[:, None, :, None]
    mean_BHC1 = torch.where(visible_B1CS, logits_BHCS, 0.0).sum(-1, keepdim=True) / n_B1C1
    centred = logits_BHCS - mean_BHC1
    offset_BHCM = by_block(centred) / keys_B1CM
    about_block = centred - offset_BHCM @ of_key_B1SM.transpose(-1, -2)
    spread_BHC = torch.where(visible_B1CS, about_block.square(), 0.0).sum(-1) / n_B1C1[..., 0]
    offset_variance_BHC = (share_B1CM * offset_BHCM.square()).sum(-1)

    capped = logits_BHCS if softcap is None else softcap * torch.tanh(logits_BHCS / softcap)
    # Shifted by the row's maximum, or large logits would cancel.
    shifted = capped - capped.masked_fill(~visible_B1CS, -torch.inf).amax(-1, keepdim=True)
    weight = torch.where(visible_B1CS, shifted.exp(), 0.0)
    total_BHC1 = weight.sum(-1, keepdim=True)
    mass_BHCM = weight @ of_key_B1SM / total_BHC1
    block_entropy_BHC = torch.special.entr(mass_BHCM).sum(-1)
    entropy_BHC = (total_BHC1.log()[..., 0]) - by_block(weight * shifted).sum(-1) / total_BHC1[..., 0]
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
