"""Callbacks that log every step, check it for divergence, validate, write checkpoints and status, and end the run."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch

from mmqk.checkpoint import check_restored
from mmqk.config.training import CheckpointConfig
from mmqk.data.batch import TokenBatch
from mmqk.distributed import first_of_ranks, largest
from mmqk.monitors.own.bad_site import first_bad_state
from mmqk.progress import Progress
from mmqk.signals import ENDING, Interrupted
from mmqk.store import DivergenceRule, RunFolder, UserError, disk_sentence
from mmqk.store.checkpoints import checkpoint_name, checkpoints_in, step_of
from mmqk.training.module import StepRecord, TrainingModule

FLUSH_EVERY = 10  # steps


class StepLog(L.Callback):
    """Logs, for every step, the total loss, the loss and log Z by modality, the gradient norm and the learning rate.

    Records stay on the device until a flush transfers all of them at once. The flush checks each step for non-finite
    numbers and divergence (`DivergenceRule`), and stops a diverged run.

    Args:
        flush_at: Numbers of steps. The log is flushed at every multiple of each number; 0 is ignored.
        at_start: Values that are known before the first step, logged at `first_step`.
        first_step: First step of the run: 0, or for a fork the step of the checkpoint that it starts from.
        stop_diverged: Whether a divergence stops the run; otherwise only a value that is not finite does.

    Attributes:
        divergence: (step, reason) if a divergence has stopped the run, otherwise None.
        latest: Values of the latest flushed step, for the progress line.
    """

    def __init__(
        self,
        flush_at: Iterable[int] = (FLUSH_EVERY,),
        at_start: Mapping[str, float] | None = None,
        first_step: int = 0,
        stop_diverged: bool = True,
    ):
        self.flush_at, self.first_step = [n for n in flush_at if n], first_step
        self.stop_diverged = stop_diverged
        self.at_start = dict(at_start or {})
        self.divergence: tuple[int, str] | None = None
        self.latest: dict[str, float] = {}
        self._records: list[StepRecord] = []
        self._batches: list[tuple[int, TokenBatch]] = []  # numbered micro-batches since the last flush
        self._tokens = 0
        self._since = time.monotonic()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, TrainingModule):
            raise UserError(
                f"StepLog logs the measurements of mmqk's TrainingModule, and this is a {type(pl_module).__name__}:"
                " leave StepLog out of the Trainer's callbacks."
            )
        self.rule = DivergenceRule(pl_module.optim_config.warmup_steps)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.monotonic()
        if self.at_start and trainer.global_step == self.first_step:
            for logger in trainer.loggers:
                logger.log_metrics(self.at_start, self.first_step)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch: TokenBatch, batch_idx: int) -> None:
        self._tokens += batch.ids_BT.numel() * trainer.world_size
        self._batches.append((batch_idx, batch))
        assert isinstance(pl_module, TrainingModule)
        record = pl_module.step_record
        if record is None:
            return  # more micro-batches of this optimizer step follow
        pl_module.step_record = None
        self._records.append(record)
        if self.flushes(record.step, trainer.max_steps):
            self.flush(trainer, pl_module)

    def flushes(self, step: int, max_steps: int) -> bool:
        """Return whether to flush at ``step``."""
        return step == max_steps or any(step % n == 0 for n in self.flush_at)

    def flush(self, trainer: L.Trainer, pl_module: TrainingModule, alone: bool = False) -> None:
        """Log the collected records; stop the trainer if the run has diverged.

        If ``alone`` is true, no collective call is made, because the other ranks might not call this method.
        """
        if not self._records:
            return
        rows = torch.stack([record.values for record in self._records]).tolist()
        for record, row in zip(self._records, rows, strict=True):
            self.latest = {**pl_module.named_values(row), "lr": record.lr}
            if record is self._records[-1]:
                now = time.monotonic()
                self.latest["tokens_per_s"] = self._tokens / max(now - self._since, 1e-9)
                self._tokens, self._since = 0, now
            for logger in trainer.loggers:
                logger.log_metrics(self.latest, record.step)
            reason = self._diverged(record.step, pl_module, alone)
            if reason is not None and self.divergence is None:
                self.divergence = (record.step, reason)
                trainer.should_stop = True
            if not math.isfinite(self.latest["grad_norm"]):
                break  # the weights no longer change after this step
        self._records.clear()
        self._batches.clear()

    def _diverged(self, step: int, pl_module: TrainingModule, alone: bool) -> str | None:
        if not math.isfinite(self.latest["grad_norm"]):
            # The search for the first non-finite tensor needs every rank, because the tensor may come from another
            # rank's batch and the model may be sharded.
            together = not alone or pl_module.trainer.world_size == 1
            site = first_of_ranks(self._where(step, pl_module)) if together else None
            return f"the gradient norm became {self.latest['grad_norm']}{f': {site}' if site else ''}"
        losses = {m: self.latest[f"loss/{m}"] for m in pl_module.trained_modalities if f"loss/{m}" in self.latest}
        if not self.stop_diverged:
            losses = {m: loss for m, loss in losses.items() if not math.isfinite(loss)}
        return self.rule.update(step, losses)

    def _where(self, step: int, pl_module: TrainingModule) -> str | None:
        """Return the first non-finite tensor of a step as text, or None if the forward pass cannot run again."""
        accumulate = pl_module.trainer.accumulate_grad_batches
        with contextlib.suppress(RuntimeError):  # memory may run out, and the status must still be written
            return pl_module.bad_site([(i, b) for i, b in self._batches if i // accumulate == step - 1])
        return None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        assert isinstance(pl_module, TrainingModule)
        # The same error may occur again (a full disk, a lost device), and the status must still be written.
        with contextlib.suppress(OSError, RuntimeError):
            self.flush(trainer, pl_module, alone=True)

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rule.load_state_dict(state_dict)


def ends_step(trainer: L.Trainer, batch_idx: int) -> bool:
    """Return whether this micro-batch is the last of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


