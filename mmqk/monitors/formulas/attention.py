"""Statistics of attention: logits and weights, exact over all visible pairs in chunks of queries, and logit growth.

The growth of attention logits is split into growth of queries, growth of keys, and their alignment.

Shapes: B batch, H heads, T query tokens (C of them in a chunk), S key tokens, K head_dim, M modalities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmqk.monitors.formulas import reduce
from mmqk.monitors.formulas.reduce import Chunk, Mask, Pairs, Sums, sum_of_squares, sums

TAIL = 1e-3  # share of the pairs above the p999 logit
GROUP = 32


class AttentionStatistics:
    """The exact statistics of the attention logits ``scale * q.k`` of one layer, over every visible pair and all heads.
    Logits are raw: after scale and QK-Norm, before cap and mask.

    A row is a query; rows that see fewer than 8 keys are left out. A block is the set of keys of one modality. A
    row's logits are ``z_ij = mean_i + offset_i,block(j) + rest_ij``: the softmax does not depend on the mean, the
    offsets move attention between key modalities, and the rest sharpens attention within a modality.

    ``rows`` has F = 7 + 2 M statistics by query modality, (F, M):

    - mean and variance of the row's logits
    - variance of the row's offsets, weighted by the number of keys in each block, and variance of the logits about
      the mean of their block; the two add up to the variance of the logits
    - M offsets: mean of a block minus mean of the row
    - entropy of the weights in nats, entropy of the masses of the blocks, and mean entropy within a block,
      weighted by the mass of the block; the last two add up to the first
    - M masses: sum of the weights in a block

    A sink is a learned logit of a head, without a value vector. With sinks, the weights of the keys sum to 1 minus
    the weight of the sink, and the entropies include the sink as one more key and one more block.

    Args:
        q_BHTK: queries of the dot product, after QK-Norm and RoPE.
        k_BHSK: keys of the dot product.
        scale: factor on the dot product.
        pairs: visible pairs of query and key, and their modalities.
        softcap: cap on the logits before the softmax, or None; statistics of logits are computed before the cap.
        sink_H: logit of each head's sink, which is not capped; None if there are no sinks.

    Attributes:
        count: number of visible pairs by query and key modality, (M, M).
        max: largest signed logit, (M, M); -inf if there is no pair.
        absmax: largest absolute logit, (M, M).
        tail: for each query modality and key modality, the largest absolute logits. Their number is a thousandth of
            the number of pairs (`Pairs.counts_everywhere`), and at least one.
        rank: participation ratio of each attention matrix (`attention_rank`), (H, B); None if the matrices are too
            large for one chunk. The column of a sink is not part of the matrix.
        square: sum of the squared logits, by query and key modality and head, (M, M, H).
        rows: the F statistics of the rows, as listed above.
        sink: weight of the sink by query modality, (M,), over rows with at least 8 visible keys; None if there is no
            sink.
    """

    def __init__(
        self,
        q_BHTK: Tensor,
        k_BHSK: Tensor,
        scale: float,
        pairs: Pairs,
        softcap: float | None = None,
        sink_H: Tensor | None = None,
    ) -> None:
        # The head axis comes first, so that the logits of each head are contiguous. `chunk.places` has indices into the
        # flattened (B, C, S) axes, which select the same pairs from every head.
        q_HBTK, k_HBSK = scale * q_BHTK.float().transpose(0, 1), k_BHSK.float().transpose(0, 1)
        H, M = len(q_HBTK), pairs.n_modalities
        tail = [max(1, round(n * H * TAIL)) for n in pairs.counts_everywhere]
        largest: list[list[Tensor]] = [[] for _ in tail]
        signed: list[list[Tensor]] = [[] for _ in tail]
        self.rows = Sums(q_HBTK.new_zeros(()), q_HBTK.new_zeros(()))
        self.sink: Sums | None = None
        self.rank: Tensor | None = None
        self.square = q_HBTK.new_zeros(M, M, H)
        for chunk in pairs.chunks:
            logits_HBCS = q_HBTK[:, :, chunk.rows] @ k_HBSK[:, :, : chunk.key_BMS.shape[2]].mT
            for i, places in enumerate(chunk.places):
                if len(places):
                    values_HN = logits_HBCS.flatten(1).index_select(1, places)
                    signed[i].append(values_HN.max()[None])
                    largest[i].append(_largest(values_HN.abs_().flatten(), tail[i]))
            values_FHBC, square_HBMC, weight_HBCS, sink_HBC = _rows(logits_HBCS, chunk, softcap, sink_H)
            if weight_HBCS.shape[2] == q_HBTK.shape[2]:
                self.rank = participation(chunk.mask.zero_(weight_HBCS), pairs.reach)
            if sink_HBC is not None:
                chunk_sink = sums(sink_HBC.transpose(0, 1), chunk.selected_FMBC[-1])  # rows with at least 8 keys
                self.sink = chunk_sink if self.sink is None else self.sink + chunk_sink
            of_query_MHBMC = torch.where(chunk.queries_MBC[:, None, :, None], square_HBMC, 0.0)
            self.square = self.square + of_query_MHBMC.sum((2, 4)).transpose(1, 2)
            selected_FMHBC = chunk.selected_FMBC[:, :, None]
            # torch.where, because a product would spread a NaN to other modalities.
            selected_values = torch.where(selected_FMHBC, values_FHBC[:, None], 0.0)
            self.rows += Sums(chunk.count_FM * H, selected_values.sum((2, 3, 4)))
        none = q_HBTK.new_full((), -torch.inf)
        self.count = pairs.count_MM * H
        self.max = torch.cat([_merged(parts, 1, none) for parts in signed]).view(M, M)
        self.tail = [_merged(parts, n, none) for parts, n in zip(largest, tail, strict=True)]
        self.absmax = torch.stack([top[0] for top in self.tail]).view(M, M)


def exceeded_by_one_in_a_thousand(tail_NP: Tensor, count_P: Tensor) -> Tensor:
    """Return (P,): the logit that one in a thousand pairs reaches, for each of P kinds of pairs.

    ``count_P`` is the number of pairs of each kind, and ``tail_NP`` has the largest logits of each kind.
    """
    place_P = (count_P * TAIL).round().clamp(min=1, max=len(tail_NP)).long() - 1
    return tail_NP.sort(dim=0, descending=True).values.gather(0, place_P[None])[0]


def _largest(values_N: Tensor, n: int) -> Tensor:
    """Return the n largest values in descending order, exactly; all values if there are fewer than n.

    The n largest values are in the n groups with the largest maxima, so only these groups have to be sorted.
    """
    grouped = len(values_N) - len(values_N) % GROUP
    groups_GX = values_N[:grouped].view(-1, GROUP)
    best = groups_GX.amax(1).topk(min(n, len(groups_GX))).indices
    candidates = torch.cat([groups_GX.index_select(0, best).flatten(), values_N[grouped:]])
    return candidates.topk(min(n, len(candidates))).values


def _merged(parts: list[Tensor], n: int, none: Tensor) -> Tensor:
    """Return the n largest values of the parts in descending order, padded with -inf if there are fewer than n."""
    if len(parts) == 1 and len(parts[0]) == n:
        return parts[0]
    return torch.cat([*parts, none.expand(n)]).topk(n).values


def _rows(
    logits_HBCS: Tensor, chunk: Chunk, softcap: float | None, sink_H: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return four tensors: the F statistics of every row (`AttentionStatistics`), the sums of squared logits by
    block, the weights (up to a constant factor for each matrix), and the weight of the sink.

    The logits are overwritten. Passes over the T x T values take most of a probe's time, so this function makes few
    passes.
    """
    key_BMS, divisor_BMC, share_BMC = chunk.key_BMS, chunk.divisor_BMC, chunk.share_BMC
    H, B, C, S = logits_HBCS.shape
    raw = chunk.mask.zero_(logits_HBCS)
    rough_HBMC = key_BMS @ raw.mT / divisor_BMC
    # Compute the mean again, relative to the first estimate and in fp64: otherwise a mean of 10,000 hides a spread of
    # 1.
    key_XMS = key_BMS.expand(H, -1, -1, -1).flatten(0, 1)
    rest_XCS = torch.baddbmm(raw.flatten(0, 1), rough_HBMC.flatten(0, 1).mT, key_XMS, alpha=-1)
    rest = chunk.mask.zero_(rest_XCS.view(H, B, C, S))
    fine_HBMC = key_BMS @ rest.mT / divisor_BMC
    spread_HBMC = (key_BMS @ rest.square_().mT / divisor_BMC - fine_HBMC.square()).clamp_min(0)
    block_HBMC = rough_HBMC.double() + fine_HBMC
    mean_HBC = (share_BMC * block_HBMC).sum(2)
    offset_HBMC = (block_HBMC - mean_HBC[:, :, None]).float()
    offset_variance_HBC = (share_BMC * offset_HBMC.square()).sum(2)
    spread_HBC = (share_BMC * spread_HBMC).sum(2)

    if softcap is not None:
        raw.div_(softcap).tanh_().mul_(softcap)
    shifted = raw.add_(chunk.mask.fill)
    largest_HBC1 = shifted.amax(-1, keepdim=True)
    shifted -= largest_HBC1  # otherwise the entropy would be a difference of large numbers
    weight = torch.softmax(shifted, -1, out=rest)
    mass_HBMC = key_BMS @ weight.mT
    log_z_HBC = -weight.amax(-1).log()
    entropy_HBC = log_z_HBC - shifted.mul_(weight).sum(-1)
    block_entropy_HBC = torch.special.entr(mass_HBMC).sum(2)
    if chunk.others:  # keys without a modality are one more block
        block_entropy_HBC += torch.special.entr((1 - mass_HBMC.sum(2)).clamp_min(0))
    sink_HBC: Tensor | None = None
    if sink_H is not None:
        # With a sink, a key's weight is its weight without the sink times the total weight of the keys. The entropies
        # follow from the chain rule.
        over_HBC = largest_HBC1[..., 0] + log_z_HBC - sink_H.float()[:, None, None]
        share_HBC, sink_HBC = torch.sigmoid(over_HBC), torch.sigmoid(-over_HBC)
        choice_HBC = torch.special.entr(share_HBC) + torch.special.entr(sink_HBC)
        entropy_HBC = share_HBC * entropy_HBC + choice_HBC
        block_entropy_HBC = share_HBC * block_entropy_HBC + choice_HBC
        mass_HBMC = share_HBC[:, :, None] * mass_HBMC
        weight *= key_shares(over_HBC)
    logits = [mean_HBC.float(), offset_variance_HBC + spread_HBC, offset_variance_HBC, spread_HBC]
    weights = [entropy_HBC, block_entropy_HBC, entropy_HBC - block_entropy_HBC]
    values_FHBC = torch.stack([*logits, *offset_HBMC.unbind(2), *weights, *mass_HBMC.unbind(2)])
    return values_FHBC, chunk.visible_BMC * (spread_HBMC + block_HBMC.float().square()), weight, sink_HBC


