"""RunMonitor, the Lightning callback that measures a run of mmqk, and StepMonitor, its part inside a step.

`StepMonitor` measures optimizer steps: the radial budget, sizes of gradients and updates, and gradients relative to
Adam's v. The training module calls it during a step. Neither changes training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from mmqk.config.training import MonitorConfig
from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer
from mmqk.monitors.formulas.reduce import Pairs
from mmqk.monitors.formulas.weights import below_epsilon, gradient_over_second_moment, product_update_rank, update_size
from mmqk.monitors.own.gradients import BudgetWindow, gradient_agreement, sharpness, watched_matrices
from mmqk.monitors.probe import block_matrices, pairs_by_reach, probe, residual_absorption
from mmqk.store.metrics import tag


def probe_is_due(config: MonitorConfig, step: int, max_steps: int) -> bool:
    """Return whether the run is probed after this step."""
    every = config.every_n_steps
    return every > 0 and (step % every == 0 or step == max_steps or step in config.at)


class StepMonitor:
    """Measures the steps that the configuration selects; `after_step`, `close` and `sizes` return the numbers.

    Args:
        model: the trained model.
        config: the configuration of the monitors.
        max_steps: number of steps of the run; the last step is measured too.
        trained: indices of the modalities whose loss is trained; if empty, the budget has no parts by modality.
        low_precision: whether the weights are in bf16, so that small updates leave them unchanged. Their share is
            then measured even if ``config.parameters`` is false.
    """

    def __init__(
        self,
        model: EarlyFusionTransformer,
        config: MonitorConfig,
        max_steps: int,
        trained: list[int],
        low_precision: bool = False,
    ) -> None:
        self.model, self.config, self.max_steps, self.trained = model, config, max_steps, trained
        self.low_precision = low_precision
        self.window: BudgetWindow | None = None
        self.named: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.matrices: dict[Tensor, str] = {
            weight: tag(f"{name}_grad_over_v", *modality, layer=layer)
            for name, modality, layer, weight in block_matrices(model)
        }
        self.matrices[model.head.weight] = "head_grad_over_v"
        self.matrices[model.embed.weight] = "embed_grad_over_v"  # replaces the name of a tied head
        self._in_window = False  # whether this step is part of the window
        self._probe_due = False
        self._before: dict[Tensor, tuple[Tensor, float]] = {}
        self._sizes: dict[str, Tensor] = {}

    # During a step

    def before_step(self, step: int) -> None:
        """Start to measure step number ``step``, counted from 1. Call this before each micro-batch of the step."""
        c = self.config
        if c.budget_every_n_steps and self.window is None and (step - 1) % c.budget_every_n_steps == 0:
            self.window = BudgetWindow(self.model, self.trained)
        self._in_window = self.window is not None
        self._probe_due = probe_is_due(c, step, self.max_steps)

    @property
    def attributing(self) -> bool:
        """Whether this step needs `before_backward`."""
        return self._in_window and bool(self.trained)

    def before_backward(self, parts_M: Tensor) -> None:
        """Compute the gradients by modality, without freeing the graph. Call this before the backward pass.

        ``parts_M`` is the part of each modality in the micro-batch's loss.
        """
        if self.window is not None:
            self.window.add_gradients(parts_M)

    def before_update(self, optimizer: Optimizer, factor: Tensor | None, grad_norms: Mapping[str, Tensor]) -> None:
        """Store the weights before the update. Call this after gradients are clipped by ``factor``.

        ``grad_norms`` are the norms before clipping, by parameter.
        """
        if self.window is not None:
            self.window.before_update(optimizer, factor)
        if self._probe_due and (self.config.parameters or self.low_precision):
            rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
            self._before = {p: (p.detach().clone(), lr) for p, lr in rates.items() if p in self.named}
        if self._probe_due and self.config.parameters:
            self._sizes = {tag("grad_norm", name): norm for name, norm in grad_norms.items()}

    def after_update(self, optimizer: Optimizer) -> None:
        """Measure the optimizer's update. Call this right after the update, before QK-Clip and the power step."""
        if self.window is not None:
            self.window.after_update(optimizer)
        if self._probe_due:
            groups = {p: group for group in optimizer.param_groups for p in group["params"]}
            self._measure_updates(optimizer, groups)
            if self.config.second_moment:
                self._measure_gradients(optimizer, groups)

    @torch.no_grad()
    def _measure_gradients(self, optimizer: Optimizer, groups: Mapping[Tensor, dict[str, Any]]) -> None:
        for p, name in self.matrices.items():
            state = optimizer.state.get(p)
            if state and p.grad is not None:
                group, step = groups[p], torch.as_tensor(state["step"], dtype=torch.float32)
                self._sizes[name] = gradient_over_second_moment(
                    p.grad, state["exp_avg_sq"], step, group["betas"][1], group["eps"]
                )

    @torch.no_grad()
    def _measure_updates(self, optimizer: Optimizer, groups: Mapping[Tensor, dict[str, Any]]) -> None:
        if self._before:
            unchanged = torch.stack([(before == p).sum() for p, (before, _) in self._before.items()]).sum()
            self._sizes["update_unchanged"] = unchanged / sum(p.numel() for p in self._before)
        for p, (before, lr) in self._before.items() if self.config.parameters else ():
            state, group, name = optimizer.state.get(p), groups[p], self.named[p]
            if not state:
                continue  # no loss has depended on this parameter yet
            over_lr, relative = update_size(before, p.detach(), lr)
            step = torch.as_tensor(state["step"], dtype=torch.float32)
            share = below_epsilon(state["exp_avg_sq"], step, group["betas"][1], group["eps"])
            self._sizes |= {
                tag("update_rms", name): over_lr,
                tag("update_ratio", name): relative,
                tag("adam_below_eps", name): share,
            }
        layers = watched_matrices(self.model) if self._before and self.config.parameters else {}
        for layer, (q, *others) in ((layer, weights) for (name, layer), weights in layers.items() if name == "w_q"):
            k = layers["w_k", layer][0]
            if not others and q in self._before and k in self._before:  # not a copy for each modality
                head_dim = self.model.config.head_dim
                ranks_H = product_update_rank(self._before[q][0], q, self._before[k][0], k, head_dim)
                self._sizes[tag("qk_update_rank", layer=layer)] = ranks_H.amin()
        self._before = {}

    # After a step

    def after_step(self) -> dict[str, float]:
        """Return the numbers by tag of the window that ends with this step; empty if none ends."""
        if self.window is None or not self._in_window:
            return {}
        self.window.settle()
        self._in_window = False
        return self.close() if self.window.steps == self.config.budget_steps else {}

    def close(self) -> dict[str, float]:
        """End the open window and return its numbers; ``budget_window`` is its number of steps."""
        window, self.window = self.window, None
        return window.values() if window is not None and window.steps else {}

    def sizes(self) -> dict[str, float]:
        """Return and clear the sizes of gradients and updates of the last measured step.

        A parameter that was all zeros before the step, such as a gain stored as an offset, has no `update_ratio`.
        """
        measured, self._sizes = self._sizes, {}
        if not measured:
            return {}
        device = next(iter(measured.values())).device
        numbers = torch.stack([value.float().to(device) for value in measured.values()]).tolist()
        sizes = dict(zip(measured, numbers, strict=True))
        for name in self.named.values():
            ratio, size = tag("update_ratio", name), tag("update_rms", name)
            if ratio in sizes and math.isfinite(sizes[size]) and not math.isfinite(sizes[ratio]):
                del sizes[ratio]
        return sizes

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the open window; empty if no window is open."""
        return {} if self.window is None or not self.window.steps else {"window": self.window.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the window of a `state_dict`."""
        if "window" in state:
            self.window = BudgetWindow(self.model, self.trained)
            self.window.load_state_dict(state["window"])


