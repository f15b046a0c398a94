"""Which part of the attention logits grew: queries, keys, or how they are aligned.

Shapes: B batch, H heads, T query tokens, S key tokens, K head_dim, M modalities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmqk.monitors.measures import pairs as pairs_module
from mmqk.monitors.measures.attention import attention_statistics, participation
from mmqk.monitors.measures.pairs import Mask, Pairs
from mmqk.monitors.measures.reduce import Moments, sum_of_squares


@dataclass(frozen=True)
class LogitGrowth:
    """Sums of one layer, by query and key modality and head, (M, M, H); sums of several batches add up.

    Attributes:
        q_sq: squared length of the query, over all pairs of a query and a key of one sequence, visible or not.
        k_sq: squared length of the key, over the same pairs.
        dot_sq: squared dot product, over the same pairs.
        pairs: number of these pairs, (M, M).
        seen_sq: squared dot product over the visible pairs.
        seen: number of visible pairs, (M, M).
    """

    q_sq: Tensor
    k_sq: Tensor
    dot_sq: Tensor
    pairs: Tensor
    seen_sq: Tensor
    seen: Tensor

    def parts(self) -> dict[str, Tensor]:
        """Natural logarithms, means over heads, (M, M); NaN without a pair.

        ``log E[z^2] = 2 log scale + q_power + k_power + alignment + masked``, exactly, z the raw visible logit.

        q_power: log of the mean squared length of the queries.
        k_power: log of the mean squared length of the keys.
        alignment: log of ``tr(C_q C_k) / (tr C_q tr C_k)``, C the uncentered second moments; ``-log K`` for random
            directions, 0 if all lie on one line.
        masked: log of E[z^2] over the visible pairs less that over all pairs: what the other parts do not explain.
        """
        pairs, seen = self.pairs[..., None], self.seen[..., None]
        q_sq, k_sq, dot_sq = self.q_sq / pairs, self.k_sq / pairs, self.dot_sq / pairs
        parts = {
            "q_power": q_sq.log(),
            "k_power": k_sq.log(),
            "alignment": (dot_sq / (q_sq * k_sq)).log(),
            "masked": (self.seen_sq / seen).log() - dot_sq.log(),
        }
        return {name: value.mean(-1) for name, value in parts.items()}


def logit_growth(
    q_BHTK: Tensor, k_BHSK: Tensor, of_MBT: Tensor, pairs: Pairs, seen_sq_MMH: Tensor | None = None
) -> LogitGrowth:
    """Second moments of the queries and keys of the dot product (after QK-Norm and RoPE), without its scale.

    Args:
        q_BHTK: queries.
        k_BHSK: keys.
        of_MBT: which tokens belong to each modality, from `mmqk.monitors.measures.reduce.selection`.
        pairs: visible pairs.
        seen_sq_MMH: sums of squared dot products over the visible pairs; None to compute them.
    """
    n_MB = of_MBT.sum(-1).float()
    moments_2MBHKK = torch.stack([_second_moments(x, of_MBT) for x in (q_BHTK, k_BHSK)])
    moments_2HMBKK = moments_2MBHKK.permute(0, 3, 1, 2, 4, 5)
    trace_2HMB = moments_2HMBKK.diagonal(dim1=-2, dim2=-1).sum(-1)
    cq_HMX, ck_HMX = moments_2HMBKK.flatten(3).unbind(0)
    # Each sequence is weighted by its number of pairs of the two modalities.
    q_sq_HMM, k_sq_HMM = trace_2HMB[0] @ n_MB.T, (trace_2HMB[1] @ n_MB.T).mT
    if seen_sq_MMH is None:
        seen_sq_MMH = attention_statistics(q_BHTK, k_BHSK, 1.0, pairs).square
    return LogitGrowth(
        q_sq=q_sq_HMM.permute(1, 2, 0),
        k_sq=k_sq_HMM.permute(1, 2, 0),
        dot_sq=(cq_HMX @ ck_HMX.mT).permute(1, 2, 0),
        pairs=n_MB @ n_MB.T,
        seen_sq=seen_sq_MMH,
        seen=pairs.count_MM.float(),
    )


def _of_modality(x_BHTK: Tensor, of_MBT: Tensor) -> Tensor:
    """(M, B, H, T, K), 0 at the tokens of other modalities; no product, which would keep their NaN."""
    return torch.where(of_MBT[:, :, None, :, None], x_BHTK.float(), 0.0)


def _second_moments(x_BHTK: Tensor, of_MBT: Tensor) -> Tensor:
    """(M, B, H, K, K), uncentered sums."""
    # `_of_modality` with bit operations, as in `Mask`, which takes a third of the time.
    keep_MB1T1 = -of_MBT.int()[:, :, None, :, None]
    kept_MBHTK = (x_BHTK.float().contiguous().view(torch.int32) & keep_MB1T1).view(torch.float32)
    return kept_MBHTK.mT @ kept_MBHTK


def common_mode(k_BHSK: Tensor, of_MBT: Tensor) -> Moments:
    """Share of the keys' squared length in their mean over a modality's tokens of a sequence, by modality.

    ``|mean k|^2 / mean |k|^2`` for each sequence and head: 1 if all keys are equal, 1/n for n random keys. The
    mean key shifts the logits of a whole block of a row by one number.
    """
    k_MBHSK = _of_modality(k_BHSK, of_MBT)
    n_MB1 = of_MBT.sum(-1, keepdim=True)
    k_sq_MBH = sum_of_squares(k_MBHSK)
    share_MBH = k_MBHSK.sum(-2).square().sum(-1) / (n_MB1 * k_sq_MBH)
    # If all keys are 0, the share is 0 / 0: leave it out.
    defined_MBH = (n_MB1 > 0) & (k_sq_MBH != 0)
    kept = torch.where(defined_MBH, share_MBH, 0.0)
    return Moments(
        count=defined_MBH.sum((1, 2)).float(),
        sum=kept.sum((1, 2)),
        sum_sq=kept.square().sum((1, 2)),
        max=torch.where(defined_MBH, share_MBH, -torch.inf).amax((1, 2)),
    )


def attention_rank(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    scale: float,
    visible_BTS: Tensor,
    softcap: float | None = None,
    reach: Sequence[tuple[slice, int]] | None = None,
) -> Tensor:
    """Participation ratio of the singular values of each attention matrix, (H, B).

    ``(sum s^2)^2 / sum s^4``: between 1 (every query attends to the same keys in the same way) and T. Low entropy
    with a high rank is benign (each token attends to one other, and they differ); with a low rank it is collapse
    (Qi et al. 2025, arXiv 2505.21910). Softmax attention; at most 2^24 logits at a time, or one matrix. NaN for a
    sequence of padding alone.

    Args:
        q_BHTK: queries of the dot product.
        k_BHSK: keys of the dot product.
        scale: factor on the dot product.
        visible_BTS: which keys each query may see.
        softcap: cap on the logits before the softmax, or None.
        reach: `Pairs.reach`, which saves most of the work of causal attention; None is all keys for every query.
    """
    q, k = scale * q_BHTK.float(), k_BHSK.float()
    B, H, T, _ = q.shape
    matrices = max(1, pairs_module.CHUNK_ELEMENTS // visible_BTS[0].numel())
    ranks: list[Tensor] = []
    for at in range(0, B, max(1, matrices // H)):
        some = slice(at, at + max(1, matrices // H))
        mask = Mask.of(visible_BTS[some, None])
        of_heads = []
        for q_BhTK, k_BhSK in zip(q[some].split(matrices, 1), k[some].split(matrices, 1), strict=True):
            logits_BhTS = q_BhTK @ k_BhSK.mT
            if softcap is not None:
                logits_BhTS = softcap * torch.tanh(logits_BhTS / softcap)
            weight_BhTS = mask.zero_(torch.softmax(mask.hide_(logits_BhTS), -1))  # rows of padding become 0
            of_heads.append(participation(weight_BhTS, reach or [(slice(0, T), k.shape[2])]))
        ranks.append(torch.cat(of_heads, 1))
    return torch.cat(ranks).T