def key_shares(over_HBT: Tensor) -> Tensor:
    """Return (H, B, T, 1): each row's total weight on its keys, divided by the largest such weight in the matrix.

    Without the division, all rows could underflow.

    ``over_HBT`` is log Z of the keys minus the logit of the sink.
    """
    log_share_HBT = torch.nn.functional.logsigmoid(over_HBT)
    return (log_share_HBT - log_share_HBT.amax(-1, keepdim=True)).exp()[..., None]


def participation(weight_HBTS: Tensor, reach: Sequence[tuple[slice, int]]) -> Tensor:
    """Return the participation ratio of each matrix of weights W, (H, B): ``(tr W W^T)^2 / |W W^T|^2``.

    ``W W^T`` is symmetric, so each off-diagonal block is computed once and counted twice. The row of a query without
    visible keys must be 0. ``reach`` is `Pairs.reach`.
    """
    square_HB = weight_HBTS.new_zeros(weight_HBTS.shape[:2])
    for rows, keys in reach:
        block_HBTC = weight_HBTS[..., rows.start :, :keys] @ weight_HBTS[..., rows, :keys].mT
        square_HBT = block_HBTC.square_().sum(-1)
        square_HB = square_HB + 2 * square_HBT.sum(-1) - square_HBT[..., : block_HBTC.shape[-1]].sum(-1)
    return sum_of_squares(weight_HBTS).square() / square_HB