# Largest number of pairs of tokens to store between probes of the held-out batch; a pair takes about 12 bytes.
STORED_PAIRS = 2**20


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
        if config.probe_split == "heldout" and heldout is None:
            raise ValueError("monitor.probe_split is heldout, but RunMonitor got no held-out batch: pass heldout.")
        self.config, self.heldout, self.step_rows = config, heldout, step_rows
        self._pairs: dict[tuple[int, bool], Pairs] | None = None  # of the held-out batch
        self._probed = -1
        self._step_monitor: StepMonitor | None = None
        self._saved: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        c = self.config
        module: Any = pl_module  # a TrainingModule, which this package may not import
        # A sharded model has no whole weights to compare.
        low_precision = module.model.embed.weight.dtype == torch.bfloat16 and module.device_mesh is None
        if c.parameters or c.second_moment or c.budget_every_n_steps or low_precision:
            # Muon's update is not linear in the gradient, so it has no parts by modality.
            trained = [] if module.optim_config.matrices == "muon" else module.trained_places
            self._step_monitor = StepMonitor(module.model, c, trainer.max_steps, trained, low_precision)
            self._step_monitor.load_state_dict(self._saved)
            module.step_watch = self._step_monitor
        self._probed = trainer.global_step if trainer.global_step else -1
        if c.probe_split == "heldout" and self._probed < 0:
            self._probe(trainer, pl_module, None)

    def on_train_batch_start(self, trainer, pl_module, batch: TokenBatch, batch_idx: int) -> None:
        if self._step_monitor is not None:
            self._step_monitor.before_step(trainer.global_step + 1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch: TokenBatch, batch_idx: int) -> None:
        # Weights change only after the last micro-batch of a step.
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if self._step_monitor is not None:
            _log(trainer, self._step_monitor.after_step())
            # Close the window before the last checkpoint: a run that resumes from this checkpoint takes no step, so
            # it could not close the window.
            if trainer.global_step == trainer.max_steps:
                _log(trainer, self._step_monitor.close())
        step = trainer.global_step
        if probe_is_due(self.config, step, trainer.max_steps) and step != self._probed:
            self._probe(trainer, pl_module, batch)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the open window. With a held-out batch, also probe the last step of a run that ends early."""
        if self._step_monitor is not None:
            _log(trainer, self._step_monitor.close())
        if self.config.probe_split == "heldout" and trainer.global_step != self._probed:
            self._probe(trainer, pl_module, None)

    def probe_now(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: TokenBatch) -> None:
        """Probe after this step, even if no probe is due or probes are off. There is at most one probe per step."""
        if trainer.global_step != self._probed:
            self._probe(trainer, pl_module, batch, forced=True)

    def _probe(
        self, trainer: L.Trainer, pl_module: L.LightningModule, current: TokenBatch | None, forced: bool = False
    ) -> None:
        """Probe and log; ``current`` is the batch of the step, None before the first step and after the last."""
        c = self.config
        module: Any = pl_module  # a TrainingModule
        self._probed = trainer.global_step
        if not (c.every_n_steps or forced):
            return
        model = module.whole_model()
        assert isinstance(model, EarlyFusionTransformer)
        values: dict[str, float] = {}
        if trainer.is_global_zero:
            batch = self._probed_batch(trainer, module, current)
            probes = [probe(model, batch, c.heads, pairs=self._pairs, matrices=c.matrices)]
            if c.precision:
                with trainer.precision_plugin.val_step_context():
                    probes.append(residual_absorption(model, batch))
            values = {name: value for one in probes for name, value in one.flat().items()}
        if c.gradient_agreement and current is not None:
            values |= gradient_agreement(model, current, lambda half: module.modality_loss_parts(half, model))
        if c.sharpness and current is not None and trainer.is_global_zero:
            values |= sharpness(model, trainer.optimizers[0], lambda: module.modality_loss_parts(current, model).sum())
        if self._step_monitor is not None:
            values |= self._step_monitor.sizes()
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
        return {} if self._step_monitor is None else self._step_monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict


def _log(trainer: L.Trainer, values: dict[str, float]) -> None:
    if values and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)
