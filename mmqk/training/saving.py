"""Saving and resuming: the callbacks that write checkpoints and the status of a run, and the checkpoint of a resume."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from mmqk.checkpoint import CheckpointError, check_run, read_checkpoint, save_checkpoint
from mmqk.config.training import CheckpointConfig
from mmqk.distributed import first_of_ranks, largest
from mmqk.monitors.own.probe import first_bad_state
from mmqk.store import MetricsWriter, RunFolder, UserError, disk_sentence
from mmqk.store.checkpoint_files import PARTIAL_SUFFIX, checkpoint_name, checkpoints_in, set_aside, step_of, strays_in
from mmqk.training.device import advised

if TYPE_CHECKING:
    from mmqk.config import RunConfig
    from mmqk.training.callbacks import StepLog
    from mmqk.training.module import TrainingModule


class CheckpointFiles(TorchCheckpointIO):
    """Writes Lightning's checkpoint files with a digest."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save_checkpoint(checkpoint, Path(path))


def last_checkpoint(run: RunConfig, folder: RunFolder, first_step: int) -> Path | None:
    """Return the newest valid checkpoint, and remove later lines of metrics.jsonl, because their steps run again.

    Newer checkpoints that cannot be used are renamed, and a line on stderr reports each of them.

    Args:
        run: The resolved configuration.
        folder: The run folder.
        first_step: First step of the run: 0, or the step at which a fork starts.

    Returns:
        None if the run has no checkpoint.

    Raises:
        UserError: the run has checkpoints, but none can be used. The folder is then unchanged.
    """
    for stray in strays_in(folder.checkpoints):
        print(f"{stray} is ignored: it is not named like a checkpoint of mmqk.", file=sys.stderr)
    found, content = _newest_good(run, folder, first_step)
    step = step_of(found) if found is not None else 0
    for partial in folder.checkpoints.glob(f"*{PARTIAL_SUFFIX}"):
        partial.unlink()
    if folder.metrics_path.exists():
        writer = MetricsWriter(folder.metrics_path)
        # The resumed run logs the values of its first step again.
        writer.truncate_after(step if step > first_step else step - 1)
        writer.close()
    if folder.state == "resume":
        mixed = "; another version of the code computed part of it" if "+" in folder.record["code"] else ""
        print(f"resuming from step {step} in {folder.path}{mixed}", file=sys.stderr)
    if found is not None and (ranks := content.get("mmqk_ranks", run.ranks)) != run.ranks:
        print(
            f"step {step} was reached by {_described(ranks)} and the run continues with {_described(run.ranks)}:"
            " later numbers agree with those of an unchanged run up to rounding, and dropout masks differ.",
            file=sys.stderr,
        )
    return found


def _newest_good(run: RunConfig, folder: RunFolder, first_step: int) -> tuple[Path | None, dict[str, Any]]:
    bad: list[tuple[Path, CheckpointError]] = []
    for path in reversed(checkpoints_in(folder.checkpoints)):
        try:
            content = read_checkpoint(path)
            check_run(content, run.model, run.id)
        except CheckpointError as error:
            bad.append((path, error))
            continue
        for refused, why in bad:
            aside = set_aside(refused).name
            print(
                f"The checkpoint {refused} {why}: it is renamed to {aside}, and an older one is used.", file=sys.stderr
            )
        return path, content
    if bad:
        path, why = bad[0]
        raise UserError(
            f"The checkpoint {path} {why}, and no older one can be used: move it away to train from step {first_step}"
            " again."
        )
    return None, {}


def _described(ranks: dict[str, Any]) -> str:
    return "one process" if ranks["processes"] == 1 else f"{ranks['processes']} processes ({ranks['strategy']})"


def ends_step(trainer: L.Trainer, batch_idx: int) -> bool:
    """Return whether this micro-batch is the last of its optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


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


class Interrupted(BaseException):
    """Raised to end the run after a signal or an alarm, when a checkpoint of the step has been written."""

    def __init__(self, signum: int, why: str = ""):
        super().__init__(why or f"{signal.Signals(signum).name} received")
        self.signum = signum


class Lifecycle(L.Callback):
    """Writes status.json; after the first signal it writes a checkpoint and ends the run.

    All ranks end after the same step, even if only one received the signal. Ranks exchange signals only at a flush,
    because a flush synchronizes with the device anyway.

    Place this callback after `Checkpoints`.

    Args:
        folder: The run folder; None in the processes that do not write to it.
        step_log: Decides when to flush.
        checkpoints: Writes the checkpoints.
        signals: The list of `mmqk.train.noted_signals`.
    """

    def __init__(self, folder: RunFolder | None, step_log: StepLog, checkpoints: Checkpoints, signals: list[int]):
        self.folder, self.step_log, self.checkpoints, self.signals = folder, step_log, checkpoints, signals

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.folder is not None:
            self.folder.set_status("running", trainer.global_step)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        last = trainer.global_step >= trainer.max_steps
        if last or not ends_step(trainer, batch_idx):
            return
        signum = self.signals[0] if self.signals else None
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
        exception = advised(exception)
        reason = " ".join(str(exception).split())[:300] or type(exception).__name__
        if isinstance(exception, OSError):
            reason = disk_sentence(exception)
        elif not stopped:
            reason = f"{type(exception).__name__}: {reason}"
        with contextlib.suppress(OSError):  # the disk error may persist
            step = self.checkpoints.saved if stopped else trainer.global_step
            self.folder.set_status("interrupted" if stopped else "failed", step, reason)