GROWTH_PARTS = ("q_power", "k_power", "alignment", "masked")  # in the order of `growth_parts`


def growth_parts(growth: Mapping[str, Tensor]) -> Tensor:
    """Return four natural logarithms, each averaged over heads, (4, M, M); NaN if there is no pair.

    ``log E[z^2] = 2 log scale + q_power + k_power + alignment + masked`` is exact for the raw visible logits z.

    q_power: log of the mean squared length of the queries.
    k_power: log of the mean squared length of the keys.
    alignment: log of ``tr(C_q C_k) / (tr C_q tr C_k)``, C the uncentered second moments; ``-log K`` for random
        directions, 0 if all queries and keys lie on one line.
    masked: log of E[z^2] over the visible pairs minus log of E[z^2] over all pairs; the other parts are computed over
        all pairs.

    Args:
        growth: the sums of `logit_growth`, of one or several batches.
    """
    pairs, visible = growth["pairs"][..., None], growth["visible"][..., None]
    q_sq, k_sq, dot_sq = (growth[name] / pairs for name in ("q_sq", "k_sq", "dot_sq"))
    alignment, masked = (dot_sq / (q_sq * k_sq)).log(), (growth["visible_sq"] / visible).log() - dot_sq.log()
    return torch.stack([part.mean(-1) for part in (q_sq.log(), k_sq.log(), alignment, masked)])