class Validation(L.Callback):
    """Logs the held-out losses every N optimizer steps and at the end of a run.

    Lightning's own loop would skip a validation that is due at the step of a resume.

    Args:
        batches: Returns an iterator over the fixed validation batches.
        every_n_steps: N; 0 to validate only at the end.
    """

    def __init__(self, batches: Callable[[], Iterator[TokenBatch]], every_n_steps: int):
        self.batches, self.every_n_steps = batches, every_n_steps
        self._validated = -1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        step, every = trainer.global_step, self.every_n_steps
        due = step == trainer.max_steps or (every and step % every == 0)
        if due and step != self._validated and ends_step(trainer, batch_idx):
            self._validate(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate a diverged run at its last step."""
        if trainer.global_step != self._validated:
            self._validate(trainer, pl_module)

    def _validate(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._validated = trainer.global_step
        values = pl_module.validation_losses(self.batches())
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)


class Checkpoints(L.Callback):
    """Writes each checkpoint (``step00000500.ckpt``) completely or not at all, and only after a flush without
    divergence.

    It removes an older checkpoint only after the new checkpoint is complete, so that a run can always resume.

    Attributes:
        saved: Step of the newest checkpoint that this process wrote; before that, the step at which it started.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, step_log: StepLog):
        self.folder, self.config, self.step_log = folder, config, step_log
        self.saved = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.saved = trainer.global_step
        if trainer.ckpt_path is not None:
            check_restored(Path(trainer.ckpt_path), trainer.global_step, trainer.optimizers)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        step, every = trainer.global_step, self.config.every_n_steps
        due = step == trainer.max_steps or step in self.config.at or (every and not step % every)
        if due and step != self.saved and ends_step(trainer, batch_idx):
            self.save(trainer, pl_module)

    def save(self, trainer: L.Trainer, pl_module: TrainingModule) -> None:
        """Write a checkpoint, unless the run has diverged or a weight or a moment is not finite."""
        self.step_log.flush(trainer, pl_module)
        if self.step_log.divergence is None:
            reason = first_of_ranks(first_bad_state(pl_module.model, trainer.optimizers))
            if reason is not None:
                self.step_log.divergence = (trainer.global_step, reason)
                trainer.should_stop = True
        if self.step_log.divergence is not None:
            return
        for logger in trainer.loggers:
            logger.save()
        path = self.folder / checkpoint_name(trainer.global_step)
        trainer.save_checkpoint(path)
        self.saved = trainer.global_step
        if trainer.is_global_zero:  # `write_checkpoint` has read the new checkpoint back from the disk
            older = [old for old in checkpoints_in(self.folder) if step_of(old) < trainer.global_step]
            for old in older[: max(0, len(older) + 1 - self.config.keep)]:
                if step_of(old) not in self.config.at:
                    old.unlink()


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

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
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

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._progress.close()
