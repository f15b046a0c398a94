"""Cosine between the modalities' gradients, estimated from two disjoint halves of a batch.

The gradient of one batch is mostly noise, which shrinks the plain cosine. Two disjoint halves A and B have
independent noise, so the expected product of their gradients contains only the signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = Sequence[Tensor | None]  # one for each parameter; None if the loss does not depend on it


@dataclass(frozen=True)
class Agreement:
    """Gradient statistics of M modalities over a group of parameters.

    Attributes:
        cosine: ``(<g_a^A, g_b^B> + <g_b^A, g_a^B>) / 2 / sqrt(<g_a^A, g_a^B> <g_b^A, g_b^B>)``, (M, M): an estimate
            of the true gradients' cosine that noise does not shrink. Both products of the numerator have the same
            mean; their average has less noise and does not depend on which half is A. The cosine can be outside
            [-1, 1]. It is NaN if the signal of a modality is not above 0: the batch is then too small for an
            estimate.
        signal: ``<g^A, g^B>``, an unbiased estimate of the squared length of the true gradient, (M,).
        noise: ``|g^A - g^B|^2 / 2``, an estimate of the variance of a half's gradient, (M,).
    """

    cosine: Tensor
    signal: Tensor
    noise: Tensor


@dataclass(frozen=True)
class HalfProducts:
    """Dot products of gradients over a group of parameters; add two `HalfProducts` to combine their groups.

    Attributes:
        cross_MM: ``<g_a^A, g_b^B>``.
        noise: ``|g^A - g^B|^2 / 2``, (M,).
    """

    cross_MM: Tensor
    noise: Tensor

    def __add__(self, other: HalfProducts) -> HalfProducts:
        return HalfProducts(self.cross_MM + other.cross_MM, self.noise + other.noise)

    def agreement(self) -> Agreement:
        """Return the cosine, signal and noise of the modalities over these parameters."""
        signal = self.cross_MM.diagonal()
        length = signal.clamp_min(0).sqrt()
        cosine = (self.cross_MM + self.cross_MM.T) / 2 / (length[:, None] * length)
        positive = (signal > 0)[:, None] & (signal > 0)
        return Agreement(torch.where(positive, cosine, torch.nan), signal, self.noise)


def half_products(halves: Sequence[tuple[Gradients, Gradients]]) -> HalfProducts:
    """Return the dot products of the two halves' gradients over one group of parameters, in fp64.

    Args:
        halves: for each modality its gradients on half A and on half B, each divided by the number of targets in its
            half.
    """
    M = len(halves)
    flat = [tuple(_flat(half, halves) for half in pair) for pair in halves]
    cross_MM = torch.stack([torch.stack([flat[a][0] @ flat[b][1] for b in range(M)]) for a in range(M)])
    return HalfProducts(cross_MM, torch.stack([(a - b).square().sum() / 2 for a, b in flat]))


def _flat(half: Gradients, halves: Sequence[tuple[Gradients, Gradients]]) -> Tensor:
    """Return the gradients as one vector, with 0 for a parameter that this loss does not depend on.

    A parameter that no loss depends on is left out.
    """
    parts = []
    for i, gradient in enumerate(half):
        if gradient is None:
            other = next((g[i] for pair in halves for g in pair if g[i] is not None), None)
            if other is None:
                continue
            gradient = torch.zeros_like(other)
        parts.append(gradient.double().flatten())
    return torch.cat(parts)
