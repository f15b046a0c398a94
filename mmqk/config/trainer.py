"""The fields of Lightning's Trainer that a run can set. Needs no Lightning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmqk.config.sentences import class_path_sentence
from mmqk.ranges import MOST_STEPS, check_fields, number

IN_IDENTITY = ("max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")


@dataclass(frozen=True)
class TrainerConfig:
    """Arguments of Lightning's Trainer; mmqk sets all others.

    Args:
        devices: processes per machine, one per device.
        num_nodes: number of machines.
        precision: 32-true, bf16-mixed (bf16 operations, fp32 weights) or bf16-true (bf16 weights too: an
            experiment, because most updates are too small to change a weight).
        max_steps: number of optimizer steps.
        accumulate_grad_batches: micro-batches per optimizer step.
        gradient_clip_val: largest gradient norm; larger gradients are scaled down to it. 0 or null: no clipping.
        deterministic: use deterministic kernels only, whose order of summation differs from that of the usual
            kernels.
        benchmark: let cuDNN time its kernels and use the fastest.
        detect_anomaly: stop at the first NaN in a backward pass, with a traceback of the forward pass; slow.
        accelerator: cpu, gpu, mps or auto (a GPU if there is one).
        strategy: how several processes train together: ddp, fsdp or auto (ddp for several processes).
    """

    devices: int | str = number(1, 1, 1024)
    num_nodes: int = number(1, 1, 2**16)
    precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "32-true"
    max_steps: int = number(1000, 1, MOST_STEPS)
    accumulate_grad_batches: int = number(1, 1, 2**24)
    gradient_clip_val: int | float | None = number(1.0, 1e-12, 1e12, zero=True)
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    detect_anomaly: bool = False
    accelerator: str = "auto"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"

    def __post_init__(self) -> None:
        for name in ("accelerator", "strategy"):
            if "class_path" in str(getattr(self, name)):
                raise ValueError(class_path_sentence(f"trainer.{name}"))
        if isinstance(self.devices, str) and self.devices.isdecimal() and len(self.devices) < 10:
            object.__setattr__(self, "devices", int(self.devices))
        check_fields(self, "trainer")
        if self.deterministic == "warn":
            raise ValueError(
                "trainer.deterministic 'warn' does not make attention deterministic: set it to true, or leave it out."
            )
        if self.processes > 1 and self.strategy == "auto":
            object.__setattr__(self, "strategy", "ddp")

    @property
    def processes(self) -> int:
        """Number of processes that train together."""
        return int(self.devices) * self.num_nodes
