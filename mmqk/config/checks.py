"""Checks of a run's configuration that read fields of several sections. An error is a sentence that names the
fields."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from mmqk.config.training import LossConfig, MonitorConfig, OptimConfig
from mmqk.data.config import DataConfig
from mmqk.model.config import ModelConfig


def refuse(mistakes: Mapping[str, object]) -> None:
    """Raise ValueError with the first sentence whose condition holds."""
    for sentence, holds in mistakes.items():
        if holds:
            raise ValueError(sentence)


def is_masked(model: ModelConfig, data: DataConfig) -> bool:
    """Return whether a window, a layer that separates the modalities, or a document mask hides earlier tokens."""
    return any(any(model.reach_of(layer)) for layer in range(model.n_layers)) or data.documents_apart


def check_shown(compiled: bool, recomputed: bool, backend: str, optim: OptimConfig) -> None:
    """Raise ValueError for QK-Clip with compiled or recomputed blocks, in which it cannot read queries and keys.

    The backend flex is an exception: it returns the largest logits itself.
    """
    clip = optim.qk_clip is not None and backend != "flex"
    refuse({
        f"optim.qk_clip reads queries and keys in every step, which {name} does not allow: use backend flex, which"
        f" returns the largest logits, or leave {name} off.": clip and is_set
        for name, is_set in (("compile", compiled), ("activation_checkpointing", recomputed))
    })  # fmt: skip


def check_conflicts(
    optim: OptimConfig, model: ModelConfig, monitor: MonitorConfig, parent: Mapping[str, Any] | None = None
) -> None:
    """Raise ValueError if the optimizer conflicts with another field, or a fork cannot use the parent's moments.

    Args:
        optim: The optimizer.
        model: The model.
        monitor: The monitors.
        parent: `optim` of the parent of a fork; None for a run from initial weights.
    """
    if parent is not None:
        before = parent.get("matrices", "adamw")
        scaled = (parent.get("width_scaling", "none"), parent.get("base_width"))
        refuse({
            f"optim.matrices is {before} in the parent and {optim.matrices} here, and a fork cannot change it,"
            " because the moments of muon differ from those of Adam: keep the parent's value, or start a new run.":
                before != optim.matrices and "muon" in (before, optim.matrices),
            "optim.width_scaling and optim.base_width set the initial weights too, so a fork cannot change them: keep"
            " the parent's values, or start a new run.":
                scaled != (optim.width_scaling, optim.base_width) and {scaled[0], optim.width_scaling} != {"none"},
        })  # fmt: skip
    clip, muon, sigma = optim.qk_clip is not None, optim.matrices == "muon", model.weight_reparam == "sigma"
    kind, budget = model.qk_norm.kind, monitor.budget_every_n_steps > 0
    conflicts = {
        f"optim.qk_clip scales W_q and W_k, but model.qk_norm.kind {kind} normalizes the scale away":
            clip and kind != "none",
        "optim.qk_clip scales W_q and W_k, but model.weight_reparam sigma normalizes the scale away":
            clip and sigma,
        "optim.qk_clip scales W_q and W_k, whose norms optim.matrices adamh keeps fixed":
            clip and optim.matrices == "adamh",
        "optim.msign_every replaces matrices that model.weight_reparam sigma normalizes":
            optim.msign_every > 0 and sigma,
        "optim.width_scaling mup gives embedding and head different learning rates, but model.tie_embeddings makes them"
        " one matrix": optim.width_scaling == "mup" and model.tie_embeddings,
        "monitor.parameters reads Adam's moments, which optim.matrices muon does not have":
            monitor.parameters and muon,
        "monitor.second_moment reads Adam's moments, which optim.matrices muon does not have":
            monitor.second_moment and muon,
        "monitor.sharpness reads Adam's moments, which optim.matrices muon does not have":
            monitor.sharpness and muon,
        "monitor.second_moment reads one second moment of a matrix, but optim.split_second_moment has one for each"
        " modality":
            monitor.second_moment and optim.split_second_moment,
        "monitor.budget_every_n_steps splits the gradient of a matrix by modality before optim.adagc scales it":
            budget and optim.adagc is not None,
        "monitor.budget_every_n_steps counts the gradients of steps that optim.skip_step skips":
            budget and optim.skip_step is not None,
    }  # fmt: skip
    refuse({f"{sentence}: remove one of them.": holds for sentence, holds in conflicts.items()})


def check_sharded(model: ModelConfig, optim: OptimConfig, loss: LossConfig, monitor: MonitorConfig) -> None:
    """Raise ValueError for a field that needs whole weights or gradients within a step, which FSDP shards."""
    wanted = {
        "model.weight_reparam sigma": model.weight_reparam == "sigma",
        "optim.qk_clip": optim.qk_clip is not None,
        "optim.split_second_moment": optim.split_second_moment,
        f"optim.matrices {optim.matrices}": optim.matrices != "adamw",
        "optim.update_clip": optim.update_clip,
        "optim.adagc": optim.adagc is not None,
        "optim.skip_step": optim.skip_step is not None,
        "optim.msign_every": optim.msign_every > 0,
        "loss.chunk_size": loss.chunk_size is not None,
        "monitor.parameters": monitor.parameters,
        "monitor.second_moment": monitor.second_moment,
        "monitor.budget_every_n_steps": monitor.budget_every_n_steps > 0,
    }
    why = "needs whole matrices within a step, which trainer.strategy fsdp shards: use ddp."
    refuse({f"{name} {why}": is_wanted for name, is_wanted in wanted.items()})


def check_trained(loss: LossConfig, data: DataConfig, model: ModelConfig) -> None:
    """Raise ValueError if the data has no trained target."""
    loss.weights_of(model.modalities)
    kinds = {kind for kind, weight in data.mix.items() if weight > 0}
    refuse({
        "loss.weights.text is 0 and data.mix has only text, which trains nothing: raise the weight or add another"
        " kind to data.mix.": kinds == {"text"} and loss.weights.get("text") == 0,
    })  # fmt: skip


def check_loggers(names: list[str]) -> None:
    """Raise ValueError for a logger whose package is not installed."""
    refuse({
        f"logging has {name}, which is not installed: pip install 'mmqk[{name}]', or remove it from logging.":
            name in ("wandb", "mlflow") and find_spec(name) is None
        for name in names
    })  # fmt: skip


def check_steps(max_steps: int, saved: list[int], probed: list[int], start: int) -> None:
    """Raise ValueError if a fork starts after the end of the run, or a step of checkpoint.at or monitor.at is not in
    the run. A fork inherits monitor.at, including steps before its own start."""
    refuse({
        f"trainer.max_steps is {max_steps}, but the fork starts at step {start}: raise it, and set"
        " optim.schedule_steps to keep the schedule.": start >= max_steps,
    } | {
        f"{field} has step {step}, but the run has steps {first + 1} to {max_steps}: name one of them.":
            not first < step <= max_steps
        for field, first, steps in (("checkpoint.at", start, saved), ("monitor.at", 0, probed))
        for step in steps
    })  # fmt: skip


def check_batches(monitor: MonitorConfig, data: DataConfig, accumulate: int, world: int, precision: str) -> None:
    """Raise ValueError if the batches cannot be divided, or are too small for the probes."""
    over = f" times {world} processes" if world > 1 else ""
    heldout = monitor.probe_split == "heldout"
    room = data.val_sequences if heldout else data.batch_size // accumulate
    what = "held-out sequences" if heldout else "sequences of a micro-batch"
    refuse({
        f"data.batch_size {data.batch_size} is not a multiple of trainer.accumulate_grad_batches {accumulate}{over}:"
        " choose one that is.": data.batch_size % (accumulate * world),
        f"monitor.probe_sequences {monitor.probe_sequences} is more than the {room} {what}: lower it.":
            monitor.every_n_steps and monitor.probe_sequences > room,
        "monitor.gradient_agreement needs two sequences in a micro-batch of each process: raise data.batch_size or"
        " leave it off.": monitor.gradient_agreement and data.batch_size // (accumulate * world) < 2,
        "monitor.sharpness needs one process and trainer.precision 32-true: set both, or leave it off.":
            monitor.sharpness and (world > 1 or precision != "32-true"),
    })  # fmt: skip
