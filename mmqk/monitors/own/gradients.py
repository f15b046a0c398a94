"""Measures gradients in backward passes of its own: how the modalities agree over the two halves of a batch, and the
sharpness of the loss along Adam's step.

Shapes: M modalities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor
from torch.optim import Optimizer

from mmqk.data.batch import TokenBatch
from mmqk.distributed import rank, summed
from mmqk.model import EarlyFusionTransformer
from mmqk.model.transformer import evaluation_mode
from mmqk.monitors.formulas.reduce import selection
from mmqk.monitors.formulas.weights import Gradients, HalfProducts, half_products
from mmqk.store.metrics import tag

MOVED = 1e-4  # of the norm of the weights, for the differences of `sharpness`

# Returns the part of a batch's loss from each modality's targets, (M,), divided by the batch's `step_targets`.
LossParts = Callable[[TokenBatch], Tensor]


def gradient_agreement(model: EarlyFusionTransformer, batch: TokenBatch, loss_parts: LossParts) -> dict[str, float]:
    """Return, by tag, the cosine, signal and noise of the modalities' gradients by layer and over all parameters.

    The halves are the even and the odd sequences, numbered over all ranks; every rank has a batch of equal size. The
    call runs in evaluation mode (so without dropout), does not write ``.grad``, and is collective with several ranks.
    It costs a forward pass for each half, and for each half and modality a backward pass and the memory of all
    gradients.

    A modality without a target in one of the halves is left out, and so is a cosine that is NaN
    (`HalfProducts.cosine`).

    Args:
        model: its parameters ``blocks.N...`` belong to layer N.
        batch: has at least 2 sequences.
        loss_parts: returns the loss of each modality's targets, computed with ``model`` as in training.

    Raises:
        ValueError: the batch has one sequence.
    """
    if len(batch.ids_BT) < 2:
        raise ValueError("monitor.gradient_agreement needs two sequences in a micro-batch: raise data.batch_size.")
    names = model.config.modalities
    before = rank() * len(batch.ids_BT)  # number of sequences on the ranks before this one

    def every_other(start: int) -> TokenBatch:
        return batch._map(lambda t: t[(before + start) % 2 :: 2] if t.ndim else t)

    halves = [every_other(0), every_other(1)]
    counts_2M = [
        summed(selection(half.target_modality_BT, half.target_mask_BT, len(names)).sum((1, 2))) for half in halves
    ]
    present = (torch.stack(counts_2M) > 0).all(0).nonzero()[:, 0].tolist()
    if not present:
        return {}
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with evaluation_mode(model):
        gradients = [  # by half, then modality
            _gradients(loss_parts(replace(half, step_targets=count_M.sum())), present, [p for _, p in parameters])
            for half, count_M in zip(halves, counts_2M, strict=True)
        ]
    groups: dict[int | None, list[int]] = {}
    for i, (name, _) in enumerate(parameters):
        groups.setdefault(int(name.split(".")[1]) if name.startswith("blocks.") else None, []).append(i)
    products = {
        layer: half_products(
            [tuple([half[m][i] for i in group] for half in gradients) for m in range(len(present))]  # type: ignore[misc]
        )
        for layer, group in groups.items()
    }
    return _by_tag(products, [names[m] for m in present])


@torch.no_grad()
def sharpness(model: EarlyFusionTransformer, optimizer: Optimizer, loss: Callable[[], Tensor]) -> dict[str, float]:
    """Return by tag the curvature of a loss along Adam's step, times the learning rate.

    It is ``g^T P H g / |g|^2`` with the gradient g, the Hessian H and ``P = lr / ((1 - beta1^t) (sqrt(v_hat) + eps))``.
    Without momentum a quadratic loss grows if it is above 2, and with momentum above ``2 (1 + beta1) / (1 - beta1)``
    (arXiv 2506.04805). ``H g`` is the difference of two gradients at weights moved by `MOVED` of their norm, so the
    call costs three forward and backward passes. It runs in evaluation mode and restores the weights. It returns
    nothing if a parameter has no second moment of Adam yet, or is not in fp32.

    Args:
        model: the model of the loss.
        optimizer: Adam or AdamW of its parameters, after at least one step.
        loss: computes the loss with the weights of the model.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    moved = [p for p in model.parameters() if p in groups]
    moments = [optimizer.state.get(p, {}).get("exp_avg_sq") for p in moved]
    if any(v is None or v.shape != p.shape or p.dtype.itemsize < 4 for p, v in zip(moved, moments, strict=True)):
        return {}

    def gradient() -> list[Tensor]:
        with torch.enable_grad():
            return list(torch.autograd.grad(loss(), moved, materialize_grads=True))

    kept = [p.detach().clone() for p in moved]
    with evaluation_mode(model):
        grads = gradient()
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        size = MOVED * torch.stack([p.square().sum() for p in kept]).sum().sqrt()
        ends = []
        for sign in (1, -1):
            for p, before, g in zip(moved, kept, grads, strict=True):
                p.copy_(before + sign * size / norm * g)
            ends.append(gradient())
        for p, before in zip(moved, kept, strict=True):
            p.copy_(before)
    total = norm.new_zeros(())
    for p, v, g, after, other in zip(moved, moments, grads, *ends, strict=True):
        (beta1, beta2), t = groups[p]["betas"], optimizer.state[p]["step"]
        root_v = (v / (1 - beta2**t)).sqrt() + groups[p]["eps"]
        total += (groups[p]["lr"] / (1 - beta1**t) * g / root_v * (after - other)).sum()
    return {"sharpness": float(total / (2 * size * norm))}


def _gradients(parts_M: Tensor, present: list[int], parameters: list[Tensor]) -> list[Gradients]:
    gradients: list[Gradients] = []
    for m in present:
        of_modality = torch.autograd.grad(parts_M[m], parameters, retain_graph=m != present[-1], materialize_grads=True)
        gradients.append([summed(g) for g in of_modality])
    return gradients


def _by_tag(products: dict[int | None, HalfProducts], names: list[str]) -> dict[str, float]:
    """Return the agreement of each layer and, without a layer in the tag, of all parameters."""
    total = sum(list(products.values())[1:], next(iter(products.values())))
    groups = {layer: product for layer, product in products.items() if layer is not None} | {None: total}
    by_tag: dict[str, Tensor] = {}
    for layer, product in groups.items():
        for statistic, values in (("grad_signal", product.signal), ("grad_noise", product.noise)):
            by_tag |= {tag(statistic, name, layer=layer): values[m] for m, name in enumerate(names)}
        cosine_MM = product.cosine
        for (m, name), (n, other) in combinations(enumerate(names), 2):
            by_tag[tag("grad_agreement", name, other, layer=layer)] = cosine_MM[m, n]
    numbers = dict(zip(by_tag, torch.stack([*by_tag.values()]).tolist(), strict=True))  # one transfer
    return {t: x for t, x in numbers.items() if not (t.startswith("grad_agreement") and math.isnan(x))}
