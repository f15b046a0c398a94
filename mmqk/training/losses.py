"""Cross-entropy and z-loss in nats, summed by the modality of the target, and the same in chunks of tokens.

In chunks, head and loss are computed for C tokens at a time, so that the logits of a batch are never stored.

Shapes are in the names: B batch, T tokens, N = B * T, C tokens of a chunk, D model width, V vocabulary,
M modalities, G groups of targets, each with its own loss and gradient of the head: all targets, then optionally the
targets of each modality.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmqk.data.batch import TokenBatch
from mmqk.model.norms import at_least_fp32
from mmqk.model.transformer import capped
from mmqk.store import tag


@dataclass(frozen=True)
class LossSums:
    """Sums over the trained targets of one batch, by target modality; (M,) each, fp32 (fp64 for fp64 logits).

    Sums can be added over micro-batches and ranks. An absent modality has a count of 0.

    Attributes:
        count: Trained targets.
        ce: Cross-entropy, nats.
        log_z: Log of the output softmax's normalizer, nats.
        log_z_sq: Square of that logarithm.
        total: For a chunked loss, the only tensor with a gradient: `sum_m w_m (ce_m + z_loss * log_z_sq_m)`, with the
            weights and the z-loss passed to `chunked_losses`. None for a dense loss, whose sums have gradients.
        parts_M: For a chunked loss, the term of each modality in that sum, if `by_modality` was set.
    """

    count: Tensor
    ce: Tensor
    log_z: Tensor
    log_z_sq: Tensor
    total: Tensor | None = None
    parts_M: Tensor | None = None


def modality_losses(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    target_modality_BT: Tensor,
    target_mask_BT: Tensor,
    n_modalities: int,
    softcap: float | None = None,
    log_z_grad: bool = True,
) -> LossSums:
    """Return the cross-entropy and log Z of all trained targets, summed by the modality of the target.

    Args:
        logits_BTV: Logits. Position t predicts `targets_BT[:, t]`: the caller has already shifted logits or targets.
        targets_BT: int64 ids; those outside the mask are never read.
        target_modality_BT: Modality number of each target.
        target_mask_BT: Whether a target is trained on, True or False.
        n_modalities: M.
        softcap: Logits become `softcap * tanh(logit / softcap)` first, in fp32.
        log_z_grad: Whether log Z has a gradient. False makes a compiled backward pass cheaper when z_loss is 0.

    Returns:
        Differentiable sums. Positions outside the mask do not affect them.
    """
    wide_BTV = capped(logits_BTV, softcap)
    index_BT1 = targets_BT.where(target_mask_BT, 0)[..., None]
    if torch.compiler.is_compiling():
        # Do not use gather: its backward pass scatters into a second tensor of this size, and inductor does not fuse
        # that.
        largest_BT1 = wide_BTV.detach().amax(-1, keepdim=True)
        shifted_BTV = wide_BTV - largest_BT1
        log_sum_BT = shifted_BTV.exp().sum(-1).log()
        is_target_BTV = torch.arange(wide_BTV.shape[-1], device=wide_BTV.device) == index_BT1
        ce_BT = log_sum_BT - torch.where(is_target_BTV, shifted_BTV, 0.0).sum(-1)
        log_z_BT = largest_BT1[..., 0] + log_sum_BT
    else:
        # One softmax pass gives cross-entropy and log Z: log Z is the target's logit minus its log-probability. If
        # z_loss is 0, no gradient flows through log Z, and the backward pass costs no more than for a plain
        # cross-entropy.
        ce_BT = -torch.log_softmax(wide_BTV, dim=-1).gather(-1, index_BT1)[..., 0]
        log_z_BT = wide_BTV.gather(-1, index_BT1)[..., 0] + ce_BT
    if not log_z_grad:
        log_z_BT = log_z_BT.detach()

    return sum_by_modality(ce_BT, log_z_BT, selected_of(target_modality_BT, target_mask_BT, n_modalities))


def selected_of(target_modality_BT: Tensor, target_mask_BT: Tensor, n_modalities: int) -> Tensor:
    """Return for each target and modality whether it is a trained target of that modality, (B, T, M)."""
    modality_M = torch.arange(n_modalities, device=target_modality_BT.device)
    return target_mask_BT[..., None] & (target_modality_BT[..., None] == modality_M)


def sum_by_modality(ce_BT: Tensor, log_z_BT: Tensor, selected_BTM: Tensor) -> LossSums:
    """Return the sums of cross-entropy and log Z over the selected targets; other targets are never read."""

    def total_M(value_BT: Tensor) -> Tensor:
        return torch.where(selected_BTM, value_BT[..., None], 0.0).sum(dim=(0, 1))

    return LossSums(
        count=selected_BTM.sum(dim=(0, 1)).to(ce_BT.dtype),
        ce=total_M(ce_BT),
        log_z=total_M(log_z_BT),
        log_z_sq=total_M(log_z_BT.square()),
    )


def total_loss(sums: LossSums, weights_M: Tensor, z_loss: float, normalizer: Tensor | float) -> Tensor:
    """Return `sum_m w_m (ce_m + z_loss * log_z_sq_m) / normalizer`, a scalar in nats.

    Args:
        sums: The result of `modality_losses` or `chunked_losses`.
        weights_M: Weight of each modality. For a chunked loss, pass the same ``weights_M`` and ``z_loss`` as to
            `chunked_losses`: they are already in its sums.
        z_loss: Coefficient of log(Z)^2.
        normalizer: Usually the number of trained targets in the optimizer step, over all micro-batches and ranks.
    """
    total = _weighted(sums, weights_M, z_loss).sum() if sums.total is None else sums.total
    return total / normalizer


def loss_parts(sums: LossSums, weights_M: Tensor, z_loss: float, normalizer: Tensor | float) -> Tensor:
    """Return the contribution of each modality's targets to `total_loss`, (M,), with the same normalizer."""
    parts_M = _weighted(sums, weights_M, z_loss) if sums.total is None else sums.parts_M
    if parts_M is None:
        raise ValueError("This chunked loss has no parts: call chunked_losses with by_modality=True.")
    return parts_M / normalizer


