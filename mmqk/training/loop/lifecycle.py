"""Writes the status of a run to status.json, shows its progress, and ends the run on Ctrl-C, SIGTERM and SIGUSR1."""

from __future__ import annotations

import contextlib

import lightning as L
import torch

from mmqk.distributed import largest
from mmqk.progress import Progress
from mmqk.store import RunFolder, disk_sentence
from mmqk.training.loop.signals import ENDING, Interrupted
from mmqk.training.loop.step_log import Checkpoints, StepLog, ends_step
from mmqk.training.step.module import TrainingModule


class Lifecycle(L.Callback):
    """Writes status.json; at the first signal it writes a checkpoint and ends the run.

    `Ending` receives the signals. A second signal ends the run at once, without a checkpoint.

    If a program calls ``main``, mmqk handles no signals: Ctrl-C raises Python's KeyboardInterrupt, and the run ends
    without a checkpoint.

    All ranks end after the same step, even if only one received the signal. Ranks exchange signals only at a flush,
    because a flush synchronizes with the device anyway.

    Place this callback after `Checkpoints`.

    Args:
        folder: The run folder; None in the processes that do not write to it.
        step_log: Decides when to flush.
        checkpoints: Writes the checkpoints.
    """

    def __init__(self, folder: RunFolder | None, step_log: StepLog, checkpoints: Checkpoints):
        self.folder, self.step_log, self.checkpoints = folder, step_log, checkpoints

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.folder is not None:
            self.folder.set_status("running", trainer.global_step)
        ENDING.read = True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        assert isinstance(pl_module, TrainingModule)
        last = trainer.global_step >= trainer.max_steps
        if last or not ends_step(trainer, batch_idx):
            return
        signum = ENDING.signum
        if trainer.world_size > 1:
            if not self.step_log.flushes(trainer.global_step, trainer.max_steps):
                return
            signum = int(largest(torch.tensor(signum or 0, device=pl_module.device))) or None
        if signum is not None:
            self.checkpoints.save(trainer, pl_module)
            if self.step_log.divergence is None:
                raise Interrupted(signum)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.folder is None:
            return
        for logger in trainer.loggers:
            logger.save()  # before status.json marks the run as finished
        if self.step_log.divergence is not None:
            step, reason = self.step_log.divergence
            self.folder.set_status("diverged", step, reason)
        elif trainer.global_step >= trainer.max_steps:
            self.folder.set_status("completed", trainer.global_step)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self.folder is None:
            return
        stopped = isinstance(exception, (Interrupted, KeyboardInterrupt))
        reason = " ".join(str(exception).split())[:300] or type(exception).__name__
        if isinstance(exception, OSError):
            reason = disk_sentence(exception)
        elif not stopped:
            reason = f"{type(exception).__name__}: {reason}"
        with contextlib.suppress(OSError):  # the disk error may persist
            step = self.checkpoints.saved if isinstance(exception, Interrupted) else trainer.global_step
            self.folder.set_status("interrupted" if stopped else "failed", step, reason)


class ProgressLine(L.Callback):
    """Shows the step, the losses and the time left on stderr."""

    def __init__(self, step_log: StepLog):
        self.step_log = step_log
        self._progress = Progress()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        step, last = trainer.global_step, trainer.global_step == trainer.max_steps
        self._progress.begin(step)  # after the first batch, which may compile
        if not trainer.is_global_zero or not (last or self._progress.due()):
            return
        losses = " · ".join(f"{k} {v:.3f}" for k, v in self.step_log.latest.items() if k.startswith("loss"))
        line = f"step {step}/{trainer.max_steps} · {losses or 'starting'}"
        if last:
            self._progress.close(line)
        else:
            self._progress.show(line, step, trainer.max_steps)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._progress.close()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._progress.close()