def logit_growth(
    q_BHTK: Tensor, k_BHSK: Tensor, token_MBT: Tensor, pairs: Pairs, visible_sq_MMH: Tensor
) -> dict[str, Tensor]:
    """Return sums of one layer by query modality, key modality and head, (M, M, H), which add up over batches. The
    queries and keys are those of the dot product (after QK-Norm and RoPE), without its scale.

    Args:
        q_BHTK: queries.
        k_BHSK: keys.
        token_MBT: the tokens of each modality, from `mmqk.monitors.formulas.reduce.selection`.
        pairs: visible pairs.
        visible_sq_MMH: sums of squared dot products over the visible pairs, from `AttentionStatistics`.

    Returns:
        q_sq: squared length of the query, over all pairs of a query and a key of one sequence, visible or not.
        k_sq: squared length of the key, over the same pairs.
        dot_sq: squared dot product, over the same pairs.
        pairs: number of these pairs, (M, M).
        visible_sq: squared dot product over the visible pairs.
        visible: number of visible pairs, (M, M).
    """
    n_MB = token_MBT.sum(-1).float()
    moments_2MBHKK = torch.stack([_second_moments(x, token_MBT) for x in (q_BHTK, k_BHSK)])
    moments_2HMBKK = moments_2MBHKK.permute(0, 3, 1, 2, 4, 5)
    trace_2HMB = moments_2HMBKK.diagonal(dim1=-2, dim2=-1).sum(-1)
    cq_HMX, ck_HMX = moments_2HMBKK.flatten(3).unbind(0)
    # Each sequence is weighted by its number of pairs of the two modalities.
    q_sq_HMM, k_sq_HMM = trace_2HMB[0] @ n_MB.T, (trace_2HMB[1] @ n_MB.T).mT
    return {
        "q_sq": q_sq_HMM.permute(1, 2, 0),
        "k_sq": k_sq_HMM.permute(1, 2, 0),
        "dot_sq": (cq_HMX @ ck_HMX.mT).permute(1, 2, 0),
        "pairs": n_MB @ n_MB.T,
        "visible_sq": visible_sq_MMH,
        "visible": pairs.count_MM.float(),
    }