def _weighted(sums: LossSums, weights_M: Tensor, z_loss: float) -> Tensor:
    per_modality_M = sums.ce + z_loss * sums.log_z_sq if z_loss else sums.ce
    return weights_M * per_modality_M


def modality_sums(sums: LossSums, batch: TokenBatch) -> Tensor:
    """Return the sums by target modality, (R, M), in fp32: count, cross-entropy and log Z.

    If the floor of each target is known, a fourth row has the sum of the floors."""
    rows = [sums.count, sums.ce, sums.log_z]
    if batch.target_surprise_BT is not None:
        selected_BTM = selected_of(batch.target_modality_BT, batch.target_mask_BT, len(sums.count))
        known_BT = at_least_fp32(batch.target_surprise_BT)  # precision bf16-true casts the batch to bf16
        rows.append(torch.where(selected_BTM, known_BT[..., None], 0.0).sum((0, 1)).to(sums.count.dtype))
    return torch.stack(rows).detach().float()


def modality_means(sums_RM: list[list[float]], names: tuple[str, ...], prefix: str = "") -> dict[str, float]:
    """Return the mean loss, log Z and excess loss by modality, as tags; a modality without a target is left out.

    The excess loss is the loss minus the floor of the same targets.
    """
    values: dict[str, float] = {}
    for name, count, ce, log_z, *floor in zip(names, *sums_RM, strict=True):
        if count:
            values |= {tag(prefix + "loss", name): ce / count, tag(prefix + "log_z", name): log_z / count}
            values |= {tag(prefix + "excess", name): (ce - f) / count for f in floor}
    return values


