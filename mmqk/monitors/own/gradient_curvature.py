"""Computes the curvature of the loss of a probe's batch along the gradient of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer
from mmqk.model.evaluation import evaluation_mode
from mmqk.monitors.formulas.curvature import adam_scale, curvature, gradient_and_product


def batch_loss(model: EarlyFusionTransformer, batch: TokenBatch, weights_M: Tensor, z_loss: float) -> Tensor:
    """Return the training loss of a batch over its own trained targets, computed with operations that can be
    differentiated twice.

    The model runs eagerly and with dense attention, in evaluation mode (so without dropout) and outside autocast.

    Args:
        model: the trained model; its mode is restored.
        batch: has at least one trained target.
        weights_M: loss weight of each modality.
        z_loss: coefficient of log(Z)^2.
    """
    eager = torch.compiler.set_stance("force_eager")
    plain = torch.autocast(batch.ids_BT.device.type, enabled=False)
    with evaluation_mode(model), eager, plain, model.use_backend("math"):
        # A sink makes the blocks run eagerly and without recomputation.
        logits_BTV = model(batch.ids_BT, batch.modality_BT, batch.document_BT, sink=lambda *_: None)
    mask_BT = batch.target_mask_BT
    logits_NV, weight_N = logits_BTV[mask_BT], weights_M[batch.target_modality_BT[mask_BT]]
    loss_N = F.cross_entropy(logits_NV, batch.targets_BT[mask_BT], reduction="none")
    if z_loss:
        loss_N = loss_N + z_loss * logits_NV.logsumexp(-1).square()
    return (weight_N * loss_N).sum() / len(loss_N)


def gradient_curvature(
    model: EarlyFusionTransformer,
    batch: TokenBatch,
    weights_M: Tensor,
    z_loss: float,
    optimizer: Optimizer | None = None,
) -> dict[str, float]:
    """Return, by tag, the `curvature` along the gradient of `batch_loss`; empty if no target is trained.

    ``curvature_adam`` is the curvature with Adam's preconditioner. It needs Adam's second moment of every parameter,
    so it is left out before the first step, with split or sharded moments, and with another optimizer.

    The function runs a forward pass, a backward pass, and a second backward pass through the graph of the first two
    passes. It needs the memory of this graph. It changes no weight, mode, ``.grad`` or random state.

    Args:
        model: the trained model.
        batch: all of its sequences are used.
        weights_M: loss weight of each modality.
        z_loss: coefficient of log(Z)^2.
        optimizer: the optimizer of the run; None to leave out ``curvature_adam``.
    """
    if not batch.target_mask_BT.any():
        return {}
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        loss = batch_loss(model, batch, weights_M, z_loss)
        gradients, products = gradient_and_product(loss, parameters)
    values = {"curvature": curvature(gradients, products)}
    scales = None if optimizer is None else _adam_scales(optimizer, parameters)
    if scales is not None:
        values["curvature_adam"] = curvature(gradients, products, scales)
    return {name: float(value) for name, value in values.items()}


@torch.no_grad()
def _adam_scales(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """Return `adam_scale` of each parameter; None with AdamH, or if a parameter has no second moment, or one of
    another shape."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    scales = []
    for p in parameters:
        state, group = optimizer.state.get(p, {}), groups.get(p, {})
        moment = state.get("exp_avg_sq")
        if moment is None or moment.shape != p.shape or group.get("fixed_norm"):
            return None
        step = torch.as_tensor(state["step"], dtype=torch.float32)
        scales.append(adam_scale(moment, step, group["betas"], group["eps"]))
    return scales
