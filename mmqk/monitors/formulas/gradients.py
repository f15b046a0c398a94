"""Agreement of the modalities' gradients, and effects of low precision.

The agreement is the cosine between the modalities' gradients, estimated from two disjoint halves of a batch. The
gradient of one batch is mostly noise, which shrinks the plain cosine. Two disjoint halves A and B have independent
noise, so the expected product of their gradients contains only the signal.

The effects of low precision are rounding in a bf16 residual stream, sizes of updates, and Adam's epsilon and second
moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmqk.monitors.formulas.reduce import Sums, sums

Gradients = Sequence[Tensor]  # one for each parameter


@dataclass(frozen=True)
class HalfProducts:
    """Dot products of the gradients of M modalities over a group of parameters; add two `HalfProducts` to combine
    their groups.

    Attributes:
        cross_MM: ``<g_a^A, g_b^B>``.
        noise: ``|g^A - g^B|^2 / 2``, an estimate of the variance of a half's gradient, (M,).
    """

    cross_MM: Tensor
    noise: Tensor

    def __add__(self, other: HalfProducts) -> HalfProducts:
        return HalfProducts(self.cross_MM + other.cross_MM, self.noise + other.noise)

    @property
    def signal(self) -> Tensor:
        """``<g^A, g^B>``, an unbiased estimate of the squared length of the true gradient, (M,)."""
        return self.cross_MM.diagonal()

    @property
    def cosine(self) -> Tensor:
        """``(<g_a^A, g_b^B> + <g_b^A, g_a^B>) / 2 / sqrt(<g_a^A, g_a^B> <g_b^A, g_b^B>)``, (M, M): an estimate of the
        true gradients' cosine that noise does not shrink.

        Both products of the numerator have the same mean; their average has less noise and does not depend on which
        half is A. The cosine can be outside [-1, 1]. It is NaN if the signal of a modality is not above 0: the batch
        is then too small for an estimate.
        """
        length = self.signal.clamp_min(0).sqrt()
        cosine = (self.cross_MM + self.cross_MM.T) / 2 / (length[:, None] * length)
        positive = (self.signal > 0)[:, None] & (self.signal > 0)
        return torch.where(positive, cosine, torch.nan)


def half_products(halves: Sequence[tuple[Gradients, Gradients]]) -> HalfProducts:
    """Return the dot products of the two halves' gradients over one group of parameters, in fp64.

    Args:
        halves: for each modality its gradients on half A and on half B, each divided by the number of targets in its
            half.
    """
    M = len(halves)
    flat = [tuple(torch.cat([g.double().flatten() for g in half]) for half in pair) for pair in halves]
    cross_MM = torch.stack([torch.stack([flat[a][0] @ flat[b][1] for b in range(M)]) for a in range(M)])
    return HalfProducts(cross_MM, torch.stack([(a - b).square().sum() / 2 for a, b in flat]))


@dataclass(frozen=True)
class Absorption:
    """Rounding error of adding a sublayer's output y to a bf16 residual stream x, by modality of the token.

    With ``e = bf16(x + y) - x - y`` over one token's channels:

    Attributes:
        error: ``|e| / |y|``; at 1 the rounding error is as large as y.
        bias: ``-<e, y> / |y|^2``: the share of y that rounding removes; negative if rounding adds to y.
        absorbed: share of ``|y|^2`` in channels where ``bf16(x + y) == x``, which the addition does not change.
    """

    error: Sums
    bias: Sums
    absorbed: Sums


def absorption(x_BTD: Tensor, y_BTD: Tensor, selected_MBT: Tensor) -> Absorption:
    """Return the rounding error of adding y in bf16, for inputs of any precision; x is rounded to bf16 first.

    Args:
        x_BTD: residual stream before the addition.
        y_BTD: the added tensor.
        selected_MBT: which tokens belong to each modality. Tokens with y = 0 are left out.
    """
    x = x_BTD.bfloat16().double()
    y = y_BTD.double()
    rounded = (x + y).bfloat16().double()
    error_BTD = rounded - x - y
    energy_BT = y.square().sum(-1)
    nonzero_MBT = selected_MBT & (energy_BT > 0)
    return Absorption(
        error=sums((error_BTD.square().sum(-1) / energy_BT).sqrt(), nonzero_MBT),
        bias=sums(-(error_BTD * y).sum(-1) / energy_BT, nonzero_MBT),
        absorbed=sums(torch.where(rounded == x, y.square(), 0.0).sum(-1) / energy_BT, nonzero_MBT),
    )


def below_epsilon(second_moment: Tensor, step: int | Tensor, beta2: float, eps: float) -> Tensor:
    """Return the share of a tensor's elements whose ``sqrt(v_hat)`` is below Adam's epsilon, where epsilon determines
    the size of the updates.

    Args:
        second_moment: Adam's v, before bias correction.
        step: number of updates so far.
        beta2: decay of v.
        eps: Adam's epsilon.
    """
    corrected = second_moment.float() / (1 - beta2**step)
    return (corrected.sqrt() < eps).float().mean()


def gradient_over_second_moment(
    gradient: Tensor, second_moment: Tensor, step: int | Tensor, beta2: float, eps: float
) -> Tensor:
    """Return ``sqrt(mean(g^2 / max(v_hat, eps^2)))``, the mean over a tensor's elements.

    It is 1 in the first step, and far above 1 if v is much smaller than the current squared gradient (Wortsman et al.
    2023, arXiv 2304.13013, Algorithm 2).

    Args:
        gradient: the gradient of the latest update, after clipping.
        second_moment: Adam's v after that update, before bias correction.
        step: number of updates so far.
        beta2: decay of v.
        eps: Adam's epsilon.
    """
    corrected = second_moment.float() / (1 - beta2**step)
    return (gradient.float().square() / corrected.clamp_min(eps**2)).mean().sqrt()


def update_size(before: Tensor, after: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """Return the RMS of one update divided by the learning rate (1 for a pure sign step of Adam), and the RMS of the
    update divided by that of the parameter."""
    step_rms = (after.float() - before.float()).square().mean().sqrt()
    return step_rms / lr, step_rms / before.float().square().mean().sqrt()
