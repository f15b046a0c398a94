"""When to measure, and on which tokens."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MonitorConfig:
    """Probes: a separate fp32 forward of the present weights that never touches training.

    Everything is an option that leaves the weights of the run as they are, bit for bit.

    Args:
        every_n_steps: optimizer steps between two probes; 0 switches them off.
        sequences: how many sequences a probe looks at.
        batch: current probes the batch being trained; heldout the first validation sequences, which are the
            same tokens in every run, so that maxima of different runs can be compared.
        tensorboard_layers: write every per-layer series to TensorBoard too, not only maximum and median.
        heads: at each probe, also attention logits and weights by head.
        parameters: at each probe, the gradient norm of every parameter, the size of its latest update over the
            learning rate and over the parameter, and the share of its elements below Adam's epsilon.
        precision: at each probe, what additions to a bf16 residual stream lose, or would lose; one more forward.
        gradient_agreement: at each probe of a training step, how far the modalities' gradients agree, from the two
            halves of the micro-batch at hand; two more forwards and a backward pass for each half and modality.
        budget_every_n_steps: optimizer steps between the beginnings of two windows of the radial budget of W_q and
            W_k; 0 switches it off. Inside a window a step costs a backward pass more for each modality but one.
        budget_steps: length of such a window.
    """

    every_n_steps: int = 100
    sequences: int = 4
    batch: Literal["current", "heldout"] = "current"
    tensorboard_layers: bool = False
    heads: bool = False
    parameters: bool = False
    precision: bool = False
    gradient_agreement: bool = False
    budget_every_n_steps: int = 0
    budget_steps: int = 50

    def __post_init__(self) -> None:
        if self.every_n_steps < 0:
            raise ValueError(f"monitor.every_n_steps is {self.every_n_steps}: it cannot be negative.")
        if self.sequences < 1:
            raise ValueError(f"monitor.sequences is {self.sequences}: a probe needs at least 1.")
        if self.budget_every_n_steps < 0:
            raise ValueError(
                f"monitor.budget_every_n_steps is {self.budget_every_n_steps}: it cannot be negative."
            )
        if self.budget_steps < 1:
            raise ValueError(f"monitor.budget_steps is {self.budget_steps}: a window has at least 1 step.")
        if 0 < self.budget_every_n_steps < self.budget_steps:
            raise ValueError(
                f"monitor.budget_every_n_steps {self.budget_every_n_steps} is less than monitor.budget_steps"
                f" {self.budget_steps}: windows cannot overlap, so raise it."
            )
        for name in ("heads", "parameters", "precision", "gradient_agreement"):
            if getattr(self, name) and not self.every_n_steps:
                raise ValueError(f"monitor.{name} is part of a probe: set monitor.every_n_steps above 0.")
