"""The LightningModule: one training step, its loss by modality, its optimizer. M modalities."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig, power_step
from mmqk.model.transformer import Sink
from mmqk.store import tag
from mmqk.training.loss import LossConfig, LossSums, loss_parts, modality_losses, total_loss
from mmqk.training.optim import OptimConfig, lr_multiplier, make_optimizer
from mmqk.training.qk_clip import QKClip
from mmqk.training.split_adam import SplitAdamW


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step measured, still on the device.

    Attributes:
        step: updates done with this one; its losses are those of the weights before it.
        lr: learning rate of the update.
        values: loss, gradient norm before clipping, then the sums by modality flattened (`_sums_RM`) and, with
            QK-Clip, what it measured (`QKClip.measured`).
    """

    step: int
    lr: float
    values: Tensor


def modality_sums(sums: LossSums, batch: TokenBatch) -> Tensor:
    """(R, M), by target modality, in fp32: count, summed cross-entropy, summed log Z, and, where the source
    knows the probability of its tokens, the summed cross-entropy of that knowledge."""
    rows = [sums.count, sums.ce, sums.log_z]
    if batch.target_surprise_BT is not None:
        known_BT = batch.target_surprise_BT * batch.target_mask_BT
        floor_M = torch.zeros_like(sums.count).index_add(
            0, batch.target_modality_BT.flatten(), known_BT.flatten().to(sums.count.dtype)
        )
        rows.append(floor_M)
    return torch.stack(rows).detach().float()


def modality_means(sums_RM: list[list[float]], names: tuple[str, ...], prefix: str = "") -> dict[str, float]:
    """Mean loss, log Z and excess by modality as tags; a modality without a target is an absent key.

    The excess is the loss less that of a model that knows the source, on the same tokens.
    """
    values: dict[str, float] = {}
    for name, count, ce, log_z, *floor in zip(names, *sums_RM, strict=True):
        if count:
            values |= {tag(prefix + "loss", name): ce / count, tag(prefix + "log_z", name): log_z / count}
            values |= {tag(prefix + "excess", name): (ce - f) / count for f in floor}
    return values


def clip_values(measured: list[float]) -> dict[str, float]:
    """`QKClip.measured` as tags; a layer without a visible pair is an absent key."""
    largest, gammas = measured[: len(measured) // 2], measured[len(measured) // 2 :]
    values: dict[str, float] = {}
    for layer, (logit, gamma) in enumerate(zip(largest, gammas, strict=True)):
        if logit != -math.inf:
            values |= {tag("qk_clip_logit", layer=layer): logit, tag("qk_clip_gamma", layer=layer): gamma}
    return values


class TrainingModule(L.LightningModule):
    """Trains an EarlyFusionTransformer; everything it measures is a function of the global batch.

    After each optimizer step ``step_record`` holds the loss, the losses and log Z by modality and the gradient
    norm as one device tensor, read and cleared by a callback without a host synchronisation here.

    After every update come the interventions on the weights, QK-Clip and the power step of σReparam: a hook of the
    optimizer, so that nothing steps without them.
    """

    def __init__(self, model: ModelConfig, loss: LossConfig, optim: OptimConfig, seed: int, backend: str):
        super().__init__()
        self.model_config, self.loss_config, self.optim_config, self.seed = model, loss, optim, seed
        self.model = EarlyFusionTransformer(model, backend=backend, seed=seed)
        self.loss_weights_M: Tensor
        weights = torch.tensor(loss.weights_of(model.modalities))
        self.register_buffer("loss_weights_M", weights, persistent=False)
        self.step_record: StepRecord | None = None
        self._sums_RM: Tensor | None = None
        self._loss: Tensor | None = None
        self._parts_M: Tensor | None = None
        self._clip = None if optim.qk_clip is None else QKClip(self.model, optim.qk_clip)

    @property
    def trained_modalities(self) -> tuple[str, ...]:
        """Those whose loss is not switched off."""
        return tuple(n for n in self.model_config.modalities if self.loss_config.weights.get(n, 1.0) > 0)

    # One step ------------------------------------------------------------------------------------------

    def training_step(self, batch: TokenBatch, index: int) -> Tensor:
        if self.model_config.residual_dropout or self.model_config.attn_dropout:
            self._seed_dropout(index)
        sums = self._losses(batch, None if self._clip is None else self._clip.sink(batch))
        weighing = (self.loss_weights_M, self.loss_config.z_loss, batch.step_targets)
        loss = total_loss(sums, *weighing)
        if self.optim_config.split_second_moment:
            self._parts_M = loss_parts(sums, *weighing)
        self._sums_RM = _add(self._sums_RM, modality_sums(sums, batch))
        self._loss = _add(self._loss, loss.detach())
        # Lightning divides by the micro-batches and averages over ranks; the denominator has both already.
        return loss * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._parts_M is None:
            super().backward(loss, *args, **kwargs)
            return
        optimizer = self.trainer.optimizers[0]
        assert isinstance(optimizer, SplitAdamW)
        names, trained = self.model_config.modalities, self.trained_modalities
        optimizer.backward([self._parts_M[m] for m, name in enumerate(names) if name in trained])
        self._parts_M = None

    def _losses(self, batch: TokenBatch, sink: Sink | None = None) -> LossSums:
        logits_BTV = self.model(batch.ids_BT, batch.modality_BT, batch.document_BT, sink)
        return modality_losses(
            logits_BTV,
            batch.targets_BT,
            batch.target_modality_BT,
            batch.target_mask_BT,
            len(self.model_config.modalities),
        )

    def _seed_dropout(self, index: int) -> None:
        """Dropout is a function of (seed, micro-batch, rank), so a resumed run draws what it would have drawn."""
        key = f"{self.seed}/{index}/{self.global_rank}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1)

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Once an optimizer step, before the update: clips by global norm and closes the step's record."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if gradient_clip_val:
            torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, grad_norm)
            if isinstance(optimizer, SplitAdamW):
                optimizer.clip(gradient_clip_val, grad_norm)
        assert self._sums_RM is not None and self._loss is not None
        values = torch.cat([self._loss.float().view(1), self._sums_RM.flatten()])
        self._sums_RM = self._loss = None
        if self.trainer.world_size > 1:
            values = self.trainer.strategy.reduce(values, reduce_op="sum")
        measured = [] if self._clip is None else [self._clip.measured().float()]
        values = torch.cat([values[:1], grad_norm.float().view(1), values[1:], *measured])
        lr = optimizer.param_groups[0]["lr"]
        self.step_record = StepRecord(self.trainer.global_step + 1, lr, values)

    def named_values(self, values: list[float]) -> dict[str, float]:
        """The numbers of a `StepRecord` by tag."""
        loss, grad_norm, *sums = values
        names, end = self.model_config.modalities, len(sums)
        if self._clip is not None:
            end -= 2 * self.model_config.n_layers
        rows = [sums[i : i + len(names)] for i in range(0, end, len(names))]
        by_modality = modality_means(rows, names)
        return {"loss": loss, "grad_norm": grad_norm, **by_modality, **clip_values(sums[end:])}

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
        optimizer = make_optimizer(self.optim_config, self.model)
        optimizer.register_step_post_hook(self._after_update)
        max_steps = self.trainer.max_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: lr_multiplier(self.optim_config, step, max_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _after_update(self, *_: Any) -> None:
        if self._clip is not None:
            self._clip.clip()
        if self.model_config.weight_reparam == "sigma":
            power_step(self.model)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The configuration travels with the weights; `mmqk.training.checkpoint` compares it on loading."""
        checkpoint["mmqk_model"] = asdict(self.model_config)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part
