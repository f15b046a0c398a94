"""RunMonitor, the Lightning callback that measures a run of mmqk. It does not change training.

In backward passes of their own, `gradient_agreement` measures how the modalities agree over the two halves of a batch,
and `sharpness` the curvature of the loss along Adam's step.

Shapes: M modalities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from mmqk.config.training import MonitorConfig
from mmqk.data.batch import TokenBatch
from mmqk.distributed import rank, summed
from mmqk.model import EarlyFusionTransformer
from mmqk.model.transformer import evaluation_mode
from mmqk.monitors.formulas.reduce import Pairs, selection
from mmqk.monitors.formulas.weights import Gradients, HalfProducts, half_products
from mmqk.monitors.own.probe import pairs_by_reach, probe, residual_absorption
from mmqk.monitors.own.updates import UpdateMonitor, probe_is_due
from mmqk.store.metrics import tag

# Largest number of pairs of tokens to store between probes of the held-out batch; a pair takes about 12 bytes.
STORED_PAIRS = 2**20
MOVED = 1e-4  # of the norm of the weights, for the differences of `sharpness`


class RunMonitor(L.Callback):
    """Probes the model every N optimizer steps and at the last step, and logs to every logger.

    A probe runs on sequences of the step's batch or, with ``config.probe_split`` heldout, on the same held-out
    sequences every time; there is then also a probe before the first step and one when a run ends early.

    The number of ranks does not change the sequences of a probe: the first rank probes and logs while the others
    wait.

    Put this callback before the one that writes checkpoints. A checkpoint then contains the open window of the radial
    budget, which continues after a resume.

    Args:
        config: when to probe, on which sequences, and what to measure.
        heldout: the held-out batch; needed if ``config.probe_split`` is heldout.
        step_rows: with several ranks, a function of (i, n) that returns the first n sequences of micro-batch i over
            all ranks.
    """

    def __init__(
        self,
        config: MonitorConfig,
        heldout: TokenBatch | None = None,
        step_rows: Callable[[int, int], TokenBatch] | None = None,
    ):
        self.config, self.heldout, self.step_rows = config, heldout, step_rows
        self._pairs: dict[tuple[int, bool], Pairs] | None = None  # of the held-out batch
        self._probed = -1
        self._update_monitor: UpdateMonitor | None = None
        self._saved: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        c = self.config
        module: Any = pl_module  # a TrainingModule, which this package may not import
        # A sharded model has no whole weights to compare.
        low_precision = module.model.embed.weight.dtype == torch.bfloat16 and module.device_mesh is None
        if c.parameters or c.second_moment or c.budget_every_n_steps or low_precision:
            # Muon's update is not linear in the gradient, so it has no parts by modality.
            trained = [] if module.optim_config.matrices == "muon" else module.trained_places
            self._update_monitor = UpdateMonitor(module.model, c, trainer.max_steps, trained, low_precision)
            self._update_monitor.load_state_dict(self._saved)
            module.update_monitor = self._update_monitor
        self._probed = trainer.global_step if trainer.global_step else -1
        if c.probe_split == "heldout" and self._probed < 0:
            self.probe_now(trainer, pl_module, None, forced=False)

    def on_train_batch_start(self, trainer, pl_module, batch: TokenBatch, batch_idx: int) -> None:
        if self._update_monitor is not None:
            self._update_monitor.before_step(trainer.global_step + 1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch: TokenBatch, batch_idx: int) -> None:
        # Weights change only after the last micro-batch of a step.
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if self._update_monitor is not None:
            _log(trainer, self._update_monitor.after_step())
            # Close the window before the last checkpoint: a run that resumes from this checkpoint takes no step, so
            # it could not close the window.
            if trainer.global_step == trainer.max_steps:
                _log(trainer, self._update_monitor.close())
        step = trainer.global_step
        if probe_is_due(self.config, step, trainer.max_steps):
            self.probe_now(trainer, pl_module, batch, forced=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the open window. With a held-out batch, also probe the last step of a run that ends early."""
        if self._update_monitor is not None:
            _log(trainer, self._update_monitor.close())
        if self.config.probe_split == "heldout":
            self.probe_now(trainer, pl_module, None, forced=False)

    def probe_now(
        self, trainer: L.Trainer, pl_module: L.LightningModule, current: TokenBatch | None, forced: bool = True
    ) -> None:
        """Probe and log, at most once per step; ``forced`` also if probes are off.

        ``current`` is the batch of the step, None before the first step and after the last.
        """
        c = self.config
        module: Any = pl_module  # a TrainingModule
        if trainer.global_step == self._probed or not (c.every_n_steps or forced):
            return
        self._probed = trainer.global_step
        model = module.whole_model()
        assert isinstance(model, EarlyFusionTransformer)
        values: dict[str, float] = {}
        if trainer.is_global_zero:
            batch = self._probed_batch(trainer, module, current)
            values = probe(model, batch, c.heads, pairs=self._pairs, matrices=c.matrices).flat()
            if c.precision:
                with trainer.precision_plugin.val_step_context():
                    values |= residual_absorption(model, batch).flat()
        if c.gradient_agreement and current is not None:
            values |= gradient_agreement(model, current, lambda half: module.modality_loss_parts(half, model))
        if c.sharpness and current is not None and trainer.is_global_zero:
            values |= sharpness(model, trainer.optimizers[0], lambda: module.modality_loss_parts(current, model).sum())
        if self._update_monitor is not None:
            values |= self._update_monitor.sizes()
        _log(trainer, values)

    def _probed_batch(self, trainer: L.Trainer, module: Any, current: TokenBatch | None) -> TokenBatch:
        n = self.config.probe_sequences
        if self.config.probe_split == "heldout":
            assert self.heldout is not None
            heldout = self.heldout.to(module.device).first(n)
            if self._pairs is None and heldout.ids_BT.numel() * heldout.ids_BT.shape[1] <= STORED_PAIRS:
                self._pairs = pairs_by_reach(module.model.config, heldout)
            return heldout
        assert current is not None
        if n <= len(current.ids_BT) or self.step_rows is None:
            return current.first(n)  # the first rank has the first sequences
        latest = trainer.global_step * trainer.accumulate_grad_batches - 1
        return self.step_rows(latest, n).to(module.device)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._update_monitor is None else self._update_monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict


