"""Computes the curvature of a loss along its gradient with one Hessian-vector product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradient_and_product(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradient g of a loss and the product ``H g`` with its Hessian, one tensor for each parameter.

    ``H g`` is the gradient of ``g.g / 2``, from a second backward pass. Parameters that the loss does not depend on
    get zeros. ``.grad`` is not written.

    Args:
        loss: a scalar whose operations can be differentiated twice.
        parameters: leaves of the loss's graph.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    half_square = torch.stack([g.square().sum() for g in gradients]).sum() / 2
    products = torch.autograd.grad(half_square, parameters, materialize_grads=True)
    return [g.detach() for g in gradients], list(products)


@torch.no_grad()
def curvature(
    gradients: Sequence[Tensor], products: Sequence[Tensor], scales: Sequence[Tensor] | None = None
) -> Tensor:
    """Return ``g.S H g / g.g`` with S the diagonal matrix of the scales, or ``g.H g / g.g`` without scales.

    The result is NaN if g is 0. Gradient descent with a learning rate above 2 / curvature overshoots along its
    gradient; so does Adam if S is its preconditioner (`adam_scale`).
    """
    scaled = products if scales is None else [s * p for s, p in zip(scales, products, strict=True)]
    return _dot(gradients, scaled) / _dot(gradients, gradients)


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x * y).double().sum() for x, y in zip(a, b, strict=True)]).sum()


def adam_scale(second_moment: Tensor, step: int | Tensor, betas: tuple[float, float], eps: float) -> Tensor:
    """Return the diagonal of Adam's preconditioner, ``(1 - b1) / (1 + b1) / (1 - b1^t) / (sqrt(v_hat) + eps)``.

    See arXiv 2506.04805. Adam is stable on a quadratic loss while the largest eigenvalue of its preconditioned
    Hessian is below 2 / lr.

    Args:
        second_moment: Adam's v, before bias correction.
        step: number of updates so far, t.
        betas: decays of the moments.
        eps: Adam's epsilon.
    """
    beta1, beta2 = betas
    root = (second_moment.float() / (1 - beta2**step)).sqrt() + eps
    return (1 - beta1) / (1 + beta1) / (1 - beta1**step) / root
