"""The radial budget: how much each modality's gradients increase the norm of a weight matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamUpdate:
    """One AdamW step of one tensor.

    Attributes:
        before: the tensor before the step.
        after: the tensor after it.
        second_moment: Adam's v after the step, before bias correction.
        step: number of updates including this one; a tensor stays on its device.
        lr: learning rate of this step.
        betas: decays of the moments.
        eps: epsilon.
        weight_decay: as in torch's AdamW: the tensor first shrinks by ``lr * weight_decay`` of itself.
    """

    before: Tensor
    after: Tensor
    second_moment: Tensor
    step: int | Tensor
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class RadialBudget:
    """Splits the change of ``|W|^2`` of one tensor over a window of AdamW steps.

    Exact for every step: ``d|W|^2 = sum_a 2<W, U_a> + 2<W, U_decay> + |dW|^2`` with
    ``U_a = -lr m_a / (sqrt(v) + eps)`` after bias corrections, where m_a is the running mean of modality a's
    gradients. v is Adam's: the step is linear in m but not in v, so the modalities share v. The sum of
    ``-<W, gradient_a>`` does not measure growth: under QK-Norm it is always 0.

    Args:
        first_moment: Adam's m before the window; its part decays with beta1 and is not attributed to a modality. None
            before the tensor's first step.
        modalities: number of modalities.

    Attributes:
        by_modality: sum of ``2<W, U_a>`` for each modality.
        decay: part of weight decay.
        step: sum of ``|dW|^2``; a step at right angles to W increases its norm.
        unattributed: part of the first moment from before the window.
        rest: changes that AdamW did not make: rounding, QK-Clip.
        total: the measured change of ``|W|^2``, which is the sum of the other parts.
        steps: number of steps in the window.
    """

    def __init__(self, first_moment: Tensor | None, modalities: int) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        self.by_modality: list[Tensor] = [zero] * modalities
        self.decay = self.step = self.unattributed = self.rest = self.total = zero
        self.steps = 0
        self._earlier_moment: Tensor | float = 0.0 if first_moment is None else first_moment.double()
        self._moments: list[Tensor | float] = [0.0] * modalities

    def add(self, gradients: Sequence[Tensor | None], update: AdamUpdate) -> None:
        """Add one step.

        Args:
            gradients: gradient of each modality's loss over the global denominator, clipped like the step's gradient,
                which is their sum; None if the loss does not depend on the tensor.
            update: the step.
        """
        beta1, beta2 = update.betas
        w, dw = update.before.double(), update.after.double() - update.before.double()
        root_v = (update.second_moment.double() / (1 - beta2**update.step)).sqrt()
        factor = -update.lr / (1 - beta1**update.step) / (root_v + update.eps)

        def radial(moment: Tensor | float) -> Tensor:
            return 2 * (w * factor * moment).sum()

        self._earlier_moment = beta1 * self._earlier_moment
        for a, gradient in enumerate(gradients):
            new = 0.0 if gradient is None else gradient.double()
            self._moments[a] = beta1 * self._moments[a] + (1 - beta1) * new
            self.by_modality[a] = self.by_modality[a] + radial(self._moments[a])
        adam = factor * (self._earlier_moment + sum(self._moments)) - update.lr * update.weight_decay * w
        self.unattributed = self.unattributed + radial(self._earlier_moment)
        self.decay = self.decay - 2 * update.lr * update.weight_decay * w.square().sum()
        self.step = self.step + dw.square().sum()
        self.rest = self.rest + 2 * (w * (dw - adam)).sum()
        self.total = self.total + update.after.double().square().sum() - w.square().sum()
        self.steps += 1