def _log(trainer: L.Trainer, values: dict[str, float]) -> None:
    if values and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)


def gradient_agreement(
    model: EarlyFusionTransformer, batch: TokenBatch, loss_parts: Callable[[TokenBatch], Tensor]
) -> dict[str, float]:
    """Return, by tag, the cosine, signal and noise of the modalities' gradients by layer and over all parameters.

    The halves are the even and the odd sequences, numbered over all ranks; every rank has a batch of equal size. The
    call runs in evaluation mode (so without dropout), does not write ``.grad``, and is collective with several ranks.
    It costs a forward pass for each half, and for each half and modality a backward pass and the memory of all
    gradients.

    A modality without a target in one of the halves is left out, and so is a cosine that is NaN
    (`HalfProducts.cosine`).

    Args:
        model: its parameters ``blocks.N...`` belong to layer N.
        batch: has at least 2 sequences.
        loss_parts: returns the part of a batch's loss from each modality's targets, (M,), divided by the batch's
            `step_targets`, computed with ``model`` as in training.
    """
    names = model.config.modalities
    before = rank() * len(batch.ids_BT)  # number of sequences on the ranks before this one
    halves = [batch._map(lambda t, i=i: t[(before + i) % 2 :: 2] if t.ndim else t) for i in (0, 1)]  # type: ignore[misc]
    counts_2M = [
        summed(selection(half.target_modality_BT, half.target_mask_BT, len(names)).sum((1, 2))) for half in halves
    ]
    present = (torch.stack(counts_2M) > 0).all(0).nonzero()[:, 0].tolist()
    if not present:
        return {}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights, gradients = [*parameters.values()], list[list[Gradients]]()  # gradients by half, then modality
    with evaluation_mode(model):
        for half, count_M in zip(halves, counts_2M, strict=True):
            parts_M, of_half = loss_parts(replace(half, step_targets=count_M.sum())), list[Gradients]()
            for m in present:
                keep = m != present[-1]
                grads = torch.autograd.grad(parts_M[m], weights, retain_graph=keep, materialize_grads=True)
                of_half.append([summed(g) for g in grads])
            gradients.append(of_half)
    groups: dict[int | None, list[int]] = {}
    for i, name in enumerate(parameters):
        groups.setdefault(int(name.split(".")[1]) if name.startswith("blocks.") else None, []).append(i)
    products = {
        layer: half_products(
            [tuple([half[m][i] for i in group] for half in gradients) for m in range(len(present))]  # type: ignore[misc]
        )
        for layer, group in groups.items()
    }
    return _by_tag(products, [names[m] for m in present])


