"""AdamW with both conventions of weight decay, the choice of decayed parameters, and the learning rate schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn, optim

from mmqk.ranges import BELOW_ONE, LARGEST, MOST_STEPS, SMALLEST, check_numbers, number
from mmqk.training.step.split_adam import SplitAdamW


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule.

    Args:
        lr: peak learning rate, after the warm-up.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: Adam's epsilon. Chameleon used 1e-5, Wortsman et al. 1e-8.
        weight_decay: decay of matrices, and of what `decay_embeddings` and `decay_gains` add to them.
        decay_mode: coupled multiplies the decay by the learning rate (torch's AdamW); independent multiplies it
            by the schedule alone, so that it does not change with the peak (Wortsman et al., section 3.2.2); it then
            wants a weight_decay of the order of 1e-4.
        warmup_steps: steps of linear warm-up; the first of n has 1 / n of the peak.
        schedule: what follows the warm-up: constant, cosine or exponential decay.
        final_lr: learning rate at the end as a share of the peak.
        schedule_steps: steps after which the schedule has ended, warm-up included; null for the length of the run. A
            fork that is longer than its parent keeps the parent's schedule by giving the parent's length here.
        decay_gains: whether gains, biases and learned scales decay too.
        decay_embeddings: whether the embedding matrix decays; the head is an output matrix and always does, unless
            it is the embedding matrix (`model.tie_embeddings`).
        qk_clip: threshold on the raw attention logits of a head, above which its W_q and W_k are scaled down after
            the update (QK-Clip, Kimi K2, arXiv 2507.20534; there 100); null for none.
        split_second_moment: Adam's moments by target modality, the step their sum; costs a backward pass and a set
            of moments for each modality. The step can be up to that many times as long: compare at each arm's own
            best learning rate.
    """

    lr: float = number(1e-3, SMALLEST, LARGEST)
    beta1: float = number(0.9, 0.0, BELOW_ONE)
    beta2: float = number(0.95, 0.0, BELOW_ONE)
    eps: float = number(1e-8, SMALLEST, 1e6)
    weight_decay: float = number(0.1, 1e-12, 1e3, zero=True)
    decay_mode: Literal["coupled", "independent"] = "coupled"
    warmup_steps: int = number(50, 0, MOST_STEPS)
    schedule: Literal["constant", "cosine", "exponential"] = "cosine"
    final_lr: float = number(0.1, 1e-12, 1.0, zero=True)
    schedule_steps: int | None = number(None, 1, MOST_STEPS)
    decay_gains: bool = False
    decay_embeddings: bool = True
    qk_clip: float | None = number(None, 1e-6, 1e12)
    split_second_moment: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "optim")
        if self.decay_mode == "independent" and self.weight_decay > 1:
            raise ValueError(
                f"optim.weight_decay is {self.weight_decay}, which optim.decay_mode independent subtracts in every"
                " step as a share of the weights: give it at most 1, usually of the order of 1e-4."
            )
        if self.schedule == "exponential" and self.final_lr == 0:
            raise ValueError(
                "optim.schedule exponential cannot end at optim.final_lr 0: give it a share above 0."
            )
        if self.schedule == "constant":
            object.__setattr__(self, "schedule_steps", None)  # it has no length


def lr_multiplier(config: OptimConfig, step: int, max_steps: int) -> float:
    """Learning rate of update ``step`` (from 0) of a run of ``max_steps`` as a share of the peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    end = config.schedule_steps or max_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    if config.schedule == "cosine":
        return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "exponential":
        return config.final_lr**done
    return 1.0


def decays(config: OptimConfig, model: nn.Module) -> set[Tensor]:
    """The parameters with weight decay, chosen by their module, because gains may have two axes too.

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


def make_optimizer(config: OptimConfig, model: nn.Module) -> optim.Optimizer:
    """AdamW or `SplitAdamW` with two groups: parameters with and without weight decay."""
    parameters, decaying = [p for p in model.parameters() if p.requires_grad], decays(config, model)
    # torch decays by lr_t * weight_decay; dividing by the peak leaves the schedule alone: s_t * weight_decay.
    decay = config.weight_decay / (config.lr if config.decay_mode == "independent" else 1.0)
    both = [
        {"params": [p for p in parameters if p in decaying], "weight_decay": decay},
        {"params": [p for p in parameters if p not in decaying], "weight_decay": 0.0},
    ]
    groups = [group for group in both if group["params"]]
    betas = (config.beta1, config.beta2)
    if config.split_second_moment:
        return SplitAdamW(groups, lr=config.lr, betas=betas, eps=config.eps)
    return optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
