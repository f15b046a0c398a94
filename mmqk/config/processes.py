"""How many processes train a run and how, as far as its configuration says."""

from __future__ import annotations

from typing import Any

from mmqk.model import ModelConfig
from mmqk.monitors import MonitorConfig
from mmqk.ranges import Range
from mmqk.training.step.losses import LossConfig
from mmqk.training.step.optimizers import OptimConfig

DEVICES, NODES = Range(1, 1024), Range(1, 2**16)
STRATEGIES = ("auto", "ddp", "fsdp")


def world_size(trainer: dict[str, Any]) -> int:
    """How many processes train together; ``trainer``, Trainer's flags, is left with what Lightning understands.

    Raises:
        ValueError: a number that nobody knows yet, such as "auto", or another strategy.
    """
    for flag, wanted in (("devices", DEVICES), ("num_nodes", NODES)):
        given = str(trainer[flag])
        trainer[flag] = int(given) if given.isdecimal() and len(given) < 10 else trainer[flag]
        wanted.check(f"trainer.{flag}", trainer[flag])
    world = trainer["devices"] * trainer["num_nodes"]
    if trainer["strategy"] not in STRATEGIES:
        raise ValueError(f"trainer.strategy is {trainer['strategy']}: choose one of {', '.join(STRATEGIES)}.")
    if world > 1 and trainer["strategy"] == "auto":
        trainer["strategy"] = "ddp"
    return world


def check_sharded(model: ModelConfig, optim: OptimConfig, loss: LossConfig, monitor: MonitorConfig) -> None:
    """Raise ValueError for what looks at whole weights or gradients inside a step, where only shards are."""
    wanted = {
        "model.weight_reparam sigma": model.weight_reparam == "sigma",
        "optim.qk_clip": optim.qk_clip is not None,
        "optim.split_second_moment": optim.split_second_moment,
        "loss.chunk": loss.chunk is not None,
        "monitor.parameters": monitor.parameters,
        "monitor.budget_every_n_steps": monitor.budget_every_n_steps > 0,
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise ValueError(
                f"{name} needs whole matrices within a step, of which trainer.strategy fsdp has shards: use ddp."
            )