@torch.no_grad()
def sharpness(model: EarlyFusionTransformer, optimizer: Optimizer, loss: Callable[[], Tensor]) -> dict[str, float]:
    """Return by tag the curvature of a loss along Adam's step, times the learning rate.

    It is ``g^T P H g / |g|^2`` with the gradient g, the Hessian H and ``P = lr / ((1 - beta1^t) (sqrt(v_hat) + eps))``.
    Without momentum a quadratic loss grows if it is above 2, and with momentum above ``2 (1 + beta1) / (1 - beta1)``
    (arXiv 2506.04805). ``H g`` is the difference of two gradients at weights moved by `MOVED` of their norm, so the
    call costs three forward and backward passes. It runs in evaluation mode and restores the weights. It returns
    nothing if a parameter has no second moment of Adam yet, or is not in fp32.

    Args:
        model: the model of the loss.
        optimizer: Adam or AdamW of its parameters, after at least one step.
        loss: computes the loss with the weights of the model.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    moved = [p for p in model.parameters() if p in groups]
    moments = [optimizer.state.get(p, {}).get("exp_avg_sq") for p in moved]
    if any(v is None or v.shape != p.shape or p.dtype.itemsize < 4 for p, v in zip(moved, moments, strict=True)):
        return {}

    def gradient() -> list[Tensor]:
        with torch.enable_grad():
            return list(torch.autograd.grad(loss(), moved, materialize_grads=True))

    kept = [p.detach().clone() for p in moved]
    with evaluation_mode(model):
        grads = gradient()
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        size = MOVED * torch.stack([p.square().sum() for p in kept]).sum().sqrt()
        ends = []
        for sign in (1, -1):
            for p, before, g in zip(moved, kept, grads, strict=True):
                p.copy_(before + sign * size / norm * g)
            ends.append(gradient())
        for p, before in zip(moved, kept, strict=True):
            p.copy_(before)
    total = norm.new_zeros(())
    for p, v, g, after, other in zip(moved, moments, grads, *ends, strict=True):
        (beta1, beta2), t = groups[p]["betas"], optimizer.state[p]["step"]
        root_v = (v / (1 - beta2**t)).sqrt() + groups[p]["eps"]
        total += (groups[p]["lr"] / (1 - beta1**t) * g / root_v * (after - other)).sum()
    return {"sharpness": float(total / (2 * size * norm))}


def _by_tag(products: dict[int | None, HalfProducts], names: list[str]) -> dict[str, float]:
    """Return the agreement of each layer and, without a layer in the tag, of all parameters."""
    total = sum(list(products.values())[1:], next(iter(products.values())))
    groups = {layer: product for layer, product in products.items() if layer is not None} | {None: total}
    by_tag: dict[str, Tensor] = {}
    for layer, product in groups.items():
        for statistic, values in (("grad_signal", product.signal), ("grad_noise", product.noise)):
            by_tag |= {tag(statistic, name, layer=layer): values[m] for m, name in enumerate(names)}
        cosine_MM = product.cosine
        for (m, name), (n, other) in combinations(enumerate(names), 2):
            by_tag[tag("grad_agreement", name, other, layer=layer)] = cosine_MM[m, n]
    numbers = dict(zip(by_tag, torch.stack([*by_tag.values()]).tolist(), strict=True))  # one transfer
    return {t: x for t, x in numbers.items() if not (t.startswith("grad_agreement") and math.isnan(x))}
