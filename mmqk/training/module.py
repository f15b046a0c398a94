"""The LightningModule: the loss by modality, one training step, and the optimizer. M modalities, R rows of sums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import lightning as L
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from mmqk.config.training import LossConfig, OptimConfig
from mmqk.data.batch import TokenBatch
from mmqk.distributed import summed
from mmqk.model import EarlyFusionTransformer, ModelConfig, RowStats
from mmqk.model.backends import keep_graphs
from mmqk.model.linear import power_step
from mmqk.model.norms import at_least_fp32
from mmqk.model.transformer import Observer, compile_blocks, evaluation_mode
from mmqk.monitors.own.probe import first_bad_site
from mmqk.monitors.own.updates import UpdateMonitor
from mmqk.store import UserError
from mmqk.training.guards import AdaGC, QKClip, RowLog, SkipStep
from mmqk.training.losses import (
    LossSums,
    chunked_losses,
    loss_parts,
    modality_losses,
    modality_means,
    modality_sums,
    total_loss,
)
from mmqk.training.optimizers import SplitAdamW, lr_multiplier, make_optimizer, orthogonalize, scale_initial
from mmqk.training.ranks import shard, whole, whole_model

if TYPE_CHECKING:
    from mmqk.config import RunConfig


@dataclass(frozen=True)
class StepRecord:
    """The measurements of one optimizer step, on the device.

    Attributes:
        step: Number of updates, including this one. The losses are those before the update.
        lr: Learning rate of the update.
        values: Loss; gradient norm before clipping; `RowLog.measured` and `QKClip.measured`, if in use;
            `modality_sums`, flattened. `TrainingModule.named_values` returns them by tag.
    """

    step: int
    lr: float
    values: Tensor


class TrainingModule(L.LightningModule):
    """Trains an EarlyFusionTransformer. All measurements are computed over the global batch.

    After each optimizer step, ``step_record`` has the total loss, the loss and log Z by modality, and the gradient
    norm, as one device tensor. A callback reads and clears this record; the module synchronizes with the host only if
    ``optim.skip_step`` is set and the optimizer is not AdamW.

    After the first gradient norm that is not finite, the weights no longer change: the run has diverged, and
    `bad_site` needs the weights of that step.

    Args:
        model: The model; its `vocab_sizes` must be set.
        loss: Terms of the loss and their weights.
        optim: Optimizer and learning rate schedule. The Trainer's `max_steps` is the length of the run.
        seed: Seed of the initial weights and of dropout.
        backend: Attention backend, one of `BACKENDS`.

    Attributes:
        step_record: Record of the latest optimizer step; None after a callback has read it.
        trained_modalities, trained_places: Names and indices of the modalities whose loss weight is above 0.
        stored: Entries that the module adds to its checkpoints: the configuration of the model, which
            `checkpoint.check_run` compares on loading. A run adds its id and configuration, which a fork reads, and
            the strategy and number of its processes (`RunConfig.ranks`), which a resume compares.
    """

    def __init__(
        self,
        model: ModelConfig,
        loss: LossConfig | None = None,
        optim: OptimConfig | None = None,
        seed: int = 0,
        backend: str = "sdpa",
    ):
        super().__init__()
        self.model_config, self.seed, self.backend = model, seed, backend
        self.loss_config, self.optim_config = loss or LossConfig(), optim or OptimConfig()
        self.model = EarlyFusionTransformer(model, backend=backend, seed=seed)
        scale_initial(self.optim_config, self.model)
        self.loss_weights_M: Tensor
        self.register_buffer("loss_weights_M", self._loss_weights(torch.get_default_dtype()), persistent=False)
        self.stored: dict[str, Any] = {"mmqk_model": asdict(model)}
        self.step_record: StepRecord | None = None
        self.update_monitor: UpdateMonitor | None = None
        self.trained_modalities = tuple(self.loss_config.trained(model.modalities))
        self.trained_places = [model.modalities.index(name) for name in self.trained_modalities]
        chosen = self.optim_config
        self.qk_clip = None if chosen.qk_clip is None else QKClip(self.model, chosen.qk_clip)
        tensors = sum(p.requires_grad for p in self.model.parameters())
        self.adagc = None if chosen.adagc is None else AdaGC(tensors, chosen.adagc, chosen.warmup_steps)
        self.skip_step = None if chosen.skip_step is None else SkipStep(chosen.skip_step)
        both: dict[str, AdaGC | SkipStep | None] = {"adagc": self.adagc, "skip_step": self.skip_step}
        self.guards = {name: guard for name, guard in both.items() if guard is not None}
        self.row_log = RowLog(model.modalities) if backend == "flex" else None
        self._step_loss: Tensor | None = None
        self._step_sums_RM: Tensor | None = None
        self._loss_parts_M: Tensor | None = None
        self._not_finite: Tensor | None = None
        self._modality_losses, self._compiled = modality_losses, False

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        """Return the module of a run, with its activation checkpointing and compilation."""
        module = cls(run.model, run.loss, run.optim, run.seed, run.backend)
        module.stored |= {"mmqk_run": run.record(), "mmqk_ranks": run.ranks}
        module.model.activation_checkpointing = run.activation_checkpointing
        if run.optim.split_second_moment or run.monitor.gradient_agreement or run.monitor.budget_every_n_steps:
            keep_graphs()
        if run.compile:
            module.compile_step()
        return module

    def compile_step(self) -> None:
        """Compile blocks, final norm and loss."""
        compile_blocks(self.model)
        self._modality_losses = torch.compile(modality_losses, fullgraph=True, dynamic=False)
        self._compiled = True

    def configure_model(self) -> None:
        """Shard the model if the strategy has a device mesh (FSDP)."""
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def whole_model(self) -> EarlyFusionTransformer:
        """Return the trained model, unsharded; a collective call."""
        return whole_model(self.model, self.backend)

    def losses(
        self,
        batch: TokenBatch,
        observer: Observer | None = None,
        by_modality: bool = False,
        model: EarlyFusionTransformer | None = None,
        row_stats: list[RowStats] | None = None,
    ) -> LossSums:
        """Return the loss sums of `batch`, by target modality.

        Args:
            batch: Tokens and targets.
            observer: See `EarlyFusionTransformer.forward`.
            by_modality: Whether `loss_parts` will be called; True makes a chunked loss a little more expensive.
            model: The model to evaluate; None for the trained model.
            row_stats: Receives the softmax statistics of each layer.
        """
        model = model or self.model
        inputs = batch.ids_BT, batch.modality_BT, batch.document_BT, observer, row_stats
        targets = batch.targets_BT, batch.target_modality_BT, batch.target_mask_BT
        softcap, config = self.model_config.final_softcap, self.loss_config
        if config.chunk_size is None:
            M = len(self.model_config.modalities)
            logits_BTV = model(*inputs, output="raw_logits")
            return self._modality_losses(logits_BTV, *targets, M, softcap, log_z_grad=config.z_loss > 0)
        return chunked_losses(
            model(*inputs, output="hidden"),
            model.head.weight,
            *targets,
            self.loss_weights_M,
            config.z_loss,
            config.chunk_size,
            softcap=softcap,
            by_modality=by_modality,
            compiled=self._compiled,
        )

    def loss_weighting(self, batch: TokenBatch) -> tuple[Tensor, float, Tensor]:
        """Return the weights, the z-loss coefficient and the normalizer of `total_loss` and `loss_parts`."""
        return self.loss_weights_M, self.loss_config.z_loss, batch.step_targets

    def on_fit_start(self) -> None:
        """Restore the loss weights in fp32, because bf16-true converts the buffer to bf16. Raise UserError if the
        Trainer trains in fp16."""
        if str(self.trainer.precision).startswith("16"):
            raise UserError(
                f"TrainingModule does not scale its loss, which precision {self.trainer.precision} needs: set"
                " precision of lightning.Trainer to bf16-mixed or 32-true."
            )
        self.loss_weights_M = self._loss_weights(self.loss_weights_M.dtype).to(self.device)

    def _loss_weights(self, dtype: torch.dtype) -> Tensor:
        weights = self.loss_config.weights_of(self.model_config.modalities)
        return torch.tensor(weights, dtype=torch.promote_types(dtype, torch.float32))

    # One step, in the order of the calls ---------------------------------------------------------------

    def training_step(self, batch: TokenBatch, index: int) -> Tensor:
        """Return the loss of one micro-batch, and add its sums to those of the step."""
        if self.model_config.residual_dropout or self.model_config.attn_dropout:
            self._seed_dropout(index)
        attributing = self.update_monitor is not None and self.update_monitor.attributing
        by_modality = self.optim_config.split_second_moment or attributing
        sums = self._training_losses(batch, by_modality)
        loss = total_loss(sums, *self.loss_weighting(batch))
        if by_modality:
            self._loss_parts_M = loss_parts(sums, *self.loss_weighting(batch))
        self._step_sums_RM = _plus(self._step_sums_RM, modality_sums(sums, batch))
        self._step_loss = _plus(self._step_loss, loss.detach())
        # Undo two divisions: Lightning divides by the number of micro-batches and averages over ranks, but the
        # normalizer already counts the targets of all micro-batches and ranks.
        return loss * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def _training_losses(self, batch: TokenBatch, by_modality: bool) -> LossSums:
        """Return `losses`, and record the attention logits for `qk_clip` and `row_log`."""
        if self.row_log is None:
            return self.losses(batch, self.qk_clip.observer(batch) if self.qk_clip else None, by_modality)
        row_stats: list[RowStats] = []
        sums = self.losses(batch, None, by_modality, row_stats=row_stats)
        largest_LH = self.row_log.add(row_stats, batch)
        if self.qk_clip is not None:
            for layer, largest_H in enumerate(largest_LH):
                self.qk_clip.add(layer, largest_H)
        return sums

    def _seed_dropout(self, index: int) -> None:
        """Make dropout a function of (seed, micro-batch, rank), so that a resumed run draws the same masks."""
        key = f"{self.seed}/{index}/{self.global_rank}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1
        # torch.manual_seed would also seed devices that do not exist, which takes 0.8 ms.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run one backward pass of `loss`, or, for `SplitAdamW`, one for each modality's part of the loss."""
        parts_M, self._loss_parts_M = self._loss_parts_M, None
        optimizer = self.trainer.optimizers[0]
        if isinstance(optimizer, SplitAdamW):
            assert parts_M is not None
            optimizer.backward([parts_M[m] for m in self.trained_places])
            return
        if parts_M is not None:
            assert self.update_monitor is not None and self.update_monitor.window is not None
            self.update_monitor.window.add_gradients(parts_M)  # does not free the graph
        super().backward(loss, *args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip by global norm and record the step. Lightning calls this method once per optimizer step, before the
        update.

        Raises:
            UserError: the Trainer clips by value.
        """
        if gradient_clip_algorithm == "value":
            raise UserError("TrainingModule clips by norm: leave gradient_clip_algorithm of lightning.Trainer out.")
        if isinstance(optimizer, SplitAdamW):
            optimizer.sum_ranks()
        with_grad = {name: p for name, p in self._named_parameters if p.grad is not None}
        # Compute the norm as torch.nn.utils.get_total_norm does; that function does not return the norms of single
        # parameters. Cast to at least fp32 first, because `_foreach_norm` of DTensors accepts no `dtype` argument.
        gradients = [at_least_fp32(p.grad) for p in with_grad.values() if p.grad is not None]
        norms = torch._foreach_norm(gradients)
        grad_norm = whole(torch.linalg.vector_norm(torch.stack(norms)))
        factor: Tensor | None = None
        if gradient_clip_val:
            torch.nn.utils.clip_grads_with_norm_(with_grad.values(), gradient_clip_val, grad_norm)
            factor = (gradient_clip_val / (grad_norm + 1e-6)).clamp(max=1.0)  # as in clip_grads_with_norm_
            if isinstance(optimizer, SplitAdamW):
                optimizer.clip(factor)
        if self.adagc is not None:
            trained = [p for _, p in self._named_parameters if p.requires_grad]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
            self.adagc.clip(gradients, torch._foreach_norm(gradients), self.trainer.global_step)
        stop = self._stops(grad_norm)
        # `found_inf`, the flag that a gradient scaler passes to a fused optimizer, needs no host synchronization.
        optimizer.found_inf = stop.float()
        if self.update_monitor is not None:
            self.update_monitor.before_update(optimizer, factor, dict(zip(with_grad, norms, strict=True)))
        self._record_step(optimizer, grad_norm)
        # The other optimizers would add the gradient to their moments.
        if self.skip_step is not None and not isinstance(optimizer, torch.optim.AdamW) and stop:
            optimizer.zero_grad()

    def _stops(self, grad_norm: Tensor) -> Tensor:
        """Return whether to skip this update: this or an earlier norm is not finite, or `skip_step` returns true."""
        bad = ~torch.isfinite(grad_norm)
        self._not_finite = bad if self._not_finite is None else self._not_finite | bad
        if self.skip_step is None:
            return self._not_finite
        assert self._step_loss is not None
        return self._not_finite | self.skip_step.skips(summed(self._step_loss.clone()), grad_norm)

    def _record_step(self, optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
        assert self._step_sums_RM is not None and self._step_loss is not None
        sums = torch.cat([self._step_loss.float().view(1), self._step_sums_RM.flatten()])
        self._step_sums_RM = self._step_loss = None
        sums = summed(sums)  # Lightning's `reduce` would add a barrier to every step
        measured = [log.measured().float() for log in (self.row_log, self.qk_clip) if log is not None]
        values = torch.cat([sums[:1], grad_norm.float().view(1), *measured, sums[1:]])
        lr = optimizer.param_groups[0]["lr"]
        self.step_record = StepRecord(self.trainer.global_step + 1, lr, values)

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Apply the remedies that change weights after an update. This is a hook of the optimizer."""
        if self.update_monitor is not None:
            self.update_monitor.after_update(optimizer)
        if self.qk_clip is not None:
            self.qk_clip.clip(self._not_finite)
        every = self.optim_config.msign_every
        if every and (self.trainer.global_step + 1) % every == 0:
            assert self._not_finite is not None
            orthogonalize(self.model, self._not_finite)
        if self.model_config.weight_reparam == "sigma":
            power_step(self.model)

    def named_values(self, values: list[float]) -> dict[str, float]:
        """Return the values of a `StepRecord` by tag."""
        remaining = iter(values)
        names, layers = self.model_config.modalities, self.model_config.n_layers
        tags = {"loss": next(remaining), "grad_norm": next(remaining)}
        if limit := self.trainer.gradient_clip_val:
            tags["clip_factor"] = min(limit / (tags["grad_norm"] + 1e-6), 1.0)  # as in clip_grads_with_norm_
        if self.row_log is not None:
            tags |= self.row_log.values(list(islice(remaining, 2 * layers * len(names))))
        if self.qk_clip is not None:
            tags |= self.qk_clip.values(list(islice(remaining, 2 * layers)))
        sums = list(remaining)
        sums_RM = [sums[i : i + len(names)] for i in range(0, len(sums), len(names))]
        return tags | modality_means(sums_RM, names)

    def configure_optimizers(self) -> Any:
        self._named_parameters = list(self.model.named_parameters())  # after the strategy has sharded them
        optimizer = make_optimizer(self.optim_config, self.model)
        optimizer.register_step_post_hook(self._after_update)
        config, steps = self.optim_config, self.trainer.max_steps
        schedule = LambdaLR(optimizer, lambda step: lr_multiplier(config, step, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(self.stored)
        if self.guards:
            checkpoint["mmqk_guards"] = {name: guard.state for name, guard in self.guards.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name, guard in self.guards.items():  # a guard that is not in the checkpoint starts empty
            saved = checkpoint.get("mmqk_guards", {}).get(name, {})
            guard.state |= {key: value.clone() for key, value in saved.items()}

    @torch.no_grad()
    def validation_losses(self, batches: Iterable[TokenBatch]) -> dict[str, float]:
        """Return the loss and log Z by target modality over held-out batches, in the run's precision, by tag."""
        total_RM: Tensor | None = None
        with evaluation_mode(self.model), self.trainer.precision_plugin.val_step_context():
            for batch in batches:
                on_device = batch.to(self.device)
                total_RM = _plus(total_RM, modality_sums(self.losses(on_device), on_device))
        assert total_RM is not None
        return modality_means(total_RM.tolist(), self.model_config.modalities, prefix="val_")

    def modality_loss_parts(self, batch: TokenBatch, model: EarlyFusionTransformer | None = None) -> Tensor:
        """Return the loss of each modality's targets in ``batch``, (M,), in the run's precision.

        ``model`` keeps its mode (training or evaluation), which turns dropout on or off; None is the trained model.
        """
        with self.trainer.precision_plugin.train_step_context():
            # An observer makes the blocks run eagerly. `gradient_agreement` calls this method with halves of a batch,
            # and compiled blocks would need another graph for each half.
            sums = self.losses(batch, lambda *_: None, by_modality=True, model=model)
            return loss_parts(sums, *self.loss_weighting(batch))

    def bad_site(self, batches: Sequence[tuple[int, TokenBatch]]) -> str | None:
        """Return `first_bad_site` of a step whose gradient was not finite.

        ``batches`` are the micro-batches of that step with their numbers. The forward pass uses its weights and its
        dropout masks; only the masks of compiled blocks differ.
        """
        model = self.whole_model()
        for index, batch in batches:
            self._seed_dropout(index)

            def loss(observer: Observer, batch: TokenBatch = batch) -> Tensor:
                return total_loss(self.losses(batch, observer, model=model), *self.loss_weighting(batch))

            with self.trainer.precision_plugin.train_step_context():
                site = first_bad_site(model, batch, loss)
            if site is not None:
                return site
        return None


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part
