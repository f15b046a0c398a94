"""The flags of Lightning's Trainer that a run has. Needs no Lightning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmqk.config.sentences import class_path_sentence
from mmqk.ranges import MOST_STEPS, check_numbers, number

STRATEGIES = ("auto", "ddp", "fsdp")
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
# What --help shows; --help-all shows every field.
SHOWN = (
    "accelerator", "devices", "num_nodes", "strategy", "max_steps", "precision", "accumulate_grad_batches",
    "gradient_clip_val",
)  # fmt: skip
IN_IDENTITY = ("max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")


@dataclass(frozen=True)
class TrainerConfig:
    """What a run passes on to Lightning's Trainer; mmqk sets all other flags.

    Args:
        devices: processes on each machine, one a device.
        num_nodes: machines.
        precision: 32-true, bf16-mixed (bf16 operations, fp32 weights) or bf16-true (bf16 weights too).
        max_steps: optimizer steps of the run.
        accumulate_grad_batches: micro-batches of an optimizer step.
        gradient_clip_val: largest norm of the gradient, to which a longer one is scaled; 0 or null for none.
        deterministic: use deterministic kernels only, which sum in another order.
        benchmark: let cuDNN time its kernels and take the fastest.
        inference_mode: validate under torch.inference_mode instead of torch.no_grad.
        detect_anomaly: stop with a traceback of the forward at the first NaN in a backward pass; slow.
        enable_autolog_hparams: let Lightning pass hyperparameters to the loggers.
        accelerator: cpu, gpu, mps or auto: a GPU where there is one.
        strategy: how several processes train together: auto, ddp, fsdp; auto is ddp where there are several.
        profiler: Lightning's table of times, printed at the end.
    """

    devices: int | str = number(1, 1, 1024)
    num_nodes: int = number(1, 1, 2**16)
    precision: str = "32-true"
    max_steps: int = number(1000, 1, MOST_STEPS)
    accumulate_grad_batches: int = number(1, 1, 2**24)
    gradient_clip_val: int | float | None = number(1.0, 1e-12, 1e12, zero=True)
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    detect_anomaly: bool = False
    enable_autolog_hparams: bool = True
    accelerator: str = "auto"
    strategy: str = "auto"
    profiler: Literal["simple", "advanced", "pytorch"] | None = None

    def __post_init__(self) -> None:
        for name in ("accelerator", "strategy", "profiler"):
            if "class_path" in str(getattr(self, name)):
                raise ValueError(class_path_sentence(f"trainer.{name}"))
        if isinstance(self.devices, str) and self.devices.isdecimal() and len(self.devices) < 10:
            object.__setattr__(self, "devices", int(self.devices))
        check_numbers(self, "trainer")
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"trainer.precision is '{self.precision}': choose one of {', '.join(PRECISIONS)}."
            )
        if self.deterministic == "warn":
            raise ValueError(
                "trainer.deterministic warn leaves attention as it is: set it to true, or leave it out."
            )
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"trainer.strategy is {self.strategy}: choose one of {', '.join(STRATEGIES)}."
            )
        if self.processes > 1 and self.strategy == "auto":
            object.__setattr__(self, "strategy", "ddp")

    @property
    def processes(self) -> int:
        """How many processes train together."""
        return int(self.devices) * self.num_nodes
