"""When to measure, and on which tokens."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MonitorConfig:
    """Probes: a separate fp32 forward of the present weights that never touches training.

    Args:
        every_n_steps: optimizer steps between two probes; 0 switches them off.
        sequences: how many sequences a probe looks at.
        batch: current probes the batch being trained; heldout the first validation sequences, which are the
            same tokens in every run, so that maxima of different runs can be compared.
        tensorboard_layers: write every per-layer series to TensorBoard too, not only maximum and median.
    """

    every_n_steps: int = 100
    sequences: int = 4
    batch: Literal["current", "heldout"] = "current"
    tensorboard_layers: bool = False

    def __post_init__(self) -> None:
        if self.every_n_steps < 0:
            raise ValueError(f"monitor.every_n_steps is {self.every_n_steps}: it cannot be negative.")
        if self.sequences < 1:
            raise ValueError(f"monitor.sequences is {self.sequences}: a probe needs at least 1.")
