"""Which part of the attention logits grew: queries, keys, or how they are aligned.

Shapes: B batch, H heads, T query tokens, S key tokens, K head width, M modalities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmqk.monitors.attention import CHUNK_ELEMENTS
from mmqk.monitors.reduce import Moments


@dataclass(frozen=True)
class LogitGrowth:
    """Of one layer, natural logarithms, means over heads, by query and key modality, (M, M); NaN without a pair.

    Over all pairs of a query and a key of one sequence, whether or not the mask lets them meet,
    ``log E[z^2] = 2 log scale + q_power + k_power + alignment``, exactly, where z is the raw logit.

    Attributes:
        q_power: log of the mean squared length of the queries.
        k_power: log of the mean squared length of the keys.
        alignment: log of the mean squared cosine-like overlap, ``tr(C_q C_k) / (tr C_q tr C_k)`` with C the uncentred
            second moments; ``-log K`` for directions at random, 0 when all lie on one line.
        masked: log E[z^2] over the visible pairs less that over all pairs: what the parts leave unsaid.
        heads: heads that had a pair.
    """

    q_power: Tensor
    k_power: Tensor
    alignment: Tensor
    masked: Tensor
    heads: Tensor


def logit_growth(
    q_BHTK: Tensor, k_BHSK: Tensor, scale: float, of_MBT: Tensor, visible_BTS: Tensor
) -> LogitGrowth:
    """Second moments of queries and keys as they enter the dot product (after QK-Norm and RoPE).

    Args:
        q_BHTK: queries.
        k_BHSK: keys.
        scale: factor on the dot product.
        of_MBT: which tokens belong to each modality, from `mmqk.monitors.reduce.selection`.
        visible_BTS: from `mmqk.monitors.attention.visible_pairs`.
    """
    q, k, of = q_BHTK.float(), k_BHSK.float(), of_MBT.float()
    n_MB = of.sum(-1)
    pairs_MMB = n_MB[:, None] * n_MB[None]
    moment = "mbt,bhtk,bhtl->mbhkl"
    cq_MBHKK, ck_MBHKK = torch.einsum(moment, of, q, q), torch.einsum(moment, of, k, k)
    trace_q_MBH, trace_k_MBH = (c.diagonal(dim1=-2, dim2=-1).sum(-1) for c in (cq_MBHKK, ck_MBHKK))
    total_MM = pairs_MMB.sum(-1)[..., None]
    # Weighted by pairs: a sequence says as much as it has pairs of the two modalities.
    q_sq_MMH = torch.einsum("abh,cb->ach", trace_q_MBH, n_MB) / total_MM
    k_sq_MMH = torch.einsum("cbh,ab->ach", trace_k_MBH, n_MB) / total_MM
    dot_sq_MMH = torch.einsum("abhkl,cbhkl->ach", cq_MBHKK, ck_MBHKK) / total_MM
    masked_MMH = _visible_power(q, k, of, visible_BTS).log() - dot_sq_MMH.log()
    parts = {
        "q_power": q_sq_MMH.log(),
        "k_power": k_sq_MMH.log(),
        "alignment": (dot_sq_MMH / (q_sq_MMH * k_sq_MMH)).log(),
        "masked": masked_MMH,
    }
    heads = (total_MM > 0).expand_as(q_sq_MMH).sum(-1)
    return LogitGrowth(**{name: value.mean(-1) for name, value in parts.items()}, heads=heads)


def _visible_power(q: Tensor, k: Tensor, of: Tensor, visible_BTS: Tensor) -> Tensor:
    """Mean squared dot product over visible pairs, by query and key modality and head, (M, M, H)."""
    B, H, T, _ = q.shape
    M = len(of)
    chunk = max(1, CHUNK_ELEMENTS // (B * H * T))
    power, count = q.new_zeros(M, M, H), q.new_zeros(M, M)
    for start in range(0, T, chunk):
        rows = slice(start, start + chunk)
        seen = visible_BTS[:, rows].float()
        squared_BHCS = (q[:, :, rows] @ k.transpose(-1, -2)).square() * seen[:, None]
        power = power + torch.einsum("abt,bhts,cbs->ach", of[:, :, rows], squared_BHCS, of)
        count = count + torch.einsum("abt,bts,cbs->ac", of[:, :, rows], seen, of)
    return power / count[..., None]


def common_mode(k_BHSK: Tensor, of_MBT: Tensor) -> Moments:
    """Share of the keys' squared length that all keys of a modality in a sequence have in common, by modality.

    ``|mean k|^2 / mean |k|^2`` for each sequence and head: 1 when all keys are alike, 1/n for n at random. Logits
    along the common direction shift a whole block of a row and do not tell its keys apart.
    """
    k, of = k_BHSK.float(), of_MBT.float()
    n_MB1 = of.sum(-1)[..., None]
    mean_MBHK = torch.einsum("mbs,bhsk->mbhk", of, k) / n_MB1[..., None].clamp_min(1)
    square_MBH = torch.einsum("mbs,bhs->mbh", of, k.square().sum(-1)) / n_MB1.clamp_min(1)
    share_MBH = mean_MBHK.square().sum(-1) / square_MBH
    there_MBH = (n_MB1 > 0).expand_as(share_MBH)
    kept = torch.where(there_MBH, share_MBH, 0.0)
    return Moments(
        count=there_MBH.sum((1, 2)).float(),
        sum=kept.sum((1, 2)),
        sum_sq=kept.square().sum((1, 2)),
        max=torch.where(there_MBH, share_MBH, -torch.inf).amax((1, 2)),
    )


def attention_rank(
    q_BHTK: Tensor, k_BHSK: Tensor, scale: float, visible_BTS: Tensor, softcap: float | None = None
) -> Tensor:
    """Participation ratio of the singular values of each attention matrix, mean over sequences and heads.

    ``(sum s^2)^2 / sum s^4``: between 1 (every query attends to the same keys in the same way) and T. Low entropy
    with a high rank is benign (each token attends to one other, and they differ); with a low rank it is collapse
    (Qi et al. 2025, arXiv 2505.21910). Softmax attention; a sequence and a head at a time.
    """
    ranks = []
    for q_HTK, k_HSK, visible_TS in zip(q_BHTK.float(), k_BHSK.float(), visible_BTS, strict=True):
        for q_TK, k_SK in zip(q_HTK, k_HSK, strict=True):
            logits_TS = scale * q_TK @ k_SK.T
            if softcap is not None:
                logits_TS = softcap * torch.tanh(logits_TS / softcap)
            weight_TS = torch.softmax(logits_TS.masked_fill(~visible_TS, -torch.inf), -1)
            weight_TS = torch.where(visible_TS.any(-1, keepdim=True), weight_TS, 0.0)  # padding sees nothing
            gram_SS = weight_TS.T @ weight_TS
            ranks.append(gram_SS.trace().square() / gram_SS.square().sum())
    return torch.stack(ranks).mean()
