"""Size and rank of a weight matrix, and its radial budget: how much each modality's gradients increase its norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class AdamUpdate:
    """One step of AdamW or AdamH for one tensor.

    Attributes:
        before: the tensor before the step.
        after: the tensor after the step.
        second_moment: Adam's v after the step, before bias correction.
        step: number of updates including this one; may be a tensor, which stays on its device.
        lr: learning rate of this step, after update clipping.
        betas: decays of the moments.
        eps: epsilon.
        weight_decay: as in torch's AdamW, which first multiplies the tensor by ``1 - lr * weight_decay``.
        fixed_norm: whether the step is AdamH's, which keeps ``|W|`` and has no weight decay.
    """

    before: Tensor
    after: Tensor
    second_moment: Tensor
    step: int | Tensor
    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    fixed_norm: bool = False


class RadialBudget:
    """Splits the change of ``|W|^2`` of one tensor over a window of optimizer steps.

    The split is exact for every step of AdamW: ``d|W|^2 = sum_a 2<W, U_a> + 2<W, U_decay> + |dW|^2`` with
    ``U_a = -lr m_a / (sqrt(v) + eps)`` after bias corrections, where m_a is the running mean of modality a's
    gradients and v is Adam's second moment. The step is linear in m but not in v, so the modalities share v. The sum
    of ``-<W, gradient_a>`` does not measure growth: under QK-Norm it is always 0.

    AdamH's step is ``c (W + s U) - W`` with U from AdamW, ``s = |W| lr / |U|`` and ``c = |W| / |W + s U|``. For
    given s and c this step is linear in m, so the modalities share s, c and v. A modality's part is
    ``2<W, c s U_a>``, the part of decay is ``2<W, (c - 1) W>``, and the total is 0.

    The update of Muon is not linear in m, so `add_whole` splits it into decay and a part without a modality.

    Args:
        first_moment: Adam's m before the window, whose share in later steps decays with beta1 and is not attributed
            to a modality; None before the tensor's first step.
        modalities: number of modalities.

    Attributes:
        by_modality: sum of ``2<W, U_a>`` for each modality.
        decay: the part from weight decay, or from AdamH's return to the fixed norm.
        step: sum of ``|dW|^2``; even a step at a right angle to W increases ``|W|``.
        unattributed: the part from gradients before the window, which Adam's first moment still contains; with Muon,
            the part from all updates.
        rest: the part from changes that the optimizer did not make: rounding, QK-Clip.
        total: the measured change of ``|W|^2``, which is the sum of the other parts.
    """

    def __init__(self, first_moment: Tensor | None, modalities: int) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        self.by_modality: list[Tensor] = [zero] * modalities
        self.decay = self.step = self.unattributed = self.rest = self.total = zero
        self._earlier_moment: Tensor | float = 0.0 if first_moment is None else first_moment.double()
        self._moments: list[Tensor | float] = [0.0] * modalities

    def add(self, gradients: Sequence[Tensor | None], update: AdamUpdate) -> None:
        """Add one step.

        Args:
            gradients: gradient of each modality's part of the loss, times the clipping factor of the step. The sum of
                these gradients is the step's gradient. None if the part does not depend on the tensor.
            update: the step.
        """
        beta1, beta2 = update.betas
        w, dw = update.before.double(), update.after.double() - update.before.double()
        root_v = (update.second_moment.double() / (1 - beta2**update.step)).sqrt()
        factor = -update.lr / (1 - beta1**update.step) / (root_v + update.eps)

        shrink: Tensor | float = update.lr * update.weight_decay
        self._earlier_moment = beta1 * self._earlier_moment
        for a, gradient in enumerate(gradients):
            new = 0.0 if gradient is None else gradient.double()
            self._moments[a] = beta1 * self._moments[a] + (1 - beta1) * new
        moment = self._earlier_moment + sum(self._moments)
        if update.fixed_norm:
            factor, shrink = _at_fixed_norm(w, factor, moment, update.lr)

        def radial(moment: Tensor | float) -> Tensor:
            return 2 * (w * factor * moment).sum()

        for a, of_modality in enumerate(self._moments):
            self.by_modality[a] = self.by_modality[a] + radial(of_modality)
        self.unattributed = self.unattributed + radial(self._earlier_moment)
        self.rest = self.rest + 2 * (w * (dw - (factor * moment - shrink * w))).sum()
        self._add_change(w, update.after.double(), shrink)

    def add_whole(self, before: Tensor, after: Tensor, shrink: float) -> None:
        """Add one step whose update cannot be split by modality.

        Args:
            before: the tensor before the step.
            after: the tensor after the step.
            shrink: the share of ``before`` that weight decay removes.
        """
        w, dw = before.double(), after.double() - before.double()
        self.unattributed = self.unattributed + 2 * (w * (dw + shrink * w)).sum()
        self._add_change(w, after.double(), shrink)

    def _add_change(self, before: Tensor, after: Tensor, shrink: Tensor | float) -> None:
        self.decay = self.decay - 2 * shrink * before.square().sum()
        self.step = self.step + (after - before).square().sum()
        self.total = self.total + after.square().sum() - before.square().sum()


def _at_fixed_norm(w: Tensor, factor: Tensor, moment: Tensor | float, lr: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return AdamH's factor on the first moment, and the share of ``w`` that the return to the fixed norm removes."""
    update = factor * moment  # -lr u
    length, norm = w.norm(), update.norm()
    scale = torch.where(norm > 0, lr * length / norm, 0.0)
    moved = (w + scale * update).norm()
    back = torch.where(moved > 0, length / moved, 0.0)
    return back * scale * factor, 1 - back