def chunked_losses(
    hidden_BTD: Tensor,
    head_VD: Tensor,
    targets_BT: Tensor,
    target_modality_BT: Tensor,
    target_mask_BT: Tensor,
    weights_M: Tensor,
    z_loss: float,
    chunk: int,
    softcap: float | None = None,
    by_modality: bool = False,
    compiled: bool = False,
) -> LossSums:
    """Return `modality_losses` of these hidden states, with the logits of one chunk in memory at a time.

    The forward pass computes each chunk's logits once, and from them the gradients of the hidden states, (B, T, D),
    and of the head, (V, D), in at least fp32. The weights and the z-loss must therefore be known in
    the forward pass, and only `LossSums.total`, which `total_loss` uses, has a gradient. Matrix products run in
    the autocast dtype, and all other operations in at least fp32, as in `modality_losses`.

    The loss of a target depends only on the hidden state of its position, so all modalities share one gradient of the
    hidden states. If `by_modality` is set, the head also gets one gradient per modality, (M, V, D), at the cost of M
    more products per chunk. The gradient of the total loss stays bit-identical.

    Args:
        hidden_BTD: Input of the head.
        head_VD: Weight of the head, tied to the embedding or not.
        targets_BT: Ids of the targets. This and the next two arguments are as in `modality_losses`.
        target_modality_BT: Modality number of each target.
        target_mask_BT: Whether a target is trained on.
        weights_M: Weight of each modality, (M,).
        z_loss: Coefficient of log(Z)^2.
        chunk: C, at least 1. The result does not depend on it, up to rounding.
        softcap: Logits become `softcap * tanh(logit / softcap)`; None applies no cap.
        by_modality: Whether `loss_parts` will be differentiated, besides `total_loss`.
        compiled: Whether to compile the operations on a chunk's logits into fewer passes.
    """
    selected_BTM = selected_of(target_modality_BT, target_mask_BT, len(weights_M))
    wide = torch.promote_types(hidden_BTD.dtype, torch.float32)
    group_mask_BTG = target_mask_BT[..., None]
    if by_modality:
        group_mask_BTG = torch.cat([group_mask_BTG, selected_BTM], dim=-1)
    total_G, ce_N, log_z_N = _Chunks.apply(
        hidden_BTD.flatten(0, 1),
        head_VD,
        targets_BT.where(target_mask_BT, 0).flatten(),
        torch.where(selected_BTM, weights_M.to(wide), 0.0).sum(-1).flatten(),
        group_mask_BTG.flatten(0, 1),
        z_loss,
        chunk,
        softcap,
        torch.is_grad_enabled(),
        _compiled() if compiled else _terms,
    )
    sums = sum_by_modality(ce_N.view_as(targets_BT), log_z_N.view_as(targets_BT), selected_BTM)
    return replace(sums, total=total_G[0], parts_M=total_G[1:] if by_modality else None)


