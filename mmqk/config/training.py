"""What a training run does beside model and data: loss, optimizer, monitors, checkpoints. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmqk.ranges import BELOW_ONE, LARGEST, MOST_STEPS, SMALLEST, check_numbers, number


@dataclass(frozen=True)
class LossConfig:
    """What the loss adds up.

    Attributes:
        z_loss: Coefficient of log(Z)^2, Z the normaliser of the output softmax (PaLM, arXiv 2204.02311).
        weights: Weight of each modality's loss and z-loss by name, 1 where left out; 0 switches it off.
        chunk: Tokens whose logits exist at once: the head and the loss take a chunk after the other, so that their
            memory does not grow with batch times vocabulary; the loss is the same up to rounding. A few thousand
            are usual on a GPU with a large vocabulary. Null is all of them at once.
    """

    z_loss: float = number(0.0, 1e-12, 1e6, zero=True)
    weights: dict[str, float] = number(dict, 1e-12, 1e6, zero=True)
    chunk: int | None = number(None, 1, 2**40)

    def __post_init__(self) -> None:
        check_numbers(self, "loss")

    def weights_of(self, modalities: Sequence[str]) -> list[float]:
        """The weight of each modality, in the order given.

        Raises:
            ValueError: a weight of a modality that is not among them, or no weight above 0.
        """
        for name in self.weights:
            if name not in modalities:
                known = ", ".join(modalities)
                raise ValueError(f"loss.weights names {name!r}, but the modalities here are {known}.")
        weights = [self.weights.get(name, 1.0) for name in modalities]
        if modalities and not any(weights):
            raise ValueError(
                f"loss.weights are 0 for {' and '.join(modalities)}, which trains nothing: give at least one of them"
                " a weight above 0."
            )
        return weights


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


@dataclass(frozen=True)
class MonitorConfig:
    """Probes: a separate fp32 forward of the present weights that never touches training.

    Everything is an option that leaves the weights of the run as they are, bit for bit.

    Args:
        every_n_steps: optimizer steps between two probes; 0 switches them off.
        sequences: how many sequences a probe looks at.
        batch: current probes the batch being trained; heldout the first validation sequences, which are the
            same tokens in every run, so that maxima of different runs can be compared.
        tensorboard_layers: write every per-layer series to TensorBoard too, not only maximum and median.
        heads: at each probe, also attention logits and weights by head.
        parameters: at each probe, the gradient norm of every parameter, the size of its latest update over the
            learning rate and over the parameter, and the share of its elements below Adam's epsilon.
        precision: at each probe, what additions to a bf16 residual stream lose, or would lose; one more forward.
        gradient_agreement: at each probe of a training step, how far the modalities' gradients agree, from the two
            halves of the micro-batch at hand; two more forwards and a backward pass for each half and modality.
        budget_every_n_steps: optimizer steps between the beginnings of two windows of the radial budget of W_q and
            W_k; 0 switches it off. Inside a window a step costs a backward pass more for each modality but one.
        budget_steps: length of such a window.
    """

    every_n_steps: int = number(100, 0, MOST_STEPS)
    sequences: int = number(4, 1, 2**20)
    batch: Literal["current", "heldout"] = "current"
    tensorboard_layers: bool = False
    heads: bool = False
    parameters: bool = False
    precision: bool = False
    gradient_agreement: bool = False
    budget_every_n_steps: int = number(0, 0, MOST_STEPS)
    budget_steps: int = number(50, 1, MOST_STEPS)

    def __post_init__(self) -> None:
        check_numbers(self, "monitor")
        if 0 < self.budget_every_n_steps < self.budget_steps:
            raise ValueError(
                f"monitor.budget_every_n_steps {self.budget_every_n_steps} is less than monitor.budget_steps"
                f" {self.budget_steps}: windows cannot overlap, so raise it."
            )
        for name in ("heads", "parameters", "precision", "gradient_agreement"):
            if getattr(self, name) and not self.every_n_steps:
                raise ValueError(f"monitor.{name} is part of a probe: set monitor.every_n_steps above 0.")


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run can be taken up again.

    Args:
        every_n_steps: optimizer steps between two checkpoints; 0 writes only the last one.
        keep: how many of the newest are kept.
        at: steps at which one is written and kept whatever comes after, for forks; no part of the run's identity.
    """

    every_n_steps: int = number(500, 0, MOST_STEPS)
    keep: int = number(2, 1, MOST_STEPS)
    at: list[int] = number(list, 1, MOST_STEPS)

    def __post_init__(self) -> None:
        check_numbers(self, "checkpoint")
