"""Measurements and tensors that a training step passes to the callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepRecord:
    """The measurements of one optimizer step, on the device.

    Attributes:
        step: Number of updates, including this one. The losses are those before the update.
        lr: Learning rate of the update.
        values: Loss; gradient norm before clipping; `RowLog.measured` and `QKClip.measured`, if in use;
            `modality_sums`, flattened. `TrainingModule.named_values` returns them by tag.
    """

    step: int
    lr: float
    values: Tensor


class StepWatch(Protocol):
    """Receives the tensors of an optimizer step and does not change them. Its methods are called in the order below.

    Attributes:
        attributing: Whether `before_backward` needs the loss by modality in this step.
    """

    @property
    def attributing(self) -> bool: ...

    def before_backward(self, parts_M: Tensor) -> None:
        """Called for each micro-batch with the loss of each modality. This method must not free the graph."""

    def before_update(
        self, optimizer: torch.optim.Optimizer, factor: Tensor | None, grad_norms: Mapping[str, Tensor]
    ) -> None:
        """Called after clipping. ``factor`` is the clipping factor, and ``grad_norms`` has the gradient norm of each
        parameter before clipping."""

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after the update and before QK-Clip and the power step change the weights."""
