"""Converts the parent's state of optimizer, schedule, loops and callbacks to the configuration of the fork."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmqk.config.checks import sequences
from mmqk.config.training import LossConfig, OptimConfig
from mmqk.data.order import sequence_numbers
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.store import UserError
from mmqk.training.fork.measure import Change
from mmqk.training.fork.weights import Carried
from mmqk.training.optimizers import lr_multiplier, make_optimizer, parameter_names

if TYPE_CHECKING:
    from mmqk.config import RunConfig

# If the changed fields raise a loss by more than this (nats), the loss history starts again, because such a rise does
# not count as a divergence.
JUMP_NATS = 0.1
SAME_DATA = ("data.val_", "data.batch_size")


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
        (OptimConfig(**parent["optim"]), old, _trained(LossConfig(**parent["loss"]), old.config)),
        (run.optim, new, _trained(run.loss, run.model)),
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


def _trained(loss: LossConfig, model: ModelConfig) -> list[str]:
    weights = loss.weights_of(model.modalities)
    return [name for name, weight in zip(model.modalities, weights, strict=True) if weight > 0]


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
    """Return the history of the parent's spike guards for the fork. New and rescaled parameters have no AdaGC
    history."""
    if "adagc" not in saved:
        return dict(saved)
    gamma_of = dict(zip(dict(old.named_parameters()), saved["adagc"]["gamma_P"].tolist(), strict=True))
    sources = [None if name in carried.scale else carried.from_name.get(name) for name, _ in new.named_parameters()]
    gamma_P = [math.inf if source is None else gamma_of[source] for source in sources]
    return {**saved, "adagc": {"gamma_P": saved["adagc"]["gamma_P"].new_tensor(gamma_P)}}


def loops_state(saved: Mapping[str, Any], run: RunConfig) -> dict[str, Any]:
    """Return the ``loops`` of the parent's checkpoint for the fork: step counters and the position in the data.

    Raises:
        UserError: the parent has read a sequence of `fork_skip`, or reads shards and cannot skip.
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
    if "streams" in loader:
        if size != before or skip or skipped:
            raise UserError(
                "The parent reads shards, so its fork continues at the same sample with the same data.batch_size: leave"
                " fork_skip, fork_skip_batches and data.batch_size out, or train the parent from token arrays"
                " (data.read tokens)."
            )
        state["streams"] = loader["streams"]
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
