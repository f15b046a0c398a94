"""The per-step series: flushed in blocks, watched for divergence, and the checkpoints that wait for them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from mmqk.data.batch import TokenBatch
from mmqk.distributed import first_said
from mmqk.ranges import MOST_STEPS, check_numbers, number
from mmqk.store import DivergenceRule, UserError, read_status
from mmqk.store.checkpoints import checkpoint_name, checkpoints_in, step_of
from mmqk.store.missing import Written
from mmqk.training.loop.resume import check_restored
from mmqk.training.step.module import StepRecord, TrainingModule


class StepLog(L.Callback):
    """Writes loss, losses and log Z by modality, gradient norm and learning rate of every step.

    Records stay on the device until a flush, which is one transfer. The flush looks at each step for
    non-finite numbers and for divergence (`DivergenceRule`), and stops the run in order.

    Args:
        flush_at: a flush comes at every step that is a multiple of one of these.
        warmup_steps: of the learning rate, for the divergence rule.
        at_start: what is known before the first step, written with the step that the run starts at.
        first_step: that step: 0, or that of the checkpoint that a fork leaves.

    Attributes:
        divergence: (step, reason) once the run has diverged.
        latest: values of the newest flushed step, for a progress line.
    """

    def __init__(
        self, flush_at: Iterable[int], warmup_steps: int, at_start: dict[str, float], first_step: int = 0
    ):
        self.flush_at, self.first_step = [n for n in flush_at if n], first_step
        self.at_start = at_start
        self.rule = DivergenceRule(warmup_steps)
        self.divergence: tuple[int, str] | None = None
        self.latest: dict[str, float] = {}
        self._records: list[StepRecord] = []
        self._batches: list[
            tuple[int, TokenBatch]
        ] = []  # since the last flush, with the number of the micro-batch
        self._tokens = 0
        self._since = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.monotonic()
        if trainer.global_step == self.first_step:
            for logger in trainer.loggers:
                logger.log_metrics(self.at_start, self.first_step)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch: TokenBatch, batch_idx: int) -> None:
        self._tokens += batch.ids_BT.numel() * trainer.world_size
        self._batches.append((batch_idx, batch))
        assert isinstance(pl_module, TrainingModule)
        record = pl_module.step_record
        if record is None:
            return  # in the middle of an accumulated step
        pl_module.step_record = None
        self._records.append(record)
        if self.flushes(record.step, trainer.max_steps):
            self.flush(trainer, pl_module)

    def flushes(self, step: int, max_steps: int) -> bool:
        """Whether a flush comes at ``step``."""
        return step == max_steps or any(step % n == 0 for n in self.flush_at)

    def flush(self, trainer: L.Trainer, pl_module: TrainingModule, alone: bool = False) -> None:
        """Write what was collected; stop the trainer if the run has diverged in it.

        ``alone`` is whether the other ranks may be elsewhere.
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
                break  # the weights stand still from here on: later steps say nothing
        self._records.clear()
        self._batches.clear()

    def _diverged(self, step: int, pl_module: TrainingModule, alone: bool) -> str | None:
        if not math.isfinite(self.latest["grad_norm"]):
            # Where it was may be in another rank's batch, and its weights in every rank's hands.
            together = not alone or pl_module.trainer.world_size == 1
            site = first_said(self._where(step, pl_module)) if together else None
            return f"the gradient norm became {self.latest['grad_norm']}{f': {site}' if site else ''}"
        losses = {
            m: self.latest[f"loss/{m}"] for m in pl_module.trained_modalities if f"loss/{m}" in self.latest
        }
        return self.rule.update(step, losses)

    def _where(self, step: int, pl_module: TrainingModule) -> str | None:
        """The first bad site of a step, where its forward can be taken again."""
        accumulate = pl_module.trainer.accumulate_grad_batches
        with contextlib.suppress(RuntimeError):  # no memory left: the reason still has to be written
            return pl_module.bad_site([(i, b) for i, b in self._batches if i // accumulate == step - 1])
        return None

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        assert isinstance(pl_module, TrainingModule)
        # What broke the run may break this too (a full disk, a lost device): its status still has to be written.
        with contextlib.suppress(OSError, RuntimeError):
            self.flush(trainer, pl_module, alone=True)

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rule.load_state_dict(state_dict)


def ends_step(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether this micro-batch closed an optimizer step: in between, gradients of half a step are pending."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


class Validation(L.Callback):
    """Held-out losses every N optimizer steps, and at the end of every run that reaches one.

    Not Lightning's own loop, which a resume at a step with a validation due would skip.

    Args:
        batches: makes the fixed validation batches.
        every_n_steps: 0 for the end only.
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
        """A run that diverged is validated where it ended."""
        if trainer.global_step != self._validated:
            self._validate(trainer, pl_module)

    def _validate(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._validated = trainer.global_step
        values = pl_module.validation_losses(self.batches())
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run can be taken up again.

    Args:
        every_n_steps: optimizer steps between two checkpoints; 0 writes only the last one.
        keep: how many of the newest are kept.
        at: steps at which one is written and kept whatever comes after, for forks; no part of the run's identity.
    """

    every_n_steps: int = number(500, 0, MOST_STEPS)
    keep: int = number(2, 1, MOST_STEPS)
    at: list[int] = number(list, 1, MOST_STEPS)

    def __post_init__(self) -> None:
        check_numbers(self, "checkpoint")


class Checkpoints(L.Callback):
    """Writes ``step00000500.ckpt`` whole or not at all, after a flush that found the step finite.

    An older one is removed only after that, so that there is always one to go on from.

    Attributes:
        saved: the step of the newest, or the one that this process began at.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, step_log: StepLog):
        self.folder, self.config, self.step_log = folder, config, step_log
        self.saved, self._written = -1, Written(folder.parent)

    def state_dict(self) -> dict[str, Any]:
        """What the run has written so far, so that a resume sees whether it is still there, and what it had lost."""
        lost = ""
        with contextlib.suppress(UserError):  # whoever damaged the file gets the sentence at the resume
            status = read_status(self.folder.parent)
            lost = status.lost if status is not None else ""
        return {"written": self._written.now(), "lost": lost}

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
        """A checkpoint of now, unless the run has diverged."""
        self.step_log.flush(trainer, pl_module)
        if self.step_log.divergence is not None:
            return
        for logger in trainer.loggers:
            logger.save()
        path = self.folder / checkpoint_name(trainer.global_step)
        trainer.save_checkpoint(path)
        self.saved = trainer.global_step
        if trainer.is_global_zero:  # the new one is on the disk and was read back from it
            older = [old for old in checkpoints_in(self.folder) if step_of(old) < trainer.global_step]
            for old in older[: len(older) + 1 - self.config.keep]:
                if step_of(old) not in self.config.at:
                    old.unlink()
