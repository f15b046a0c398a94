"""Starts a fork: a run that begins at a checkpoint of another run, converted to the configuration of the fork."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmqk.config.run import NEWER, SECTIONS
from mmqk.config.training import LossConfig, OptimConfig
from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.store import UserError, differing_fields, flatten, write_json
from mmqk.store.checkpoints import checkpoint_name
from mmqk.store.formatting import plain
from mmqk.training.checkpoint import load_checkpoint, save_checkpoint
from mmqk.training.fork_weights import Carried, Change, carry, change_of_function, perturb
from mmqk.training.optimizers import lr_multiplier, make_optimizer

if TYPE_CHECKING:
    from mmqk.config import RunConfig


PROBE_SEQUENCES = 16
FORK_NAME = "fork.json"
# Fields that change the devices, speed or loggers of a run but not its result.
NOT_CHANGES = ("checkpoint.", "threads", "logging", "activation_checkpointing", "data.workers", "data.cache",
               "fork", "trainer.devices", "trainer.num_nodes", "trainer.strategy")  # fmt: skip


def make_fork(run: RunConfig, folder: Path, probe: TokenBatch) -> str:
    """Write the first checkpoint of a fork and ``fork.json``; return a sentence that describes the fork.

    Args:
        run: The configuration, with its `fork`.
        folder: The run folder.
        probe: Held-out sequences. New gains are computed from the parent's activations on them, and the outputs of
            parent and fork are compared on them.

    Raises:
        UserError: the parent's checkpoint is missing, damaged, or not of the run and step in the configuration.
    """
    fork = run.fork
    assert fork is not None and fork.checkpoint is not None
    if not fork.checkpoint.exists():
        raise UserError(f"The checkpoint {fork.checkpoint} of --fork does not exist: name another after --fork.")
    saved = load_checkpoint(fork.checkpoint, "name another one after --fork", whole=True)
    writer = (saved.get("mmqk_run", {}).get("id"), saved["global_step"])
    if writer != (fork.parent.id, fork.parent.step):
        raise UserError(
            f"{fork.checkpoint} is no longer step {fork.parent.step} of run {fork.parent.id}: give another --out."
        )
    cuda = torch.cuda.is_available() and run.trainer.get("accelerator") != "cpu"
    device = torch.device("cuda" if cuda else "cpu")
    probe = probe.to(device)
    old = _model(ModelConfig.from_dict(saved["mmqk_model"]), run.seed, device)
    prefix = "model."
    old.load_state_dict({k.removeprefix(prefix): v for k, v in saved["state_dict"].items()})
    new = _model(run.model, run.seed, device)
    carried = carry(old, new, probe)
    if fork.noise:
        perturb(new, fork.noise, fork.seed)
    change = change_of_function(old, new, probe)

    parent, own = dict(fork.parent.config), run.nested()
    changed = changes(parent, own)
    old_optim, new_optim = OptimConfig(**parent["optim"]), run.optim
    lr = learning_rate(new_optim, fork.parent.step, run.trainer["max_steps"])
    optimizer, moments = optimizer_state(
        saved["optimizer_states"][0],
        (old_optim, old, _trained(LossConfig(**parent["loss"]), old.config)),
        (new_optim, new, _trained(run.loss, run.model)),
        carried,
        lr,
        fork.new_moments,
    )
    schedule = scheduler_state(saved["lr_schedulers"][0], new_optim, lr, groups=len(optimizer["param_groups"]))
    before, after = ((c["data"]["batch_size"], c["trainer"]["accumulate_grad_batches"]) for c in (parent, own))
    touched = [c["field"] for c in changed] + ["fork_noise"] * bool(fork.noise)
    touched += ["fork_new_moments"] * fork.new_moments
    checkpoint = {
        **saved,
        "state_dict": {prefix + name: value.cpu() for name, value in new.state_dict().items()},
        "optimizer_states": [optimizer],
        "lr_schedulers": [schedule],
        "loops": loops_state(saved["loops"], fork.parent.step, before, after, fork.skip_batches),
        "callbacks": callback_state(saved["callbacks"], touched, change),
        "mmqk_guards": guards_state(saved.get("mmqk_guards", {}), old, new, carried),
        "mmqk_model": own["model"],
        "mmqk_run": run.record(),
    }
    write_json(folder / FORK_NAME, _record(run, changed, carried, moments, change))
    save_checkpoint(checkpoint, folder / "checkpoints" / checkpoint_name(fork.parent.step))
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
            defaults = {f.name: f.default for f in fields(SECTIONS[section]) if f.name in names}
            newer[section] = defaults | config[section]
    return {"compile": False, **config, **newer}


def sentence(run: RunConfig, changed: list[dict[str, Any]], change: Change) -> str:
    """Return a sentence with the parent, the changed fields, and the change of the outputs."""
    fork = run.fork
    assert fork is not None
    parts = [f"{c['field']} {_yaml(c['to'])}" for c in changed]
    parts += [f"the next {fork.skip_batches} batches skipped"] if fork.skip_batches else []
    parts += [f"weights perturbed by {fork.noise:g} of their RMS"] if fork.noise else []
    parts += ["new moments of the optimizer"] if fork.new_moments else []
    losses = ", ".join(f"{name} {before:.4f} -> {after:.4f}" for name, (before, after) in change.loss.items())
    near = (
        "the function equals the parent's bit for bit (in fp32, before the first step)"
        if change.logits == 0
        else f"logits differ by {plain(change.logits, 2)} of their RMS, loss {losses}"
    )
    return (
        f"forked from step {fork.parent.step} of run {fork.parent.id} with {', '.join(parts) or 'nothing changed'}:"
        f" {near}"
    )


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _record(
    run: RunConfig, changed: list[dict[str, Any]], carried: Carried, optimizer: str, change: Change
) -> dict[str, Any]:
    fork = run.fork
    assert fork is not None and fork.checkpoint is not None
    given = Path(fork.given)
    parent = {
        "id": fork.parent.id,
        "folder": str(given.parent.parent) if given.suffix == ".ckpt" else fork.given,
        "checkpoint": str(fork.checkpoint),
        "step": fork.parent.step,
    }
    return {
        "parent": parent,
        "changed": changed,
        "skip_batches": fork.skip_batches,
        "noise": fork.noise,
        "seed": fork.seed,
        "new_moments": fork.new_moments,
        "added": [{"name": name, "how": how} for name, how in carried.added.items()],
        "dropped": [{"name": name, "how": how} for name, how in carried.dropped.items()],
        "optimizer": optimizer,
        "function": {
            "logits_rms_relative": change.logits,
            "loss": {name: list(values) for name, values in change.loss.items()},
        },
    }


def _model(config: ModelConfig, seed: int, device: torch.device) -> EarlyFusionTransformer:
    return EarlyFusionTransformer(config, "math", seed).to(device).eval()


def _trained(loss: LossConfig, model: ModelConfig) -> list[str]:
    weights = loss.weights_of(model.modalities)
    return [name for name, weight in zip(model.modalities, weights, strict=True) if weight > 0]


# If the changed fields raise a loss by more than this (nats), the loss history starts again, because such a rise does
# not count as a divergence.
JUMP_NATS = 0.1
SAME_DATA = ("data.val_", "data.batch_size")


def _names_in_order(config: OptimConfig, model: EarlyFusionTransformer) -> tuple[list[str], dict[str, Any]]:
    """Make the optimizer; return the parameter names in the order of its state, and its state dict."""
    optimizer, names = make_optimizer(config, model), {p: name for name, p in model.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]], optimizer.state_dict()


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
        lr: Learning rate of the next update.
        new_moments: Whether to leave out the parent's moments.
    """
    (old_config, old_model, old_trained), (new_config, new_model, new_trained) = old, new
    old_names, _ = _names_in_order(old_config, old_model)
    new_names, state = _names_in_order(new_config, new_model)
    by_name = {old_names[i]: moments for i, moments in saved["state"].items()}
    split = (old_config.split_second_moment, new_config.split_second_moment)
    state_of: dict[int, dict[str, Any]] = {}
    fresh = 0
    for i, name in enumerate(new_names):
        source = carried.from_name.get(name)
        if source is None:
            fresh += 1
            continue
        if source not in by_name:
            continue  # no gradient has updated this parameter yet
        moments = dict(by_name[source])
        scale = carried.scale.get(name)
        if scale is not None:
            inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale).cpu()
            factors = {"exp_avg": inverse, "exp_avg_sq": inverse.square(), "momentum_buffer": inverse}
            for key, factor in factors.items():
                if key in moments:  # Muon has only a momentum_buffer
                    moments[key] = (moments[key].double() * factor).to(moments[key].dtype)
        if any(split) and (split != (True, True) or list(old_trained) != list(new_trained)):
            moments = _resplit(moments, old_trained if split[0] else None, new_trained if split[1] else None)
        state_of[i] = moments
    state["state"] = state_of
    for group in state["param_groups"]:
        group["initial_lr"], group["lr"] = group["lr"], lr
    if new_moments:
        state["state"] = {}
        return state, "all moments start at zero"
    parts = ["carried over"]
    if carried.scale:
        parts.append(f"rescaled for {len(carried.scale)} parameters into which gains were folded")
    if split == (False, True):
        parts.append("the shared moments split among the modalities")
    if split == (True, False):
        parts.append("the moments of the modalities summed, as for uncorrelated gradients")
    if fresh:
        parts.append(f"{fresh} parameters start at zero")
    return state, "; ".join(parts)


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
    """Return the history of the parent's spike guards for the fork. New and rescaled parameters have no AdaGC
    history."""
    if "adagc" not in saved:
        return dict(saved)
    gamma_of = dict(zip(dict(old.named_parameters()), saved["adagc"]["gamma_P"].tolist(), strict=True))
    sources = [None if name in carried.scale else carried.from_name.get(name) for name, _ in new.named_parameters()]
    gamma_P = [math.inf if source is None else gamma_of[source] for source in sources]
    return {**saved, "adagc": {"gamma_P": saved["adagc"]["gamma_P"].new_tensor(gamma_P)}}


