"""Cross-entropy and z-loss, summed by the modality of the target. All losses are in nats.

Shapes are in the names: B batch, T tokens, V vocabulary, M modalities.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mmqk.data.batch import TokenBatch
from mmqk.model.norms import at_least_fp32
from mmqk.model.transformer import capped
from mmqk.store import tag


@dataclass(frozen=True)
class Objective:
    """The differentiable part of a chunked loss. It contains the weights and the z-loss passed to `chunked_losses`.

    Attributes:
        total: `sum_m w_m (ce_m + z_loss * log_z_sq_m)`.
        parts_M: The term of each modality in that sum; None unless `by_modality` was set.
    """

    total: Tensor
    parts_M: Tensor | None


@dataclass(frozen=True)
class LossSums:
    """Sums over the trained targets of one batch, by target modality; (M,) each, fp32 (fp64 for fp64 logits).

    Sums can be added over micro-batches and ranks. An absent modality has a count of 0.

    Attributes:
        count: Trained targets.
        ce: Cross-entropy, nats.
        log_z: Log of the output softmax's normalizer, nats.
        log_z_sq: Square of that logarithm.
        objective: For a chunked loss, the tensors that have gradients; the sums then have no gradients.
    """

    count: Tensor
    ce: Tensor
    log_z: Tensor
    log_z_sq: Tensor
    objective: Objective | None = None


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
    total = sums.objective.total if sums.objective else _weighted(sums, weights_M, z_loss).sum()
    return total / normalizer


def loss_parts(sums: LossSums, weights_M: Tensor, z_loss: float, normalizer: Tensor | float) -> Tensor:
    """Return the contribution of each modality's targets to `total_loss`, (M,), with the same normalizer."""
    parts_M = sums.objective.parts_M if sums.objective else _weighted(sums, weights_M, z_loss)
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
