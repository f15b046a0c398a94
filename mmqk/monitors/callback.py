"""NormMonitor: the probe as a Lightning callback."""

from __future__ import annotations

import lightning as L
import torch

from mmqk.data.batch import TokenBatch
from mmqk.monitors.config import MonitorConfig
from mmqk.monitors.probe import probe


class NormMonitor(L.Callback):
    """Probes the model every N optimizer steps, at the start and at the end, and logs to every logger.

    Args:
        config: when and on which tokens.
        heldout: the fixed batch, where ``config.batch`` is heldout.
    """

    def __init__(self, config: MonitorConfig, heldout: TokenBatch | None = None):
        if config.batch == "heldout" and heldout is None:
            raise ValueError("monitor.batch heldout needs the batch to probe.")
        self.config, self.heldout = config, heldout
        self._probed = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._probed = trainer.global_step if trainer.global_step else -1
        if self.config.batch == "heldout" and self._probed < 0:
            self._probe(trainer, pl_module, None)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch: TokenBatch, batch_idx: int) -> None:
        step, every = trainer.global_step, self.config.every_n_steps
        due = every and (step % every == 0 or step == trainer.max_steps)
        # Between two micro-batches of a step there is nothing new to see.
        if due and step != self._probed and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._probe(trainer, pl_module, batch)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A run that ends early is probed where it ended."""
        if self.config.batch == "heldout" and trainer.global_step != self._probed:
            self._probe(trainer, pl_module, None)

    def _probe(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: TokenBatch | None) -> None:
        self._probed = trainer.global_step
        if not self.config.every_n_steps or not trainer.is_global_zero:
            return
        if self.config.batch == "heldout":
            assert self.heldout is not None
            batch = self.heldout.to(pl_module.device)
        assert batch is not None
        model = pl_module.model
        assert isinstance(model, torch.nn.Module)
        values = probe(model, batch.first(self.config.sequences)).flat()  # type: ignore[arg-type]
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)