def scheduler_state(saved: Mapping[str, Any], config: OptimConfig, lr: float, groups: int) -> dict[str, Any]:
    """Return the scheduler state at the parent's step, with the fork's peak learning rate."""
    return {**saved, "base_lrs": [config.lr] * groups, "_last_lr": [lr] * groups, "lr_lambdas": [None] * groups}


def learning_rate(config: OptimConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of the update after ``step``."""
    return config.lr * lr_multiplier(config, step, max_steps)


def loops_state(
    saved: Mapping[str, Any], step: int, old: tuple[int, int], new: tuple[int, int], skip: int
) -> dict[str, Any]:
    """Return the state of Lightning's loops for the fork: step counters and the position in the data.

    Args:
        saved: ``loops`` of the parent.
        step: Number of optimizer steps.
        old: Sequences and micro-batches per optimizer step of the parent.
        new: Sequences and micro-batches per optimizer step of the fork.
        skip: Number of optimizer steps whose sequences are skipped.
    """
    loops = copy.deepcopy(dict(saved))
    fit = loops["fit_loop"]
    (old_sequences, _), (new_sequences, micro_batches) = old, new
    loader = fit["state_dict"]["combined_loader"][0]
    read = step * old_sequences + loader.get("ahead", 0)
    ahead = read + skip * new_sequences - step * new_sequences
    fit["state_dict"]["combined_loader"] = [{"position": step * micro_batches, "ahead": ahead}]
    progress = fit["epoch_loop.batch_progress"]
    progress["is_last_batch"] = False  # True in the checkpoint of a finished parent
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] = step * micro_batches - (name == "completed")
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
