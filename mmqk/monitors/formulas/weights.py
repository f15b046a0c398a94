"""Measures the size and rank of a weight matrix."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def matrix_sizes(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Frobenius norm, spectral norm and stable rank of a matrix, in fp32.

    The stable rank is ``|W|_F^2 / |W|_2^2``: at most the rank, and near 1 if one direction dominates (Rudelson and
    Vershynin 2007; it falls before failures in arXiv 2602.01734). It is NaN for a matrix of zeros. The spectral norm
    is the largest singular value by torch.linalg. For a matrix that is not finite, both norms are infinite or NaN.
    """
    wide_OI = weight_OI.detach().float()
    frobenius = torch.linalg.vector_norm(wide_OI)
    if not bool(torch.isfinite(frobenius)):
        return frobenius, frobenius, frobenius.new_tensor(torch.nan)
    spectral = torch.linalg.matrix_norm(wide_OI, 2)
    return frobenius, spectral, (frobenius / spectral).square()
