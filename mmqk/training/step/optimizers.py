"""The optimizer of a run, both conventions of weight decay, and the learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn, optim

from mmqk.config.training import OptimConfig
from mmqk.training.step.matrix_optimizers import AdamVariant, WithMuon
from mmqk.training.step.split_adam import SplitAdamW


def lr_multiplier(config: OptimConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of update ``step`` (counted from 0) divided by the peak learning rate."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    end = config.schedule_steps or max_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    if config.schedule == "cosine":
        return config.final_lr_ratio + (1 - config.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "exponential":
        return config.final_lr_ratio**done
    return 1.0


def decays(config: OptimConfig, model: nn.Module) -> set[Tensor]:
    """Return the parameters with weight decay, chosen by the type of their module and not by their number of
    axes, because gains may also have two axes.

    Matrices are the weights of linear layers; a tied head counts as the embedding.
    """
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = {m.weight for m in model.modules() if isinstance(m, nn.Linear)} - embeddings
    rest = set(model.parameters()) - embeddings - matrices
    return (
        matrices
        | (embeddings if config.decay_embeddings else set())
        | (rest if config.decay_gains else set())
    )


def block_matrices(model: nn.Module) -> set[Tensor]:
    """Return the weights of the linear layers in a transformer's blocks, without embedding and head."""
    blocks: nn.Module = getattr(model, "blocks", model)
    return {m.weight for m in blocks.modules() if isinstance(m, nn.Linear)}


def _only(groups: list[dict[str, Any]], wanted: Callable[[Tensor], bool]) -> list[dict[str, Any]]:
    """Return the groups with only the wanted parameters, without groups that become empty."""
    parts = [{**group, "params": [p for p in group["params"] if wanted(p)]} for group in groups]
    return [part for part in parts if part["params"]]


def make_optimizer(config: OptimConfig, model: nn.Module) -> optim.Optimizer:
    """Return the optimizer of a run, with groups of parameters with and without weight decay."""
    parameters, decaying = [p for p in model.parameters() if p.requires_grad], decays(config, model)
    # torch decays by lr_t * weight_decay, with lr_t = peak * s_t and the schedule s_t. Dividing by the peak gives
    # s_t * weight_decay.
    decay = config.weight_decay / (config.lr if config.decay_mode == "independent" else 1.0)
    both = [
        {"params": [p for p in parameters if p in decaying], "weight_decay": decay},
        {"params": [p for p in parameters if p not in decaying], "weight_decay": 0.0},
    ]
    groups = [group for group in both if group["params"]]
    betas = (config.beta1, config.beta2)
    if config.matrices != "adamw":
        chosen = block_matrices(model)
        of_blocks = _only(groups, lambda p: p in chosen)
        others = _only(groups, lambda p: p not in chosen)
        if config.matrices == "muon":
            return WithMuon(of_blocks, others, config.lr, betas, config.eps, momentum=config.beta1)
        of_blocks = [{**group, "fixed_norm": True} for group in of_blocks]
        return AdamVariant([*others, *of_blocks], config.lr, betas, config.eps)
    if config.update_clip:
        return AdamVariant([{**group, "update_clip": True} for group in groups], config.lr, betas, config.eps)
    if config.split_second_moment:
        return SplitAdamW(groups, lr=config.lr, betas=betas, eps=config.eps)
    return optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
