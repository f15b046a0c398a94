"""Checks across the sections of a configuration. Each error message is one sentence that names the fields."""

from __future__ import annotations

from importlib.util import find_spec

from mmqk.config.fork import ForkConfig
from mmqk.config.training import LossConfig, MonitorConfig, OptimConfig
from mmqk.data.config import DataConfig
from mmqk.model.config import ModelConfig
from mmqk.store import UserError


def is_masked(model: ModelConfig, data: DataConfig) -> bool:
    """Return whether a window, a layer that separates the modalities, or a document mask hides earlier tokens."""
    return any(any(model.reach_of(layer)) for layer in range(model.n_layers)) or data.documents_apart


def check_shown(compiled: bool, recomputed: bool, backend: str, optim: OptimConfig) -> None:
    """Raise ValueError for QK-Clip with compiled or recomputed blocks, in which it cannot read queries and keys.

    The backend flex is an exception: it returns the largest logits itself.
    """
    for name, is_set in (("compile", compiled), ("activation_checkpointing", recomputed)):
        if is_set and optim.qk_clip is not None and backend != "flex":
            raise ValueError(
                f"optim.qk_clip reads queries and keys in every step, which {name} does not allow: use backend flex,"
                f" which returns the largest logits, or leave {name} off."
            )


def check_qk_clip(optim: OptimConfig, model: ModelConfig) -> None:
    """Raise ValueError for QK-Clip if the logits do not depend on the norms of W_q and W_k, which QK-Clip scales."""
    if optim.qk_clip is None:
        return
    if model.qk_norm.kind != "none":
        raise ValueError(
            f"optim.qk_clip scales W_q and W_k, but model.qk_norm.kind {model.qk_norm.kind} normalizes the scale"
            " away: remove one of them."
        )
    if model.weight_reparam == "sigma":
        raise ValueError(
            "optim.qk_clip scales W_q and W_k, but model.weight_reparam sigma normalizes the scale away: remove one"
            " of them."
        )


def check_matrices(
    optim: OptimConfig, model: ModelConfig, monitor: MonitorConfig, parent: str | None = None
) -> None:
    """Raise ValueError if the optimizer conflicts with another field, or a fork cannot use the parent's moments.

    Args:
        optim: The optimizer.
        model: The model.
        monitor: The monitors.
        parent: `optim.matrices` of the parent of a fork; None for a run from initial weights.
    """
    if parent not in (None, optim.matrices) and "muon" in (parent, optim.matrices):
        raise ValueError(
            f"optim.matrices is {parent} in the parent and {optim.matrices} here, and a fork cannot change it,"
            " because the moments of muon differ from those of Adam: keep the parent's value, or start a new run."
        )
    if optim.matrices == "muon":
        wanted = {"monitor.parameters": monitor.parameters, "monitor.second_moment": monitor.second_moment}
        for name, is_wanted in wanted.items():
            if is_wanted:
                raise ValueError(
                    f"{name} reads Adam's moments, which optim.matrices muon does not have: remove one of them."
                )
    if optim.split_second_moment and monitor.second_moment:
        raise ValueError(
            "monitor.second_moment reads one second moment of a matrix, but optim.split_second_moment has one for"
            " each modality: remove one of them."
        )
    if optim.adagc is not None and monitor.budget_every_n_steps:
        raise ValueError(
            "monitor.budget_every_n_steps splits the gradient of a matrix by modality before optim.adagc scales it:"
            " remove one of them."
        )
    if optim.skip_step is not None and monitor.budget_every_n_steps:
        raise ValueError(
            "monitor.budget_every_n_steps counts the gradients of steps that optim.skip_step skips: remove one of"
            " them."
        )
    if optim.matrices == "adamh" and optim.qk_clip is not None:
        raise ValueError(
            "optim.qk_clip scales W_q and W_k, whose norms optim.matrices adamh keeps fixed: remove one of them."
        )
    if optim.msign_every and model.weight_reparam == "sigma":
        raise ValueError(
            "optim.msign_every replaces matrices that model.weight_reparam sigma normalizes: remove one of them."
        )


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
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise ValueError(
                f"{name} needs whole matrices within a step, which trainer.strategy fsdp shards: use ddp."
            )


def check_trained(loss: LossConfig, data: DataConfig, model: ModelConfig) -> None:
    """Raise ValueError if the data has no trained target."""
    loss.weights_of(model.modalities)
    kinds = {kind for kind, weight in data.mix.items() if weight > 0}
    if kinds == {"text"} and loss.weights.get("text") == 0:
        raise ValueError(
            "loss.weights.text is 0 and data.mix has only text, which trains nothing: raise the weight or add another"
            " kind to data.mix."
        )


def check_loggers(names: list[str]) -> None:
    """Raise ValueError for a logger whose package is not installed."""
    for name in names:
        if name in ("wandb", "mlflow") and find_spec(name) is None:
            raise ValueError(
                f"logging has {name}, which is not installed: pip install 'mmqk[{name}]', or remove it from logging."
            )


def check_steps(max_steps: int, at: list[int], fork: ForkConfig | None) -> None:
    start = 0 if fork is None else fork.parent.step
    if start >= max_steps:
        raise UserError(
            f"trainer.max_steps is {max_steps}, but the fork starts at step {start}: raise it, and set"
            " optim.schedule_steps to keep the schedule."
        )
    for step in at:
        if not start < step <= max_steps:
            raise UserError(
                f"checkpoint.at has step {step}, but the run has steps {start + 1} to {max_steps}: name one of them."
            )


def check_batches(monitor: MonitorConfig, data: DataConfig, accumulate: int, world: int) -> None:
    if data.batch_size % (accumulate * world):
        over = f" times {world} processes" if world > 1 else ""
        raise UserError(
            f"data.batch_size {data.batch_size} is not a multiple of trainer.accumulate_grad_batches"
            f" {accumulate}{over}: choose one that is."
        )
    room = data.val_sequences if monitor.probe_split == "heldout" else data.batch_size // accumulate
    if monitor.every_n_steps and monitor.probe_sequences > room:
        what = "held-out sequences" if monitor.probe_split == "heldout" else "sequences of a micro-batch"
        raise UserError(
            f"monitor.probe_sequences {monitor.probe_sequences} is more than the {room} {what}: lower it."
        )
    if monitor.gradient_agreement and data.batch_size // (accumulate * world) < 2:
        raise UserError(
            "monitor.gradient_agreement needs two sequences in a micro-batch of each process: raise data.batch_size"
            " or leave it off."
        )
