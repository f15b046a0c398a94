"""Which part of the attention logits grew: queries, keys, or how they are aligned.

Shapes: B batch, H heads, T query tokens, S key tokens, K head width, M modalities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmqk.monitors.pairs import Pairs
from mmqk.monitors.reduce import Moments


@dataclass(frozen=True)
class LogitGrowth:
    """Of one layer, by query and key modality and head, (M, M, H): sums, which those of other batches add to.

    Attributes:
        q_sq: squared length of the query, over all pairs of a query and a key of one sequence, met or not.
        k_sq: squared length of the key, over the same.
        dot_sq: squared dot product, over the same.
        pairs: how many, (M, M).
        seen_sq: squared dot product over the visible pairs.
        seen: how many, (M, M).
    """

    q_sq: Tensor
    k_sq: Tensor
    dot_sq: Tensor
    pairs: Tensor
    seen_sq: Tensor
    seen: Tensor

    def parts(self) -> dict[str, Tensor]:
        """Natural logarithms, means over heads, (M, M); NaN where there is no pair.

        ``log E[z^2] = 2 log scale + q_power + k_power + alignment + masked``, exactly, z the raw visible logit.

        q_power: log of the mean squared length of the queries.
        k_power: log of the mean squared length of the keys.
        alignment: log of ``tr(C_q C_k) / (tr C_q tr C_k)``, C the uncentred second moments; ``-log K`` for directions
            at random, 0 when all lie on one line.
        masked: log of E[z^2] over the visible pairs less that over all pairs: what the other parts leave unsaid.
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


def logit_growth(q_BHTK: Tensor, k_BHSK: Tensor, of_MBT: Tensor, pairs: Pairs) -> LogitGrowth:
    """Second moments of queries and keys as they enter the dot product (after QK-Norm and RoPE), without its scale.

    Args:
        q_BHTK: queries.
        k_BHSK: keys.
        of_MBT: which tokens belong to each modality, from `mmqk.monitors.reduce.selection`.
        pairs: who sees whom.
    """
    q, k, of = q_BHTK.float(), k_BHSK.float(), of_MBT.float()
    n_MB = of.sum(-1)
    moment = "mbt,bhtk,bhtl->mbhkl"
    cq_MBHKK, ck_MBHKK = torch.einsum(moment, of, q, q), torch.einsum(moment, of, k, k)
    trace_q_MBH, trace_k_MBH = (c.diagonal(dim1=-2, dim2=-1).sum(-1) for c in (cq_MBHKK, ck_MBHKK))
    return LogitGrowth(
        # Weighted by pairs: a sequence says as much as it has pairs of the two modalities.
        q_sq=torch.einsum("abh,cb->ach", trace_q_MBH, n_MB),
        k_sq=torch.einsum("cbh,ab->ach", trace_k_MBH, n_MB),
        dot_sq=torch.einsum("abhkl,cbhkl->ach", cq_MBHKK, ck_MBHKK),
        pairs=n_MB @ n_MB.T,
        seen_sq=_seen_sq(q, k, pairs),
        seen=pairs.count_MM.float(),
    )


def _seen_sq(q: Tensor, k: Tensor, pairs: Pairs) -> Tensor:
    """Squared dot products of visible pairs, by query and key modality and head, (M, M, H)."""
    M, H = pairs.n_modalities, q.shape[1]
    seen_sq_XH = q.new_zeros(M * M, H)
    for chunk in pairs.chunks:
        dots_BHCS = q[:, :, chunk.rows] @ k.transpose(-1, -2)
        squared_HN = dots_BHCS.transpose(0, 1).flatten(1).square_()
        for i, index_N in enumerate(chunk.index):
            seen_sq_XH[i] += squared_HN.index_select(1, index_N).sum(1)
    return seen_sq_XH.view(M, M, H)


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
