"""Configuration of loss, optimizer, monitors, checkpoints, alarms and Lightning's Trainer. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mmqk.model.ranges import BELOW_ONE, LARGEST, MOST_STEPS, SMALLEST, check_fields, number, refuse, to_defaults
from mmqk.store.alarms import NAMES


@dataclass(frozen=True)
class LossConfig:
    """Terms of the loss and their weights.

    Attributes:
        z_loss: Coefficient of log(Z)^2, with Z the normalizer of the output softmax (PaLM, arXiv 2204.02311).
        weights: Weight of a modality's loss and z-loss, by modality name. The default is 1; 0 switches a loss off.
        chunk_size: Number of tokens whose logits exist at the same time. Head and loss process one chunk after
            another, so their memory does not grow with batch size times vocabulary; the loss is equal up to rounding.
            With a large vocabulary on a GPU, a few thousand tokens are usual. Null: all tokens at once.
    """

    z_loss: float = number(0.0, 1e-12, 1e6, zero=True)
    weights: dict[str, float] = number(dict, 1e-12, 1e6, zero=True)
    chunk_size: int | None = number(None, 1, 2**40)

    def __post_init__(self) -> None:
        check_fields(self, "loss")

    def weights_of(self, modalities: Sequence[str]) -> list[float]:
        """Return the weight of each of the modalities, in their order.

        Raises:
            ValueError: a weight names another modality, or no weight is above 0.
        """
        for name in self.weights:
            if name not in modalities:
                known = ", ".join(modalities)
                raise ValueError(f"loss.weights names {name!r}, but the modalities are {known}.")
        weights = [self.weights.get(name, 1.0) for name in modalities]
        if modalities and not any(weights):
            raise ValueError(
                f"loss.weights are 0 for {' and '.join(modalities)}, which trains nothing: give at least one of them"
                " a weight above 0."
            )
        return weights

    def trained(self, modalities: Sequence[str]) -> list[str]:
        """Return the modalities whose weight is above 0."""
        return [name for name, weight in zip(modalities, self.weights_of(modalities), strict=True) if weight > 0]


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning rate schedule.

    Args:
        lr: peak learning rate, reached after the warm-up.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: Adam's epsilon. Chameleon used 1e-5, Wortsman et al. 1e-8.
        weight_decay: weight decay of matrices; `decay_embeddings` and `decay_gains` apply it to other parameters too.
        decay_mode: coupled (the decay is multiplied by the learning rate, as in torch's AdamW) or independent (it is
            multiplied by the learning rate divided by the peak, as in Wortsman et al., section 3.2.2, and needs a
            weight_decay near 1e-4).
        warmup_steps: steps of linear warm-up; with n steps, step 1 has 1 / n of the peak and step n the whole peak.
        schedule: schedule after the warm-up: constant, cosine or exponential.
        final_lr_ratio: final learning rate as a fraction of the peak.
        schedule_steps: length of the schedule in steps, warm-up included; null: the length of the run. To keep the
            parent's schedule in a fork that trains longer than its parent, give the parent's number of steps.
        decay_gains: apply weight decay to gains, biases and learned scales too.
        decay_embeddings: apply weight decay to the embedding matrix. The head always decays, unless it is the
            embedding matrix (`model.tie_embeddings`).
        qk_clip: threshold for the raw attention logits of a head. If a logit exceeds it, W_q and W_k of the head are
            scaled down after the update (QK-Clip, Kimi K2, arXiv 2507.20534, which uses 100); null: off.
        split_second_moment: keep separate Adam moments for each target modality, and add up the updates of the
            modalities. It costs a backward pass and a set of moments per modality. With n modalities an update can
            be up to n times as large, so compare arms at their own best learning rates.
        matrices: optimizer of the matrices of the blocks: adamw; muon (updates with AdamW's RMS; momentum `beta1`);
            adamh (Adam with a fixed Frobenius norm of each matrix; lr is the length of a step relative to the norm).
        update_clip: divide the learning rate of a tensor by the RMS of g / sqrt(v) if this RMS is above 1
            (StableAdamW, arXiv 2304.13013).
        adagc: after the warm-up, clip the gradient of each tensor if its norm is more than this multiple of the
            running mean of the norm (AdaGC, arXiv 2502.11034, which uses 1.05); null: off.
        skip_step: skip an update whose loss or gradient norm is more than this many standard deviations above
            the mean of the last 128 steps (OLMo-core, which uses 6); null: off.
        msign_every: number of steps between two replacements of each W_q, W_k, W_v and W_o by its orthogonal factor,
            scaled to the norm of the matrix (MSign, arXiv 2602.01734, which uses 100); 0: never.
        width_scaling: mup scales initial values, learning rates and weight decay by d_model / `base_width` (µP, arXiv
            2203.03466, Table 3), so that a learning rate tuned at `base_width` suits other widths. Scale n_heads and
            d_ff in proportion to d_model; if head_dim grows instead of n_heads, set `model.attn_scale` to inverse.
        base_width: d_model at which `width_scaling` changes nothing.
    """

    lr: float = number(1e-3, SMALLEST, LARGEST)
    beta1: float = number(0.9, 0.0, BELOW_ONE)
    beta2: float = number(0.95, 0.0, BELOW_ONE)
    eps: float = number(1e-8, SMALLEST, 1e6)
    weight_decay: float = number(0.1, 1e-12, 1e3, zero=True)
    decay_mode: Literal["coupled", "independent"] = "coupled"
    warmup_steps: int = number(50, 0, MOST_STEPS)
    schedule: Literal["constant", "cosine", "exponential"] = "cosine"
    final_lr_ratio: float = number(0.1, 1e-12, 1.0, zero=True)
    schedule_steps: int | None = number(None, 1, MOST_STEPS)
    decay_gains: bool = False
    decay_embeddings: bool = True
    qk_clip: float | None = number(None, 1e-6, 1e12)
    split_second_moment: bool = False
    matrices: Literal["adamw", "muon", "adamh"] = "adamw"
    update_clip: bool = False
    adagc: float | None = number(None, 1.0, 1e6)
    skip_step: float | None = number(None, 1e-3, 1e6)
    msign_every: int = number(0, 0, MOST_STEPS)
    width_scaling: Literal["none", "mup"] = "none"
    base_width: int = number(64, 1, 2**20)

    def __post_init__(self) -> None:
        check_fields(self, "optim")
        of_adamw = "split_second_moment" if self.split_second_moment else "update_clip"
        joint = "update_clip" if self.update_clip else "adagc"
        refuse({
            f"optim.weight_decay is {self.weight_decay}, but with optim.decay_mode 'independent' it is the share of the"
            " weights that a step subtracts: give it at most 1, usually of the order of 1e-4.":
                self.decay_mode == "independent" and self.weight_decay > 1,
            "optim.schedule 'exponential' cannot end at optim.final_lr_ratio 0: give a ratio above 0.":
                self.schedule == "exponential" and self.final_lr_ratio == 0,
            f"optim.{of_adamw} is a variant of AdamW, but optim.matrices is {self.matrices}: remove one of them.":
                self.matrices != "adamw" and (self.split_second_moment or self.update_clip),
            f"optim.{joint} acts on the gradient of all modalities together, but optim.split_second_moment keeps them"
            " apart: remove one of them.":
                self.split_second_moment and (self.update_clip or self.adagc is not None),
            f"optim.width_scaling mup is for Adam, but optim.matrices is {self.matrices}: remove one of them.":
                self.width_scaling == "mup" and self.matrices != "adamw",
        })  # fmt: skip
        if self.width_scaling == "none":
            to_defaults(self, "base_width")
        if self.schedule == "constant":
            to_defaults(self, "schedule_steps")  # a constant schedule has no length


