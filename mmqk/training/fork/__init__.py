"""A fork: a run that begins at a checkpoint of another run, converted to the configuration of the fork.

`make_fork` writes its first checkpoint: `weights` converts the model, with gains from `measure`, and `forked_state` the
rest.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmqk.checkpoint import PREFIX, load_checkpoint, save_checkpoint, weights_of
from mmqk.config.run import CHANGES, NEWER, SECTIONS, sequences
from mmqk.config.training import LossConfig, OptimConfig
from mmqk.data.batch import TokenBatch
from mmqk.data.loader import streams_of_fork
from mmqk.data.order import sequence_numbers
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.model.patch import named_function
from mmqk.model.ranges import default_of
from mmqk.store import UserError, differing_fields, flatten, write_json
from mmqk.store.checkpoint_files import checkpoint_name
from mmqk.store.formatting import plain
from mmqk.training.fork.measure import Change, change_of_function
from mmqk.training.fork.weights import Carried, carry, perturb
from mmqk.training.optimizers import lr_multiplier, make_optimizer, parameter_names

if TYPE_CHECKING:
    from mmqk.config import RunConfig


PROBE_SEQUENCES = 16
FORK_NAME = "fork.json"
START_NAME = "start.ckpt"  # the initial weights of a fork of an import
# Fields that change the devices, speed or loggers of a run but not its result.
NOT_CHANGES = ("checkpoint.", "threads", "logging", "activation_checkpointing", "data.workers", "data.cache",
               "data.shard_cache", "fork", "trainer.devices", "trainer.num_nodes", "trainer.strategy")  # fmt: skip
# If the changed fields raise a loss by more than this (nats), the loss history starts again, because such a rise does
# not count as a divergence.
JUMP_NATS = 0.1
SAME_DATA = ("data.val_", "data.batch_size")


def make_fork(run: RunConfig, folder: Path, probe: TokenBatch) -> str:
    """Write the first checkpoint of a fork and ``fork.json``; return a sentence that describes the fork.

    A fork of an import gets `START_NAME` instead, because it has no optimizer state: it starts like a new run, but
    with these weights.

    Args:
        run: The configuration, with its `parent`.
        folder: The run folder.
        probe: Held-out sequences. New gains are computed from the parent's activations on them, and the outputs of
            parent and fork are compared on them.

    Raises:
        UserError: the parent's checkpoint is missing, damaged, or not of the run and step in the configuration.
    """
    parent = run.parent
    assert parent is not None and parent.checkpoint is not None
    saved = load_checkpoint(parent.checkpoint, "name another one after --fork")
    writer = (saved.get("mmqk_run", {}).get("id"), saved.get("global_step"))
    if not parent.is_import and writer != (parent.id, parent.step):
        raise UserError(f"{parent.checkpoint} is no longer step {parent.step} of run {parent.id}: give another --out.")
    device = torch.device("cuda" if torch.cuda.is_available() and run.trainer.accelerator != "cpu" else "cpu")
    probe = probe.to(device)
    old = _model(ModelConfig.from_dict(saved["mmqk_model"]), run.seed, device)
    old.load_state_dict(weights_of(saved))
    new = _model(replace(run.model, patch=old.config.patch), run.seed, device)
    carried = carry(old, new, probe)
    if run.model.patch != old.config.patch:
        named_function(run.model.patch)(new)
    if run.fork_noise:
        perturb(new, run.fork_noise, run.fork_seed)
    change = change_of_function(old, new, probe)

    own, file = run.nested(), folder / START_NAME
    content = {
        "mmqk_model": own["model"],
        "state_dict": {PREFIX + name: value.cpu() for name, value in new.state_dict().items()},
    }
    if parent.is_import:
        changed = changes({"model": asdict(old.config)}, {"model": own["model"], "compile": False})
        record = _record(run, changed, carried, "all moments start at zero", change)
    else:
        changed = changes(dict(parent.config), own)
        state, moments = forked_state(run, saved, old, new, carried, change, [c["field"] for c in changed])
        loader = state["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
        position = {name: value for name, value in loader.items() if name != "streams"}
        record = {**_record(run, changed, carried, moments, change), "data": position}
        content, file = saved | content | state, folder / "checkpoints" / checkpoint_name(parent.step)
    write_json(folder / FORK_NAME, record)
    save_checkpoint(content, file)
    return sentence(run, changed, change)


def changes(parent: dict[str, Any], own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields in which two configurations differ, except the fields that do not affect the result."""
    parent = _with_newer_fields(parent)
    a, b = flatten(parent), flatten(own)
    differing = differing_fields(parent, own)
    names = [
        f
        for f in differing
        if not f.startswith(NOT_CHANGES)
        # If a mapping is empty in only one of the configurations, list its entries in the other configuration.
        and not any(other.startswith(f"{f}.") for other in differing)
    ]
    return [{"field": field, "from": a.get(field), "to": b.get(field)} for field in names]


