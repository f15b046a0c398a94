"""Splits the growth of attention logits into growth of queries, growth of keys, and their alignment.

Shapes: B batch, H heads, T query tokens, S key tokens, K head_dim, M modalities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmqk.monitors.formulas import pairs as pairs_module
from mmqk.monitors.formulas.attention import key_shares, participation
from mmqk.monitors.formulas.pairs import Mask, Pairs
from mmqk.monitors.formulas.reduce import Sums, sum_of_squares

GROWTH_PARTS = ("q_power", "k_power", "alignment", "masked")  # in the order of `LogitGrowth.parts`


@dataclass(frozen=True)
class LogitGrowth:
    """Sums of one layer by query modality, key modality and head, (M, M, H).

    The sums of several batches can be added.

    Attributes:
        q_sq: squared length of the query, over all pairs of a query and a key of one sequence, visible or not.
        k_sq: squared length of the key, over the same pairs.
        dot_sq: squared dot product, over the same pairs.
        pairs: number of these pairs, (M, M).
        visible_sq: squared dot product over the visible pairs.
        visible: number of visible pairs, (M, M).
    """

    q_sq: Tensor
    k_sq: Tensor
    dot_sq: Tensor
    pairs: Tensor
    visible_sq: Tensor
    visible: Tensor

    def parts(self) -> Tensor:
        """Return four natural logarithms, each averaged over heads, (4, M, M); NaN if there is no pair.

        ``log E[z^2] = 2 log scale + q_power + k_power + alignment + masked`` is exact for the raw visible logits z.

        q_power: log of the mean squared length of the queries.
        k_power: log of the mean squared length of the keys.
        alignment: log of ``tr(C_q C_k) / (tr C_q tr C_k)``, C the uncentered second moments; ``-log K`` for random
            directions, 0 if all queries and keys lie on one line.
        masked: log of E[z^2] over the visible pairs minus log of E[z^2] over all pairs; the other parts are computed
            over all pairs.
        """
        pairs, visible = self.pairs[..., None], self.visible[..., None]
        q_sq, k_sq, dot_sq = self.q_sq / pairs, self.k_sq / pairs, self.dot_sq / pairs
        alignment, masked = (dot_sq / (q_sq * k_sq)).log(), (self.visible_sq / visible).log() - dot_sq.log()
        return torch.stack([part.mean(-1) for part in (q_sq.log(), k_sq.log(), alignment, masked)])


def logit_growth(
    q_BHTK: Tensor, k_BHSK: Tensor, token_MBT: Tensor, pairs: Pairs, visible_sq_MMH: Tensor
) -> LogitGrowth:
    """Return the sums of `LogitGrowth` for the queries and keys of the dot product (after QK-Norm and RoPE),
    without its scale.

    Args:
        q_BHTK: queries.
        k_BHSK: keys.
        token_MBT: the tokens of each modality, from `mmqk.monitors.formulas.reduce.selection`.
        pairs: visible pairs.
        visible_sq_MMH: sums of squared dot products over the visible pairs, from `attention_statistics`.
    """
    n_MB = token_MBT.sum(-1).float()
    moments_2MBHKK = torch.stack([_second_moments(x, token_MBT) for x in (q_BHTK, k_BHSK)])
    moments_2HMBKK = moments_2MBHKK.permute(0, 3, 1, 2, 4, 5)
    trace_2HMB = moments_2HMBKK.diagonal(dim1=-2, dim2=-1).sum(-1)
    cq_HMX, ck_HMX = moments_2HMBKK.flatten(3).unbind(0)
    # Each sequence is weighted by its number of pairs of the two modalities.
    q_sq_HMM, k_sq_HMM = trace_2HMB[0] @ n_MB.T, (trace_2HMB[1] @ n_MB.T).mT
    return LogitGrowth(
        q_sq=q_sq_HMM.permute(1, 2, 0),
        k_sq=k_sq_HMM.permute(1, 2, 0),
        dot_sq=(cq_HMX @ ck_HMX.mT).permute(1, 2, 0),
        pairs=n_MB @ n_MB.T,
        visible_sq=visible_sq_MMH,
        visible=pairs.count_MM.float(),
    )


def _by_modality(x_BHTK: Tensor, token_MBT: Tensor) -> Tensor:
    """Return ``x`` for each modality, (M, B, H, T, K), with 0 at tokens of other modalities, even where it is NaN."""
    return torch.where(token_MBT[:, :, None, :, None], x_BHTK.float(), 0.0)


def _second_moments(x_BHTK: Tensor, token_MBT: Tensor) -> Tensor:
    """Return the uncentered second moments of each modality, summed over tokens, (M, B, H, K, K)."""
    # This is `_by_modality` with bit operations, as in `Mask`; it takes a third of the time.
    keep_MB1T1 = -token_MBT.int()[:, :, None, :, None]
    masked_MBHTK = (x_BHTK.float().contiguous().view(torch.int32) & keep_MB1T1).view(torch.float32)
    return masked_MBHTK.mT @ masked_MBHTK


def common_mode(k_BHSK: Tensor, token_MBT: Tensor) -> Sums:
    """Return the squared length of the mean key divided by the mean squared length of the keys, by modality.

    The ratio ``|mean k|^2 / mean |k|^2`` over the tokens of a modality, for each sequence and head, is 1 if all keys
    are equal, and 1/n for n random keys. The mean key of a modality adds the same number to all logits of one query
    with keys of this modality.
    """
    k_MBHSK = _by_modality(k_BHSK, token_MBT)
    n_MB1 = token_MBT.sum(-1, keepdim=True)
    k_sq_MBH = sum_of_squares(k_MBHSK)
    share_MBH = k_MBHSK.sum(-2).square().sum(-1) / (n_MB1 * k_sq_MBH)
    # If all keys are 0, the share is 0 / 0: leave it out.
    defined_MBH = (n_MB1 > 0) & (k_sq_MBH != 0)
    return Sums(count=defined_MBH.sum((1, 2)).float(), sum=torch.where(defined_MBH, share_MBH, 0.0).sum((1, 2)))


def attention_rank(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    scale: float,
    visible_BTS: Tensor,
    softcap: float | None = None,
    reach: Sequence[tuple[slice, int]] | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Return the participation ratio of the singular values of each attention matrix, (H, B).

    ``(sum s^2)^2 / sum s^4``: between 1 (every query attends to the same keys in the same way) and T. Low entropy
    with a high rank is benign (each query attends to a different key); low entropy with a low rank is collapse (Qi et
    al. 2025, arXiv 2505.21910). The function is for softmax attention only. It computes at most 2^24 logits at a
    time, or one matrix if it is larger. The ratio is NaN for a sequence that contains only padding.

    Args:
        q_BHTK: queries of the dot product.
        k_BHSK: keys of the dot product.
        scale: factor on the dot product.
        visible_BTS: which keys each query may see.
        softcap: cap on the logits before the softmax, or None.
        reach: `Pairs.reach`, with which `participation` skips keys that no query of a slice sees; None: skip no keys.
        sink_H: logit of each head's sink, whose column is not part of the matrix; None if there are no sinks.
    """
    q, k = scale * q_BHTK.float(), k_BHSK.float()
    B, H, T, _ = q.shape
    at_once = max(1, pairs_module.CHUNK_ELEMENTS // visible_BTS[0].numel())
    sinks: Sequence[Tensor | None] = [None] * H if sink_H is None else sink_H.float().split(at_once)
    ranks: list[Tensor] = []
    for start in range(0, B, max(1, at_once // H)):
        some = slice(start, start + max(1, at_once // H))
        mask = Mask.of(visible_BTS[some, None])
        of_heads = []
        for q_BhTK, k_BhSK, sink_h in zip(q[some].split(at_once, 1), k[some].split(at_once, 1), sinks, strict=False):
            logits_BhTS = q_BhTK @ k_BhSK.mT
            if softcap is not None:
                logits_BhTS = softcap * torch.tanh(logits_BhTS / softcap)
            hidden_BhTS = mask.hide_(logits_BhTS)
            weight_BhTS = mask.zero_(torch.softmax(hidden_BhTS, -1))  # rows of padding become 0
            if sink_h is not None:
                weight_BhTS *= key_shares(hidden_BhTS.logsumexp(-1) - sink_h[:, None])
            of_heads.append(participation(weight_BhTS, reach or [(slice(0, T), k.shape[2])]))
        ranks.append(torch.cat(of_heads, 1))
    return torch.cat(ranks).T