def _second_moments(x_BHTK: Tensor, token_MBT: Tensor) -> Tensor:
    """Return the uncentered second moments of each modality, summed over tokens, (M, B, H, K, K)."""
    # 0 at tokens of other modalities, even where x is NaN. `torch.where` would take three times as long (`Mask`).
    keep_MB1T1 = -token_MBT.int()[:, :, None, :, None]
    masked_MBHTK = (x_BHTK.float().contiguous().view(torch.int32) & keep_MB1T1).view(torch.float32)
    return masked_MBHTK.mT @ masked_MBHTK


def common_mode(k_BHSK: Tensor, token_MBT: Tensor) -> Sums:
    """Return the squared length of the mean key divided by the mean squared length of the keys, by modality.

    The ratio ``|mean k|^2 / mean |k|^2`` over the tokens of a modality, for each sequence and head, is 1 if all keys
    are equal, and 1/n for n random keys. The mean key of a modality adds the same number to all logits of one query
    with keys of this modality.
    """
    k_MBHSK = torch.where(token_MBT[:, :, None, :, None], k_BHSK.float(), 0.0)  # even where it is NaN
    n_MB1 = token_MBT.sum(-1, keepdim=True)
    k_sq_MBH = sum_of_squares(k_MBHSK)
    share_MBH = k_MBHSK.sum(-2).square().sum(-1) / (n_MB1 * k_sq_MBH)
    # If all keys are 0, the share is 0 / 0: leave it out.
    defined_MBH = (n_MB1 > 0) & (k_sq_MBH != 0)
    return Sums(count=defined_MBH.sum((1, 2)).float(), sum=torch.where(defined_MBH, share_MBH, 0.0).sum((1, 2)))


def attention_rank(
    q_BHTK: Tensor, k_BHSK: Tensor, scale: float, pairs: Pairs, softcap: float | None, sink_H: Tensor | None
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
        pairs: visible pairs of query and key; `participation` skips keys that no query of a slice sees.
        softcap: cap on the logits before the softmax, or None.
        sink_H: logit of each head's sink, whose column is not part of the matrix; None if there are no sinks.
    """
    q, k = scale * q_BHTK.float(), k_BHSK.float()
    B, H = q.shape[:2]
    at_once = max(1, reduce.CHUNK_ELEMENTS // pairs.visible_BTS[0].numel())
    sinks: Sequence[Tensor | None] = [None] * H if sink_H is None else sink_H.float().split(at_once)
    ranks: list[Tensor] = []
    for start in range(0, B, max(1, at_once // H)):
        some = slice(start, start + max(1, at_once // H))
        mask = Mask.of(pairs.visible_BTS[some, None])
        of_heads = []
        for q_BhTK, k_BhSK, sink_h in zip(q[some].split(at_once, 1), k[some].split(at_once, 1), sinks, strict=False):
            logits_BhTS = q_BhTK @ k_BhSK.mT
            if softcap is not None:
                logits_BhTS = softcap * torch.tanh(logits_BhTS / softcap)
            hidden_BhTS = mask.zero_(logits_BhTS).add_(mask.fill)
            weight_BhTS = mask.zero_(torch.softmax(hidden_BhTS, -1))  # rows of padding become 0
            if sink_h is not None:
                weight_BhTS *= key_shares(hidden_BhTS.logsumexp(-1) - sink_h[:, None])
            of_heads.append(participation(weight_BhTS, pairs.reach))
        ranks.append(torch.cat(of_heads, 1))
    return torch.cat(ranks).T
