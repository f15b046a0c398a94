"""The LightningModule: one training step, its loss by modality, its optimizer. M modalities."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import lightning as L
import torch
from torch import Tensor

from mmqk.data.batch import TokenBatch
from mmqk.distributed import summed
from mmqk.model import EarlyFusionTransformer, ModelConfig, Rows, compile_blocks, keep_graphs, power_step
from mmqk.model.norms import at_least_fp32
from mmqk.model.transformer import Sink
from mmqk.training.fsdp import shard, whole, whole_model
from mmqk.training.step.chunked_loss import chunked_losses
from mmqk.training.step.losses import (
    LossConfig,
    LossSums,
    loss_parts,
    modality_losses,
    modality_means,
    modality_sums,
    total_loss,
)
from mmqk.training.step.optimizers import OptimConfig, lr_multiplier, make_optimizer
from mmqk.training.step.qk_clip import QKClip
from mmqk.training.step.row_stats import RowLog
from mmqk.training.step.split_adam import SplitAdamW

if TYPE_CHECKING:
    from mmqk.config import RunConfig


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step measured, still on the device.

    Attributes:
        step: updates done with this one; its losses are those of the weights before it.
        lr: learning rate of the update.
        values: loss, gradient norm before clipping, then the sums by modality flattened (`_sums_RM`), what QK-Clip
            measured (`QKClip.measured`) and what the kernel knows of attention's rows (`RowLog.measured`).
    """

    step: int
    lr: float
    values: Tensor


