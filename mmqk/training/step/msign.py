"""MSign: replaces attention matrices by their orthogonal factors, so that no singular value approaches 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmqk.model import EarlyFusionTransformer

MATRICES = ("w_q", "w_k", "w_v", "w_o")


@torch.no_grad()
def orthogonalize(model: EarlyFusionTransformer, skip: Tensor) -> None:
    """Replace each W of attention by ``U V^T |W| / |U V^T|`` with ``W = U S V^T`` (arXiv 2602.01734, Algorithm 1),
    unless ``skip`` is true."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(part in MATRICES for part in name.split(".")):
            module.weight.copy_(torch.where(skip, module.weight, orthogonal(module.weight)))


def orthogonal(weight: Tensor) -> Tensor:
    """Return the orthogonal polar factor, scaled to the Frobenius norm of ``weight``; return a non-finite matrix
    unchanged."""
    wide = weight.float()
    if not wide.isfinite().all():
        return weight
    u, _, vt = torch.linalg.svd(wide, full_matrices=False)
    sign = u @ vt
    return (sign * (wide.norm() / sign.norm())).to(weight.dtype)
