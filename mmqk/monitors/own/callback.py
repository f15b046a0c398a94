"""RunMonitor, the Lightning callback that measures a run of mmqk. It does not change training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from mmqk.config.training import MonitorConfig
from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer
from mmqk.monitors.formulas.pairs import Pairs
from mmqk.monitors.own.gradients import gradient_agreement, sharpness
from mmqk.monitors.own.probe import pairs_by_reach, probe, residual_absorption
from mmqk.monitors.own.updates import UpdateMonitor, probe_is_due

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
            self._probe(trainer, pl_module, None)

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
        if probe_is_due(self.config, step, trainer.max_steps) and step != self._probed:
            self._probe(trainer, pl_module, batch)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the open window. With a held-out batch, also probe the last step of a run that ends early."""
        if self._update_monitor is not None:
            _log(trainer, self._update_monitor.close())
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
