"""Measures the size and rank of a weight matrix, and the spectral entropy of the change of W_q W_k^T.

Shapes: H query heads, G key heads, K head_dim, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqk.monitors.formulas.reduce import Sums


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


@torch.no_grad()
def product_change_entropy(
    q_HKD: Tensor, k_GKD: Tensor, earlier_q_HKD: Tensor, earlier_k_GKD: Tensor
) -> Sums:
    """Return the spectral entropy of the first-order change of ``W_q W_k^T`` of each head, in nats. The result
    has the count and sum over heads.

    The change is ``D2 = dW_q W_k^T + W_q dW_k^T`` with the earlier W_q and W_k; it is (D, D) and has rank 2 K at
    most. The entropy is ``-sum p log p`` with ``p = s^2 / sum s^2``, s the singular values of D2 (arXiv 2606.28116,
    section 3.4, where the effective rank is the exponential of the entropy). It is 0 for one direction and at most
    log(2 K). ``D2 = [dW_q, W_q] [W_k, dW_k]^T``, so its singular values are those of the product of the R factors of
    two thin QR decompositions; no (D, D) matrix is computed.

    Heads whose product did not change are left out. The entropy of a head is NaN if one of its matrices is not
    finite. The computation is in fp32.

    Args:
        q_HKD: W_q of each head, as rows of the weight of a linear layer.
        k_GKD: W_k of each key head; H is a multiple of G, and H / G consecutive query heads share one key head.
        earlier_q_HKD: W_q at the start of the change.
        earlier_k_GKD: W_k at the start of the change.
    """
    shared = len(q_HKD) // len(k_GKD)
    before_q, before_k = earlier_q_HKD.float(), earlier_k_GKD.float()
    change_q, change_k = q_HKD.float() - before_q, k_GKD.float() - before_k
    left_HD2K = torch.cat([change_q, before_q], 1).mT
    right_GD2K = torch.cat([before_k, change_k], 1).mT
    left_HRK, right_GRK = (torch.linalg.qr(x, mode="r").R for x in (left_HD2K, right_GD2K))
    core_HRR = left_HRK @ right_GRK.repeat_interleave(shared, 0).mT
    finite_H = core_HRR.isfinite().all(-1).all(-1)
    s_HR = torch.linalg.svdvals(core_HRR.where(finite_H[:, None, None], 0.0))
    largest_H = s_HR.amax(-1)
    square_HR = (s_HR / largest_H[:, None]).square()  # divide first: small squares underflow
    entropy_H = torch.special.entr(square_HR / square_HR.sum(-1, keepdim=True)).sum(-1)
    changed_H = largest_H != 0
    return Sums(
        count=(changed_H | ~finite_H).sum().float().view(1),
        sum=torch.where(finite_H, torch.where(changed_H, entropy_H, 0.0), torch.nan).sum().view(1),
    )