@dataclass(frozen=True)
class MonitorConfig:
    """Probes: separate fp32 forward passes that measure the model during training.

    No option changes the weights of the run: they are bit-identical with every option.

    Args:
        every_n_steps: optimizer steps between two probes; 0 switches probes off.
        at: single steps to probe as well.
        probe_sequences: number of sequences in a probe.
        probe_split: sequences of a probe: current (the training batch) or heldout (the first validation sequences,
            which are the same in every run, so maxima of different runs can be compared).
        tensorboard_layers: write every per-layer series to TensorBoard, not only maximum and median over layers.
        heads: measure attention logits and weights of each head.
        parameters: measure for every parameter the gradient norm, the RMS of the latest update (once divided by the
            learning rate, once by the RMS of the parameter), and the share of elements with sqrt(v_hat) below Adam's
            epsilon; and the effective rank of the update of W_q^T W_k.
        second_moment: measure for every matrix the RMS of g / sqrt(v) in the latest update, with the gradient g and
            Adam's second moment v.
        precision: measure the rounding error of additions to a bf16 residual stream, with one more forward pass.
        matrices: measure the norm, the spectral norm and the stable rank of every weight matrix of the blocks, by
            singular value decomposition.
        gradient_agreement: measure the cosine between the gradients of two modalities, and the signal and noise of
            each modality's gradient, from separate gradients of the two halves of a micro-batch. Each probe then
            costs two more forward passes, and a backward pass per half and modality.
        sharpness: measure the curvature of the loss along Adam's step, with three more forward and backward passes.
        budget_every_n_steps: measure the radial budget (how much the gradients of each modality increase the norms
            of W_q and W_k) over windows of steps; the value is the number of optimizer steps from the start of one
            window to the start of the next. 0 switches the budget off. A step inside a window costs one more backward
            pass for each modality except one.
        budget_steps: length of a window in steps.
    """

    every_n_steps: int = number(100, 0, MOST_STEPS)
    at: list[int] = number(list, 1, MOST_STEPS)
    probe_sequences: int = number(4, 1, 2**20)
    probe_split: Literal["current", "heldout"] = "current"
    tensorboard_layers: bool = False
    heads: bool = False
    parameters: bool = False
    second_moment: bool = False
    precision: bool = False
    matrices: bool = False
    gradient_agreement: bool = False
    sharpness: bool = False
    budget_every_n_steps: int = number(0, 0, MOST_STEPS)
    budget_steps: int = number(50, 1, MOST_STEPS)

    def __post_init__(self) -> None:
        check_fields(self, "monitor")
        of_probes = (
            "at", "heads", "parameters", "second_moment", "precision", "matrices", "gradient_agreement", "sharpness"
        )  # fmt: skip
        refuse({
            f"monitor.budget_every_n_steps {self.budget_every_n_steps} is less than monitor.budget_steps"
            f" {self.budget_steps}: windows cannot overlap, so raise it.":
                0 < self.budget_every_n_steps < self.budget_steps,
        } | {
            f"monitor.{name} is part of a probe: set monitor.every_n_steps above 0.":
                getattr(self, name) and not self.every_n_steps
            for name in of_probes
        })  # fmt: skip


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run writes checkpoints, and which ones it keeps.

    Args:
        every_n_steps: optimizer steps between two checkpoints; 0 writes only the last one.
        keep: number of newest checkpoints to keep.
        at: steps whose checkpoints are always kept, for forks; not part of the identity of the run.
    """

    every_n_steps: int = number(500, 0, MOST_STEPS)
    keep: int = number(2, 1, MOST_STEPS)
    at: list[int] = number(list, 1, MOST_STEPS)

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint")


@dataclass(frozen=True)
class AlarmConfig:
    """What a run does when an alarm begins, besides reporting it.

    The alarms are spike, spike_median, rise, stall, growth, collapse and non_finite (docs/alarms.md). Divergence has
    its own field and cannot be listed in the others.

    Args:
        checkpoint: alarms that write a permanent checkpoint ``alarm_<name>_step….ckpt`` when they first begin.
        probe: alarms after which every step is probed, for `probe_steps` steps.
        stop: alarms that end the run with the status interrupted; the same command resumes it.
        probe_steps: number of probed steps after an alarm of `probe`.
        stop_diverged: whether a divergence ends the run. If false, only a value that is not finite ends it.
    """

    checkpoint: list[str] = field(default_factory=list)
    probe: list[str] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    probe_steps: int = number(20, 1, MOST_STEPS)
    stop_diverged: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "alarm")
        for action in ("checkpoint", "probe", "stop"):
            for name in getattr(self, action):
                if name not in NAMES:
                    raise ValueError(f"alarm.{action} has '{name}': the alarms are {', '.join(NAMES)}.")
                if name == "divergence":
                    raise ValueError(
                        f"alarm.{action} has 'divergence', which ends a run without a checkpoint of the diverged"
                        " weights: leave it out, or set alarm.stop_diverged to false so that the run goes on."
                    )

    @property
    def acts(self) -> bool:
        """Whether this configuration can change a run. Only then is it part of the run's identity."""
        return bool(self.checkpoint or self.probe or self.stop or not self.stop_diverged)