class StepWatch(Protocol):
    """Looks at an optimizer step from inside, in this order; it changes nothing.

    Attributes:
        attributing: whether `before_backward` is wanted.
    """

    @property
    def attributing(self) -> bool: ...

    def before_backward(self, parts_M: Tensor) -> None:
        """Of each micro-batch: what each modality adds to the loss; the graph has to stay."""

    def before_update(
        self, optimizer: torch.optim.Optimizer, factor: Tensor | None, grad_norms: Mapping[str, Tensor]
    ) -> None:
        """Gradients are whole and clipped by ``factor``; their norms before that, by parameter."""

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Before any intervention on the weights."""


class TrainingModule(L.LightningModule):
    """Trains an EarlyFusionTransformer; everything it measures is a function of the global batch.

    After each optimizer step ``step_record`` holds the loss, the losses and log Z by modality and the gradient
    norm as one device tensor, read and cleared by a callback without a host synchronisation here.

    After every update come the interventions on the weights, QK-Clip and the power step of σReparam: a hook of the
    optimizer, so that nothing steps without them.

    From the first gradient norm that is not finite on, the weights stay as they are: the run is over, and what broke
    it can still be found in them (`bad_site`).

    Attributes:
        step_record: of the latest optimizer step, until it is taken.
        step_watch: looks at every step; None for nobody.
        run_record: id and configuration of the run, which travel in its checkpoints: what a fork starts from.
        ranks: how many processes train it together and how (`RunConfig.ranks`), which travels too.
    """

    def __init__(self, model: ModelConfig, loss: LossConfig, optim: OptimConfig, seed: int, backend: str):
        super().__init__()
        self.model_config, self.loss_config, self.optim_config, self.seed = model, loss, optim, seed
        self.backend = backend
        self.model = EarlyFusionTransformer(model, backend=backend, seed=seed)
        self.loss_weights_M: Tensor
        self.register_buffer("loss_weights_M", self._loss_weights(torch.get_default_dtype()), persistent=False)
        self.step_record: StepRecord | None = None
        self._sums_RM: Tensor | None = None
        self._loss: Tensor | None = None
        self._parts_M: Tensor | None = None
        self._broken: Tensor | None = None
        self.step_watch: StepWatch | None = None
        self.run_record: dict[str, Any] | None = None
        self.ranks: dict[str, Any] | None = None
        self._clip = None if optim.qk_clip is None else QKClip(self.model, optim.qk_clip)
        self._rows = RowLog(model.modalities) if backend == "flex" else None
        self._modality_losses, self._compiled = modality_losses, False

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        """What a run trains, recomputed and compiled as it says; graphs stay where its monitors go back twice."""
        module = cls(run.model, run.loss, run.optim, run.seed, run.backend)
        module.run_record, module.ranks = run.record(), run.ranks
        module.model.recompute = run.recompute
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

    def on_fit_start(self) -> None:
        """bf16-true has rounded them."""
        self.loss_weights_M = self._loss_weights(self.loss_weights_M.dtype).to(self.device)

    def _loss_weights(self, dtype: torch.dtype) -> Tensor:
        weights = self.loss_config.weights_of(self.model_config.modalities)
        return torch.tensor(weights, dtype=torch.promote_types(dtype, torch.float32))

    def configure_model(self) -> None:
        """Lightning's word that a model may be cut up, where the strategy does so."""
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def whole_model(self) -> EarlyFusionTransformer:
        """What is trained, in one piece; a collective call."""
        return whole_model(self.model, self.backend)

    @property
    def trained_modalities(self) -> tuple[str, ...]:
        """Those whose loss is not switched off."""
        return tuple(n for n in self.model_config.modalities if self.loss_config.weights.get(n, 1.0) > 0)

    @property
    def trained_places(self) -> list[int]:
        """Their places among the modalities."""
        return [self.model_config.modalities.index(name) for name in self.trained_modalities]

    # One step ------------------------------------------------------------------------------------------

    def training_step(self, batch: TokenBatch, index: int) -> Tensor:
        if self.model_config.residual_dropout or self.model_config.attn_dropout:
            self._seed_dropout(index)
        attributing = self.step_watch is not None and self.step_watch.attributing
        by_modality = self.optim_config.split_second_moment or attributing
        sink = None if self._clip is None or self._rows is not None else self._clip.sink(batch)
        rows: list[Rows] | None = None if self._rows is None else []
        sums = self._losses(batch, sink, by_modality, rows=rows)
        if self._rows is not None and rows is not None:
            largest_LH = self._rows.see(rows, batch)
            if self._clip is not None:
                for layer, largest_H in enumerate(largest_LH):
                    self._clip.see(layer, largest_H)
        weighing = self._weighing(batch)
        loss = total_loss(sums, *weighing)
        if by_modality:
            self._parts_M = loss_parts(sums, *weighing)
        self._sums_RM = _add(self._sums_RM, modality_sums(sums, batch))
        self._loss = _add(self._loss, loss.detach())
        # Lightning divides by the micro-batches and averages over ranks; the denominator has both already.
        return loss * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        parts_M, self._parts_M = self._parts_M, None
        optimizer = self.trainer.optimizers[0]
        if isinstance(optimizer, SplitAdamW):
            assert parts_M is not None
            optimizer.backward([parts_M[m] for m in self.trained_places])
            return
        if parts_M is not None and self.step_watch is not None:
            self.step_watch.before_backward(parts_M)
        super().backward(loss, *args, **kwargs)

    def _losses(
        self,
        batch: TokenBatch,
        sink: Sink | None = None,
        by_modality: bool = False,
        model: EarlyFusionTransformer | None = None,
        rows: list[Rows] | None = None,
    ) -> LossSums:
        """Of ``model``, or (None) the one that is trained.

        ``by_modality`` says whether `loss_parts` will be wanted, which costs a loss in chunks a little more.
        """
        model = model or self.model
        inputs = batch.ids_BT, batch.modality_BT, batch.document_BT, sink
        targets = batch.targets_BT, batch.target_modality_BT, batch.target_mask_BT
        c = self.loss_config
        if c.chunk is None:
            logits_BTV = model(*inputs, rows=rows, raw=True)
            M, cap = len(self.model_config.modalities), self.model_config.final_softcap
            return self._modality_losses(logits_BTV, *targets, M, cap, log_z_grad=c.z_loss > 0)
        return chunked_losses(
            model(*inputs, head=False, rows=rows),
            model.head.weight,
            *targets,
            self.loss_weights_M,
            c.z_loss,
            c.chunk,
            softcap=self.model_config.final_softcap,
            by_modality=by_modality,
            compiled=self._compiled,
        )

    def _weighing(self, batch: TokenBatch) -> tuple[Tensor, float, Tensor]:
        return self.loss_weights_M, self.loss_config.z_loss, batch.step_targets

    def modality_loss_parts(self, batch: TokenBatch, model: EarlyFusionTransformer | None = None) -> Tensor:
        """What each modality's targets add to the loss of ``batch``, (M,), in the run's precision; dropout is left to
        the mode that ``model`` is in: a copy, or (None) the one that is trained."""
        with self.trainer.precision_plugin.train_step_context():
            # A sink that looks at nothing: halves of a batch are no reason to compile.
            sums = self._losses(batch, lambda *_: None, by_modality=True, model=model)
            return loss_parts(sums, *self._weighing(batch))

    def bad_site(self, batches: Sequence[tuple[int, TokenBatch]]) -> str | None:
        """`first_bad_site` of a step whose gradient was not finite, from its micro-batches with their numbers.

        The weights are those that it had, and dropout draws what it drew; compiled blocks drew masks of their own.
        """
        from mmqk.monitors.training_run.bad_site import first_bad_site

        model = self.whole_model()
        for index, batch in batches:
            self._seed_dropout(index)

            def loss(sink: Sink, batch: TokenBatch = batch) -> Tensor:
                return total_loss(self._losses(batch, sink, model=model), *self._weighing(batch))

            with self.trainer.precision_plugin.train_step_context():
                found = first_bad_site(model, batch, loss)
            if found is not None:
                return found
        return None

    def _seed_dropout(self, index: int) -> None:
        """Dropout is a function of (seed, micro-batch, rank), so a resumed run draws what it would have drawn."""
        key = f"{self.seed}/{index}/{self.global_rank}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed takes 0.8 ms, for devices that are not there
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Once an optimizer step, before the update: clips by global norm and closes the step's record."""
        if isinstance(optimizer, SplitAdamW):
            optimizer.sum_ranks()
        reached = {name: p for name, p in self._named if p.grad is not None}
        # The way of torch.nn.utils.get_total_norm, which does not give the norms of the parameters away.
        # In at least fp32; the norm of shards takes no dtype.
        gradients = [at_least_fp32(p.grad) for p in reached.values() if p.grad is not None]
        norms = torch._foreach_norm(gradients)
        grad_norm = whole(torch.linalg.vector_norm(torch.stack(norms)))
        factor: Tensor | None = None
        if gradient_clip_val:
            torch.nn.utils.clip_grads_with_norm_(reached.values(), gradient_clip_val, grad_norm)
            factor = (gradient_clip_val / (grad_norm + 1e-6)).clamp(max=1.0)  # torch's own
            if isinstance(optimizer, SplitAdamW):
                optimizer.clip(gradient_clip_val, grad_norm)
        self._hold(optimizer, grad_norm)
        if self.step_watch is not None:
            self.step_watch.before_update(optimizer, factor, dict(zip(reached, norms, strict=True)))
        assert self._sums_RM is not None and self._loss is not None
        values = torch.cat([self._loss.float().view(1), self._sums_RM.flatten()])
        self._sums_RM = self._loss = None
        values = summed(
            values
        )  # Lightning's own `reduce` waits for a barrier of its own first, in every step
        measured = [log.measured().float() for log in (self._clip, self._rows) if log is not None]
        values = torch.cat([values[:1], grad_norm.float().view(1), values[1:], *measured])
        lr = optimizer.param_groups[0]["lr"]
        self.step_record = StepRecord(self.trainer.global_step + 1, lr, values)

    def _hold(self, optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
        """No update once a gradient was not finite. As a gradient scaler tells an optimizer: nobody asks the host."""
        bad = ~torch.isfinite(grad_norm)
        self._broken = bad if self._broken is None else self._broken | bad
        optimizer.found_inf = self._broken.float()  # type: ignore[attr-defined]

    def named_values(self, values: list[float]) -> dict[str, float]:
        """The numbers of a `StepRecord` by tag."""
        loss, grad_norm, *rest = values
        names, layers = self.model_config.modalities, self.model_config.n_layers
        found = {"loss": loss, "grad_norm": grad_norm}
        if self._rows is not None:
            of_rows = 2 * layers * len(names)
            found |= self._rows.values(rest[-of_rows:])
            del rest[-of_rows:]
        if self._clip is not None:
            found |= self._clip.values(rest[-2 * layers :])
            del rest[-2 * layers :]
        return found | modality_means(
            [rest[i : i + len(names)] for i in range(0, len(rest), len(names))], names
        )

    @torch.no_grad()
    def validation_losses(self, batches: Iterable[TokenBatch]) -> dict[str, float]:
        """Loss and log Z by target modality over held-out batches, in the run's precision, as ``val_`` tags."""
        was_training = self.model.training
        self.model.eval()
        total_RM: Tensor | None = None
        with self.trainer.precision_plugin.val_step_context():
            for batch in batches:
                on_device = batch.to(self.device)
                total_RM = _add(total_RM, modality_sums(self._losses(on_device), on_device))
        self.model.train(was_training)
        assert total_RM is not None
        return modality_means(total_RM.tolist(), self.model_config.modalities, prefix="val_")

    # Optimizer -----------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        self._named = list(self.model.named_parameters())  # as a strategy has cut them up by now
        optimizer = make_optimizer(self.optim_config, self.model)
        optimizer.register_step_post_hook(self._after_update)
        max_steps = self.trainer.max_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: lr_multiplier(self.optim_config, step, max_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.step_watch is not None:
            self.step_watch.after_update(optimizer)
        if self._clip is not None:
            self._clip.clip(self._broken)
        if self.model_config.weight_reparam == "sigma":
            power_step(self.model)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The configuration travels with the weights; `mmqk.training.checkpoint` compares it on loading."""
        checkpoint["mmqk_model"] = asdict(self.model_config)
        if self.run_record is not None:
            checkpoint["mmqk_run"] = self.run_record
        if self.ranks is not None:
            checkpoint["mmqk_ranks"] = self.ranks


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part
