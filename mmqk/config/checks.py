"""Refuses combinations of fields of different sections that no run can have. A section's class refuses combinations of
its own fields (`__post_init__`). An error is a sentence that names the fields."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mmqk.config.training import MonitorConfig, OptimConfig
from mmqk.model.config import ModelConfig
from mmqk.model.ranges import check_backend, refuse

if TYPE_CHECKING:
    from mmqk.config.run import Given, Parent


def check_run(given: Given, parent: Parent | None) -> None:
    """Raise ValueError with the first combination of fields that no run can have."""
    model, data = given.model, given.data
    given.loss.weights_of(model.modalities)
    refuse({
        "loss.weights.text is 0 and data.mix has only text, which trains nothing: raise the weight or add another"
        " kind to data.mix.": data.kinds == ["text"] and given.loss.weights.get("text") == 0,
    })  # fmt: skip
    _refuse_batches(given)
    if parent is not None:
        _refuse_fork(given, parent)
    check_backend(
        given.backend,
        model.attn_softcap,
        model.attention,
        dropout=model.attn_dropout,
        masked=any(any(model.reach_of(layer)) for layer in range(model.n_layers)) or data.documents_apart,
        tokens=data.seq_len,
        sink=model.attn_sink,
    )
    check_conflicts(given.optim, model, given.monitor)
    hidden = given.optim.qk_clip is not None and given.backend != "flex"  # flex returns the largest logits itself
    refuse({
        f"optim.qk_clip reads queries and keys in every step, which {name} does not allow: use backend flex, which"
        f" returns the largest logits, or leave {name} off.": hidden and getattr(given, name)
        for name in ("compile", "activation_checkpointing")
    })  # fmt: skip
    if given.trainer.strategy == "fsdp":
        _refuse_sharded(given)
    _refuse_steps(given, parent.step if parent else 0)
    refuse({
        f"logging has {name}, which is not installed: pip install 'mmqk[{name}]', or remove it from logging.":
            name in ("wandb", "mlflow") and find_spec(name) is None
        for name in given.logging
    })  # fmt: skip


def check_conflicts(optim: OptimConfig, model: ModelConfig, monitor: MonitorConfig) -> None:
    """Raise ValueError if the optimizer excludes a field of the model or of the monitors."""
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
        **{f"monitor.{name} reads Adam's moments, which optim.matrices muon does not have":
            getattr(monitor, name) and muon for name in ("parameters", "second_moment", "sharpness")},
        "monitor.second_moment reads one second moment of a matrix, but optim.split_second_moment has one for each"
        " modality":
            monitor.second_moment and optim.split_second_moment,
        "monitor.budget_every_n_steps splits the gradient of a matrix by modality before optim.adagc scales it":
            budget and optim.adagc is not None,
        "monitor.budget_every_n_steps counts the gradients of steps that optim.skip_step skips":
            budget and optim.skip_step is not None,
    }  # fmt: skip
    refuse({f"{sentence}: remove one of them.": holds for sentence, holds in conflicts.items()})


def _refuse_fork(given: Given, parent: Parent) -> None:
    """Refuse a fork whose weights, patches, data or moments do not fit those of its parent."""
    check_forkable(ModelConfig.from_dict(parent.config["model"]), given.model)
    patches = {section: parent.config[section].get("patch", "") for section in ("model", "data")}
    refuse({
        "fork_seed has no effect while fork_noise is 0: set fork_noise.": given.fork_seed and not given.fork_noise,
        f"fork_skip skips the data of a parent, but {given.fork} is an import: leave it out.":
            (given.fork_skip_batches or given.fork_skip) and parent.is_import,
    } | {
        f"the parent has {section}.patch {patch}, which a fork keeps but runs only if you name it too: add"
        f" {section}.patch={patch}.": patch not in ("", getattr(given, section).patch)
        for section, patch in patches.items()
    })  # fmt: skip
    if parent.is_import:
        return
    before, now = parent.config["optim"], given.optim
    matrices = before.get("matrices", "adamw")
    scaled = (before.get("width_scaling", "none"), before.get("base_width"))
    refuse({
        f"optim.matrices is {matrices} in the parent and {now.matrices} here, and a fork cannot change it, because the"
        " moments of muon differ from those of Adam: keep the parent's value, or start a new run.":
            matrices != now.matrices and "muon" in (matrices, now.matrices),
        "optim.width_scaling and optim.base_width set the initial weights too, so a fork cannot change them: keep the"
        " parent's values, or start a new run.":
            scaled != (now.width_scaling, now.base_width) and {scaled[0], now.width_scaling} != {"none"},
    })  # fmt: skip


def check_forkable(old: ModelConfig, new: ModelConfig) -> None:
    """Raise ValueError if the weights of ``old`` do not fit into ``new``."""
    resolved = {"n_kv_heads": "kv_heads", "d_head": "head_dim", "d_ff": "mlp_width"}  # of these fields 0 is a default
    shapes = ("d_model", "n_layers", "n_heads", *resolved, "mlp", "deep_norm", "separate_first", "separate_last")
    for field in (*shapes, "vocab_sizes"):
        parent, child = (getattr(config, resolved.get(field, field)) for config in (old, new))
        if parent != child or (field == "vocab_sizes" and list(parent) != list(child)):
            raise ValueError(
                f"model.{field} is {parent} in the parent and {child} here, and a fork cannot change it: keep the"
                " parent's value, or start a new run."
            )
    separate = new.separate_first or new.separate_last
    refuse({
        "model.tie_embeddings cannot be switched on in a fork, because the parent has a separate head: start a new"
        " run.": new.tie_embeddings and not old.tie_embeddings,
        "model.layer_scale cannot be switched on or off in a fork of a model with model.separate_first or"
        " model.separate_last: start a new run.":
            separate and (new.layer_scale is None) != (old.layer_scale is None),
    } | {
        f"model.per_modality.{name} cannot be switched off in a fork, because the parent has separate weights for each"
        " modality: start a new run.":
            untied and not getattr(new.per_modality, name) and not (name == "qk_norm" and new.qk_norm.kind == "none")
        for name, untied in asdict(old.per_modality).items()
    })  # fmt: skip


def _refuse_sharded(given: Given) -> None:
    """Refuse fields that need whole weights or gradients within a step, which FSDP shards."""
    optim, monitor = given.optim, given.monitor
    wanted = {
        "model.weight_reparam sigma": given.model.weight_reparam == "sigma",
        "optim.qk_clip": optim.qk_clip is not None,
        "optim.split_second_moment": optim.split_second_moment,
        f"optim.matrices {optim.matrices}": optim.matrices != "adamw",
        "optim.update_clip": optim.update_clip,
        "optim.adagc": optim.adagc is not None,
        "optim.skip_step": optim.skip_step is not None,
        "optim.msign_every": optim.msign_every > 0,
        "loss.chunk_size": given.loss.chunk_size is not None,
        "monitor.parameters": monitor.parameters,
        "monitor.second_moment": monitor.second_moment,
        "monitor.budget_every_n_steps": monitor.budget_every_n_steps > 0,
    }
    why = "needs whole matrices within a step, which trainer.strategy fsdp shards: use ddp."
    refuse({f"{name} {why}": is_wanted for name, is_wanted in wanted.items()})


def _refuse_steps(given: Given, start: int) -> None:
    """Refuse a fork that starts after the end of the run, and steps of checkpoint.at or monitor.at that are not in the
    run. A fork inherits monitor.at, including steps before its own start."""
    max_steps = given.trainer.max_steps
    refuse({
        f"trainer.max_steps is {max_steps}, but the fork starts at step {start}: raise it, and set"
        " optim.schedule_steps to keep the schedule.": start >= max_steps,
    } | {
        f"{field} has step {step}, but the run has steps {first + 1} to {max_steps}: name one of them.":
            not first < step <= max_steps
        for field, first, steps in (("checkpoint.at", start, given.checkpoint.at), ("monitor.at", 0, given.monitor.at))
        for step in steps
    })  # fmt: skip


def _refuse_batches(given: Given) -> None:
    """Refuse batches that cannot be divided, or are too small for the probes."""
    monitor, data, trainer = given.monitor, given.data, given.trainer
    accumulate, world = trainer.accumulate_grad_batches, trainer.processes
    over = f" times {world} processes" if world > 1 else ""
    heldout = monitor.probe_split == "heldout"
    # A process cannot read the rows of another one from shards.
    room = data.val_sequences if heldout else data.batch_size // accumulate // (world if data.streams else 1)
    what = "held-out sequences" if heldout else "sequences of a micro-batch"
    refuse({
        f"data.batch_size {data.batch_size} is not a multiple of trainer.accumulate_grad_batches {accumulate}{over}:"
        " choose one that is.": data.batch_size % (accumulate * world),
        f"monitor.probe_sequences {monitor.probe_sequences} is more than the {room} {what}: lower it.":
            monitor.every_n_steps and monitor.probe_sequences > room,
        "monitor.gradient_agreement needs two sequences in a micro-batch of each process: raise data.batch_size or"
        " leave it off.": monitor.gradient_agreement and data.batch_size // (accumulate * world) < 2,
        "monitor.sharpness needs one process and trainer.precision 32-true: set both, or leave it off.":
            monitor.sharpness and (world > 1 or trainer.precision != "32-true"),
    })  # fmt: skip