def _with_newer_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the fields that its version of mmqk did not have, at their defaults."""
    newer = {}
    for section, names in NEWER.items():
        if section in config:
            defaults = {f.name: default_of(f) for f in fields(SECTIONS[section]) if f.name in names}
            newer[section] = defaults | config[section]
    return {"compile": False, **config, **newer}


def sentence(run: RunConfig, changed: list[dict[str, Any]], change: Change) -> str:
    """Return a sentence with the parent, the changed fields, and the change of the outputs."""
    parent, skipped = run.parent, sequences(run.fork_skip)
    assert parent is not None
    parts = [f"{c['field']} {_yaml(c['to'])}" for c in changed]
    parts += [f"the next {run.fork_skip_batches} batches skipped"] if run.fork_skip_batches else []
    parts += [f"{len(skipped)} sequences left out"] if skipped else []
    parts += [f"weights perturbed by {run.fork_noise:g} of their RMS"] if run.fork_noise else []
    parts += ["new moments of the optimizer"] if run.fork_new_moments else []
    losses = ", ".join(f"{name} {before:.4f} -> {after:.4f}" for name, (before, after) in change.loss.items())
    near = (
        "the function equals the parent's bit for bit (in fp32, before the first step)"
        if change.logits == 0
        else f"logits differ by {plain(change.logits, 2)} of their RMS, loss {losses}"
    )
    start = f"import {run.fork}" if parent.is_import else f"step {parent.step} of run {parent.id}"
    return f"forked from {start} with {', '.join(parts) or 'nothing changed'}: {near}"


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _record(
    run: RunConfig, changed: list[dict[str, Any]], carried: Carried, optimizer: str, change: Change
) -> dict[str, Any]:
    assert run.parent is not None and run.fork is not None
    given = Path(run.fork)
    parent = {
        "id": run.parent.id,
        "folder": str(given.parent.parent) if given.suffix == ".ckpt" else run.fork,
        "checkpoint": str(run.parent.checkpoint),
        "step": run.parent.step,
    }
    return {
        "parent": parent,
        "changed": changed,
        **{name.removeprefix("fork_"): getattr(run, name) for name in CHANGES},
        "skip": sequences(run.fork_skip),
        "added": [{"name": name, "how": how} for name, how in carried.added.items()],
        "dropped": [{"name": name, "how": how} for name, how in carried.dropped.items()],
        "optimizer": optimizer,
        "function": {"logits_rms_relative": change.logits, "loss": change.loss},
    }


def _model(config: ModelConfig, seed: int, device: torch.device) -> EarlyFusionTransformer:
    return EarlyFusionTransformer(config, "math", seed).to(device).eval()


# The state of optimizer, schedule, loops and callbacks -----------------------------------------------------------


def forked_state(
    run: RunConfig,
    saved: dict[str, Any],
    old: EarlyFusionTransformer,
    new: EarlyFusionTransformer,
    carried: Carried,
    change: Change,
    changed: list[str],
) -> tuple[dict[str, Any], str]:
    """Return the parts of the first checkpoint besides the model, and a sentence about the moments."""
    assert run.parent is not None
    parent, step = run.parent.config, run.parent.step
    lr = run.optim.lr * lr_multiplier(run.optim, step, run.trainer.max_steps)
    optimizer, moments = optimizer_state(
        saved["optimizer_states"][0],
        (OptimConfig(**parent["optim"]), old, LossConfig(**parent["loss"]).trained(old.config.modalities)),
        (run.optim, new, run.loss.trained(run.model.modalities)),
        carried,
        lr,
        run.fork_new_moments,
    )
    # The schedule is at the parent's step, with the fork's peak.
    groups = optimizer["param_groups"]
    rates = {"base_lrs": [group["initial_lr"] for group in groups], "_last_lr": [group["lr"] for group in groups]}
    rates["lr_lambdas"] = [None] * len(groups)
    touched = [*changed, *(name for name in ("fork_noise", "fork_new_moments") if getattr(run, name))]
    state = {
        "optimizer_states": [optimizer],
        "lr_schedulers": [saved["lr_schedulers"][0] | rates],
        "loops": loops_state(saved["loops"], run),
        "callbacks": callback_state(saved["callbacks"], touched, change),
        "mmqk_guards": guards_state(saved.get("mmqk_guards", {}), old, new, carried),
        "mmqk_run": run.record(),
    }
    return state, moments


def optimizer_state(
    saved: Mapping[str, Any],
    old: tuple[OptimConfig, EarlyFusionTransformer, Sequence[str]],
    new: tuple[OptimConfig, EarlyFusionTransformer, Sequence[str]],
    carried: Carried,
    lr: float,
    new_moments: bool = False,
) -> tuple[dict[str, Any], str]:
    """Return the parent's moments converted to the fork's settings, and a sentence about the conversion.

    If a matrix is scaled by c, its first moments are scaled by 1 / c and its second moments by 1 / c^2, because its
    gradients are scaled by 1 / c.

    If only the fork sets `optim.split_second_moment`, each modality starts with an equal part of the shared first
    moment and with the whole second moment. With zero gradients, the fork's next step then equals the parent's next
    step. If only the parent sets the field, the moments are summed over modalities. For second moments, this assumes
    that the gradients of the modalities are uncorrelated.

    Args:
        saved: Optimizer state of the parent.
        old: Settings, model and trained modalities of the parent.
        new: Settings, model and trained modalities of the fork.
        carried: Origin of the fork's parameters.
        lr: Learning rate of the next update, of groups that train at `optim.lr`.
        new_moments: Whether to leave out the parent's moments.
    """
    (old_config, old_model, old_trained), (new_config, new_model, new_trained) = old, new
    old_names = parameter_names(make_optimizer(old_config, old_model), old_model)
    optimizer = make_optimizer(new_config, new_model)
    new_names, state = parameter_names(optimizer, new_model), optimizer.state_dict()
    for group in state["param_groups"]:
        group["initial_lr"], group["lr"] = group["lr"], lr * (group["lr"] / new_config.lr)
    if new_moments:
        return state, "all moments start at zero"
    split = (old_config.split_second_moment, new_config.split_second_moment)
    of_old, of_new = list(old_trained) if split[0] else None, list(new_trained) if split[1] else None
    by_name = {old_names[i]: moments for i, moments in saved["state"].items()}
    for i, name in enumerate(new_names):
        source = carried.from_name.get(name)
        if source in by_name:  # if not, it is new, or no gradient has updated it yet
            moments = _rescaled(by_name[source], carried.scale.get(name))
            state["state"][i] = moments if of_old == of_new else _resplit(moments, of_old, of_new)
    fresh = sum(name not in carried.from_name for name in new_names)
    parts = {
        "carried over": True,
        f"rescaled for {len(carried.scale)} parameters into which gains were folded": bool(carried.scale),
        "the shared moments split among the modalities": split == (False, True),
        "the moments of the modalities summed, as for uncorrelated gradients": split == (True, False),
        f"{fresh} parameters start at zero": fresh > 0,
    }
    return state, "; ".join(part for part, holds in parts.items() if holds)


def _rescaled(moments: Mapping[str, Any], scale: Tensor | None) -> dict[str, Any]:
    """Return the moments of a matrix that was scaled by ``scale``."""
    if scale is None:
        return dict(moments)
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale).cpu()
    powers = {"exp_avg": inverse, "exp_avg_sq": inverse.square(), "momentum_buffer": inverse}
    return {
        key: (value.double() * powers[key]).to(value.dtype) if key in powers else value
        for key, value in moments.items()
    }


def _resplit(moments: dict[str, Any], old: Sequence[str] | None, new: Sequence[str] | None) -> dict[str, Any]:
    """Convert moments between one shared set (None) and one set per modality. The moments of a new modality are
    zero."""
    first, second = moments["exp_avg"], moments["exp_avg_sq"]
    if old is None:
        assert new is not None
        n = len(new)
        stacked = torch.stack([first / n] * n), torch.stack([second] * n)
        return {"step": int(moments["step"]), "exp_avg": stacked[0], "exp_avg_sq": stacked[1]}
    if new is None:
        step = torch.tensor(float(moments["step"]))
        return {"step": step, "exp_avg": first.sum(0), "exp_avg_sq": second.sum(0)}

    def reordered(moment: Tensor) -> Tensor:
        zero = torch.zeros_like(moment[0])
        return torch.stack([moment[old.index(m)] if m in old else zero for m in new])

    return {"step": moments["step"], "exp_avg": reordered(first), "exp_avg_sq": reordered(second)}


def guards_state(
    saved: Mapping[str, Any], old: EarlyFusionTransformer, new: EarlyFusionTransformer, carried: Carried
) -> dict[str, Any]:
    """Return the history of the parent's guards (`mmqk.training.guards`) for the fork.

    New and rescaled parameters have no AdaGC history.
    """
    if "adagc" not in saved:
        return dict(saved)
    gamma_of = dict(zip(dict(old.named_parameters()), saved["adagc"]["gamma_P"].tolist(), strict=True))
    sources = [None if name in carried.scale else carried.from_name.get(name) for name, _ in new.named_parameters()]
    gamma_P = [math.inf if source is None else gamma_of[source] for source in sources]
    return {**saved, "adagc": {"gamma_P": saved["adagc"]["gamma_P"].new_tensor(gamma_P)}}


def loops_state(saved: Mapping[str, Any], run: RunConfig) -> dict[str, Any]:
    """Return the ``loops`` of the parent's checkpoint for the fork: step counters and the position in the data.

    Raises:
        UserError: the parent has read a sequence of `fork_skip`, or the fork reads shards and cannot skip.
    """
    assert run.parent is not None
    step, before, size = run.parent.step, run.parent.config["data"]["batch_size"], run.data.batch_size
    skip, skipped = run.fork_skip_batches, sequences(run.fork_skip)
    loops = copy.deepcopy(dict(saved))
    fit, position = loops["fit_loop"], step * run.trainer.accumulate_grad_batches
    loader = fit["state_dict"]["combined_loader"][0]
    read, left_out = step * before + loader.get("ahead", 0), loader.get("skip", [])
    first = int(sequence_numbers(np.array([read]), left_out)[0])
    if skipped and min(skipped) < first:
        raise UserError(
            f"fork_skip names sequence {min(skipped)}, but at step {step} the next sequence is {first}: name later"
            " sequences, or fork at an earlier step."
        )
    state = {"position": position, "ahead": read + (skip - step) * size}
    if run.data.streams:
        state["streams"] = streams_of_fork(
            loader.get("streams", {}), run.parent.config["data"], run.data, run.seed, skips=bool(skip or skipped)
        )
    if left_out := sorted({*left_out, *skipped}):
        state["skip"] = left_out
    fit["state_dict"]["combined_loader"] = [state]
    progress = fit["epoch_loop.batch_progress"]
    progress["is_last_batch"] = False  # True in the checkpoint of a finished parent
    for counts in (progress["total"], progress["current"]):
        counts.update({name: position - (name == "completed") for name in counts})
    return loops


def callback_state(saved: Mapping[str, Any], changed: Sequence[str], change: Change) -> dict[str, Any]:
    """Return the parts of the parent's callback state that apply to the fork.

    The divergence rule keeps the parent's initial losses and best medians, so that a fork has the thresholds of its
    parent and its siblings. If a modality's loss rises by more than `JUMP_NATS` at the fork, its best median and last
    losses are dropped. If the data changes, they are dropped for all modalities.

    Alarms compare a statistic with its recent values. They start again, but keep the unigram losses, if the model or
    the data changes or if a loss rises by more than `JUMP_NATS`.

    The current window of the radial budget starts again if a field changes that affects the update.
    """
    states = copy.deepcopy(dict(saved))
    states.pop("Checkpoints", None)  # describes the parent's folder
    model = any(name.startswith("model.") for name in changed)
    data = any(name.startswith("data.") and not name.startswith(SAME_DATA) for name in changed)
    jumped = {name for name, (before, after) in change.loss.items() if not after - before <= JUMP_NATS}

    def forget(rule: dict[str, Any]) -> None:
        for modality, series in rule.items():
            if data or modality in jumped:
                series.update(best=None, window=[], above=0)

    forget(states.get("StepLog", {}))
    alarms = states.get("Alarms")
    if alarms is not None:
        forget(alarms["rules"]["divergence"])
        if model or data or jumped:
            alarms["rules"]["rules"] = {kind: {} for kind in alarms["rules"]["rules"]}
            alarms["rules"]["not_finite"] = False
    if any(not name.startswith(("seed", "trainer.max_steps", "alarm.")) for name in changed):
        states.pop("RunMonitor", None)
    return states