# Fields of the Trainer that are part of a run's identity.
IN_IDENTITY = ("max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")


@dataclass(frozen=True)
class TrainerConfig:
    """Arguments of Lightning's Trainer; mmqk sets all others.

    Args:
        devices: processes per machine, one per device.
        num_nodes: number of machines.
        precision: 32-true, bf16-mixed (bf16 operations, fp32 weights) or bf16-true (bf16 weights too: an
            experiment, because most updates are too small to change a weight).
        max_steps: number of optimizer steps.
        accumulate_grad_batches: micro-batches per optimizer step.
        gradient_clip_val: largest gradient norm; larger gradients are scaled down to it. 0 or null: no clipping.
        deterministic: use deterministic kernels only, whose order of summation differs from that of the usual
            kernels.
        benchmark: let cuDNN time its kernels and use the fastest.
        detect_anomaly: stop at the first NaN in a backward pass, with a traceback of the forward pass; slow.
        accelerator: cpu, gpu, mps or auto (a GPU if there is one).
        strategy: how several processes train together: ddp, fsdp or auto (ddp for several processes).
    """

    devices: int = number(1, 1, 1024)
    num_nodes: int = number(1, 1, 2**16)
    precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "32-true"
    max_steps: int = number(1000, 1, MOST_STEPS)
    accumulate_grad_batches: int = number(1, 1, 2**24)
    gradient_clip_val: int | float | None = number(1.0, 1e-12, 1e12, zero=True)
    deterministic: bool | None = None
    benchmark: bool | None = None
    detect_anomaly: bool = False
    accelerator: str = "auto"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"

    def __post_init__(self) -> None:
        check_fields(self, "trainer")
        if self.processes > 1 and self.strategy == "auto":
            object.__setattr__(self, "strategy", "ddp")

    @property
    def processes(self) -> int:
        """Number of processes that train together."""
        return self.devices * self.num_nodes