class _Chunks(torch.autograd.Function):
    """Returns (total_G, ce_N, log_z_N). Only total_G has gradients, for the hidden states and the head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        index_N: Tensor,
        weight_N: Tensor,
        group_mask_NG: Tensor,
        z_loss: float,
        chunk: int,
        softcap: float | None,
        train: bool,
        terms: Callable[..., tuple[Tensor, Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        device, narrow, wide = hidden_ND.device.type, hidden_ND.dtype, weight_N.dtype
        if torch.is_autocast_enabled(device) and narrow != torch.float64:
            narrow = torch.get_autocast_dtype(device)
        N, G = group_mask_NG.shape
        ce_N, log_z_N = weight_N.new_empty(N), weight_N.new_empty(N)
        # `train` is an argument, because gradients are always disabled inside the forward pass of a Function.
        d_hidden_ND = hidden_ND.new_empty(hidden_ND.shape if train else 0, dtype=narrow)
        d_head_GVD = head_VD.new_zeros((G, *head_VD.shape) if train else 0, dtype=wide)
        with torch.autocast(device, enabled=False):
            cast_VD = head_VD.to(narrow)  # cast once; autocast would cast for every chunk
            room_CV = hidden_ND.new_empty(min(chunk, N), len(head_VD), dtype=narrow)
            for start in range(0, N, chunk):
                rows = slice(start, start + chunk)
                hidden_CD, index_C1, weight_C1 = (hidden_ND[rows].to(narrow), index_N[rows, None], weight_N[rows, None])
                logits_CV = torch.mm(hidden_CD, cast_VD.T, out=room_CV[: len(hidden_CD)])
                ce_N[rows], log_z_N[rows], d_logits_CV = terms(logits_CV, index_C1, weight_C1, z_loss, softcap, train)
                if d_logits_CV is None:
                    continue
                torch.mm(d_logits_CV, cast_VD, out=d_hidden_ND[rows])
                _add_product(d_head_GVD[0], d_logits_CV.T, hidden_CD)
                for g in range(1, G):
                    masked_CD = torch.where(group_mask_NG[rows, g, None], hidden_CD, 0.0)
                    _add_product(d_head_GVD[g], d_logits_CV.T, masked_CD)
        value_N = ce_N + z_loss * log_z_N.square() if z_loss else ce_N
        total_G = torch.where(group_mask_NG, (weight_N * value_N)[:, None], 0.0).sum(0)
        ctx.save_for_backward(d_hidden_ND, d_head_GVD, group_mask_NG)
        ctx.dtypes = hidden_ND.dtype, head_VD.dtype
        ctx.mark_non_differentiable(ce_N, log_z_N)
        return total_G, ce_N, log_z_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up_G: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        d_hidden_ND, d_head_GVD, group_mask_NG = ctx.saved_tensors
        of_hidden, of_head = ctx.dtypes
        hidden_ND = head_VD = None
        if ctx.needs_input_grad[0]:
            hidden_ND = (d_hidden_ND * torch.where(group_mask_NG, up_G, 0.0).sum(-1, keepdim=True)).to(of_hidden)
        if ctx.needs_input_grad[1]:
            head_VD = up_G[0] * d_head_GVD[0]
            for up, d_head_VD in zip(up_G[1:], d_head_GVD[1:], strict=True):
                head_VD += up * d_head_VD
            head_VD = head_VD.to(of_head)
        return hidden_ND, head_VD, *([None] * 8)


def _terms(
    logits_CV: Tensor, index_C1: Tensor, weight_C1: Tensor, z_loss: float, softcap: float | None, train: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the cross-entropy and log Z of a chunk, and the weighted gradient of its logits in their dtype."""
    raw, wide_CV = logits_CV.dtype, capped(logits_CV.to(weight_C1.dtype), softcap)
    target_C, largest_C = wide_CV.gather(-1, index_C1)[:, 0], wide_CV.amax(-1)
    if torch.compiler.is_compiling():
        sum_C = (wide_CV - largest_C[:, None]).exp().sum(-1)
        p_CV = (wide_CV - largest_C[:, None]).exp() / sum_C[:, None]
        log_sum_C = sum_C.log()
    else:  # softmax takes one pass; its largest probability is 1 / sum_C
        p_CV = torch.softmax(wide_CV, dim=-1)
        log_sum_C = -p_CV.amax(-1).log()
    ce_C, log_z_C = (largest_C - target_C) + log_sum_C, largest_C + log_sum_C
    if not train:
        return ce_C, log_z_C, None
    # d ce = softmax - onehot, d log Z = softmax. This runs in place, because these are the largest tensors here. The
    # entry of the target is set last, so that all other entries take one pass over the chunk.
    scale_C1 = 1 + 2 * z_loss * log_z_C[:, None] if z_loss else torch.ones_like(weight_C1)
    target_C1 = (torch.expm1(-ce_C[:, None]) + (scale_C1 - 1) * torch.exp(-ce_C[:, None])) * weight_C1
    grad_CV = p_CV.mul_(scale_C1 * weight_C1)
    if softcap is not None:
        slope_CV = 1 - (wide_CV / softcap).square()
        grad_CV, target_C1 = grad_CV * slope_CV, target_C1 * slope_CV.gather(-1, index_C1)
    return ce_C, log_z_C, grad_CV.to(raw).scatter_(-1, index_C1, target_C1.to(raw))


def _add_product(total_VD: Tensor, a_VC: Tensor, b_CD: Tensor) -> None:
    if total_VD.dtype == a_VC.dtype:
        total_VD.addmm_(a_VC, b_CD)
    else:
        total_VD += a_VC @ b_CD


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    return torch.compile(_terms, fullgraph=True, dynamic=False)
