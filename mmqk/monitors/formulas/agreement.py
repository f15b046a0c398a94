"""Cosine between the modalities' gradients, estimated from two disjoint halves of a batch.

The gradient of one batch is mostly noise, which shrinks the plain cosine. Two disjoint halves A and B have
independent noise, so the expected product of their gradients contains only the signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
