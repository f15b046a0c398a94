"""When to measure, and on which tokens."""

from dataclasses import dataclass
from typing import Literal

from mmqk.ranges import MOST_STEPS, check_numbers, number


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

    every_n_steps: int = number(100, 0, MOST_STEPS)
    sequences: int = number(4, 1, 2**20)
    batch: Literal["current", "heldout"] = "current"
    tensorboard_layers: bool = False
    heads: bool = False
    parameters: bool = False
    precision: bool = False
    gradient_agreement: bool = False
    budget_every_n_steps: int = number(0, 0, MOST_STEPS)
    budget_steps: int = number(50, 1, MOST_STEPS)

    def __post_init__(self) -> None:
        check_numbers(self, "monitor")
        if 0 < self.budget_every_n_steps < self.budget_steps:
            raise ValueError(
                f"monitor.budget_every_n_steps {self.budget_every_n_steps} is less than monitor.budget_steps"
                f" {self.budget_steps}: windows cannot overlap, so raise it."
            )
        for name in ("heads", "parameters", "precision", "gradient_agreement"):
            if getattr(self, name) and not self.every_n_steps:
                raise ValueError(f"monitor.{name} is part of a probe: set monitor.every_n_steps above 0.")
