"""The radial budget: how much each modality's gradients increase the norm of a weight matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass
class RadialBudget:
    """Splits the change of ``|W|^2`` of one tensor over a window of AdamW steps.

    Exact for every step: ``d|W|^2 = sum_a 2<W, U_a> + 2<W, U_decay> + |dW|^2`` where
    ``U_a = -lr m_a / (sqrt(v) + eps)`` with bias corrections, m_a the running mean of modality a's own gradients, and
    v Adam's own: the step is linear in m but not in v, so v is shared by the modalities. Summing
    ``-<W, gradient_a>`` is no alternative: under QK-Norm it is always 0.

    Args:
        first_moment: Adam's m before the window, whose part decays with beta1 and is not attributed to a modality;
            None before the tensor's first step.
        modalities: number of modalities.

    Attributes:
        by_modality: sum of ``2<W, U_a>`` for each.
        decay: part of weight decay.
        step: sum of ``|dW|^2``: a step at right angles to W increases its norm.
        unattributed: part of the first moment from before the window.
        rest: changes that AdamW did not make: rounding, QK-Clip.
        total: the measured change of ``|W|^2``, the sum of all the others.
        steps: number of steps in the window.
    """

    first_moment: Tensor | None
    modalities: int
    by_modality: list[Tensor] = field(init=False)
    decay: Tensor = field(init=False)
    step: Tensor = field(init=False)
    unattributed: Tensor = field(init=False)
    rest: Tensor = field(init=False)
    total: Tensor = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        self.by_modality = [zero] * self.modalities
        self.decay = self.step = self.unattributed = self.rest = self.total = zero
        self._old: Tensor | float = 0.0 if self.first_moment is None else self.first_moment.double()
        self._own: list[Tensor | float] = [0.0] * self.modalities

    def add(self, gradients: Sequence[Tensor | None], update: AdamUpdate) -> None:
        """Add one step.

        Args:
            gradients: of each modality's loss over the global denominator, clipped as the step's gradient was;
                they sum to it. None if the loss does not depend on the tensor.
            update: the step.
        """
        beta1, beta2 = update.betas
        w, dw = update.before.double(), update.after.double() - update.before.double()
        root_v = (update.second_moment.double() / (1 - beta2**update.step)).sqrt()
        factor = -update.lr / (1 - beta1**update.step) / (root_v + update.eps)

        def radial(moment: Tensor | float) -> Tensor:
            return 2 * (w * factor * moment).sum()

        self._old = beta1 * self._old
        for a, gradient in enumerate(gradients):
            new = 0.0 if gradient is None else gradient.double()
            self._own[a] = beta1 * self._own[a] + (1 - beta1) * new
            self.by_modality[a] = self.by_modality[a] + radial(self._own[a])
        adam = factor * (self._old + sum(self._own)) - update.lr * update.weight_decay * w
        self.unattributed = self.unattributed + radial(self._old)
        self.decay = self.decay - 2 * update.lr * update.weight_decay * w.square().sum()
        self.step = self.step + dw.square().sum()
        self.rest = self.rest + 2 * (w * (dw - adam)).sum()
        self.total = self.total + update.after.double().square().sum() - w.square().sum()
        self.steps += 1
