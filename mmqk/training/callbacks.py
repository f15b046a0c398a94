"""Callbacks that log every step, check it for divergence and alarms, validate, and show the progress."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger, Logger

from mmqk import store
from mmqk.config.training import AlarmConfig
from mmqk.data.batch import TokenBatch
from mmqk.distributed import first_of_ranks
from mmqk.monitors.own.callback import RunMonitor
from mmqk.progress import Progress
from mmqk.store import Alarm, AlarmRules, DivergenceRule, UserError
from mmqk.store.checkpoint_files import PARTIAL_SUFFIX, checkpoint_name
from mmqk.training.loggers import RunLogger, StoryLogger
from mmqk.training.module import StepRecord, TrainingModule
from mmqk.training.saving import Checkpoints, Interrupted, ends_step

FLUSH_EVERY = 10  # steps


class StepLog(L.Callback):
    """Logs, for every step, the total loss, the loss and log Z by modality, the gradient norm and the learning rate.

    Records stay on the device until a flush transfers all of them at once. The flush checks each step for non-finite
    numbers and divergence (`DivergenceRule`), and stops a diverged run.

    Args:
        flush_at: Numbers of steps. The log is flushed at every multiple of each number; 0 is ignored.
        at: More steps at which the log is flushed.
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
        at: Collection[int] = (),
    ):
        self.flush_at, self.at, self.first_step = [n for n in flush_at if n], at, first_step
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
        record = pl_module.step_record
        if record is None:
            return  # more micro-batches of this optimizer step follow
        pl_module.step_record = None
        self._records.append(record)
        if self.flushes(record.step, trainer.max_steps):
            self.flush(trainer, pl_module)

    def flushes(self, step: int, max_steps: int) -> bool:
        """Return whether to flush at ``step``."""
        return step == max_steps or step in self.at or any(step % n == 0 for n in self.flush_at)

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
        return self.rule.reason(step, losses)

    def _where(self, step: int, pl_module: TrainingModule) -> str | None:
        """Return the first non-finite tensor of a step as text, or None if the forward pass cannot run again."""
        accumulate = pl_module.trainer.accumulate_grad_batches
        with contextlib.suppress(RuntimeError):  # memory may run out, and the status must still be written
            return pl_module.bad_site([(i, b) for i, b in self._batches if i // accumulate == step - 1])
        return None

    def on_exception(self, trainer, pl_module, exception: BaseException) -> None:
        # The same error may occur again (a full disk, a lost device), and the status must still be written.
        with contextlib.suppress(OSError, RuntimeError):
            self.flush(trainer, pl_module, alone=True)

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rule.load_state_dict(state_dict)


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

    def on_train_end(self, trainer, pl_module) -> None:
        """Validate a diverged run at its last step."""
        if trainer.global_step != self._validated:
            self._validate(trainer, pl_module)

    def _validate(self, trainer: L.Trainer, pl_module: TrainingModule) -> None:
        self._validated = trainer.global_step
        values = pl_module.validation_losses(self.batches())
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)


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


# Maximum number of printed lines per alarm, statistic and modality; the default is 1. alarms.jsonl has all alarms.
MOST_LINES = {"spike": 5, "spike_median": 5}


class Collected(DummyLogger):
    """A logger that keeps all logged values until they are drained."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self._values.setdefault(step, {}).update(metrics)

    def drain(self) -> list[tuple[int, dict[str, float]]]:
        """Return the values logged since the last call, in order of their steps."""
        logged, self._values = sorted(self._values.items()), {}
        return logged


class Alarms(L.Callback):
    """Passes every logged value to `AlarmRules`: the losses at each flush, and the statistics of each probe.

    Place this callback after the callbacks that log and before `Checkpoints`, and add its `collected` to the
    trainer's loggers. The callback reads only logged values, so it never synchronizes with the device.

    Args:
        folder: Folder of ``alarms.jsonl``.
        config: Actions of the alarms.
        rules: The rules, created with the lengths of this run and its warm-up.
        step_log: The step log. The callback flushes it before each probe that an alarm causes (``alarm.probe``), so
            that the losses and the probe of a step are logged together.
        monitor: Runs the probes.
        checkpoints: Writes the checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        config: AlarmConfig,
        rules: AlarmRules,
        step_log: StepLog,
        monitor: RunMonitor,
        checkpoints: Checkpoints,
    ):
        self.folder, self.config, self.rules = folder, config, rules
        self.step_log, self.monitor, self.checkpoints = step_log, monitor, checkpoints
        self.collected = Collected()
        self._probe_until, self._first_step = -1, 0
        self._waiting: list[Alarm] = []  # alarms whose actions have not been taken yet
        self._printed: Counter[tuple[str, ...]] = Counter()
        self._loggers: list[Logger] = []
        self._first_rank = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._loggers, self._first_rank = trainer.loggers, trainer.is_global_zero
        self._first_step = trainer.global_step + 1
        if self._first_rank:
            # The steps after the checkpoint run again and raise their alarms again.
            store.truncate_alarms(self.folder, trainer.global_step or -1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        if not ends_step(trainer, batch_idx):
            return
        if trainer.global_step <= self._probe_until:
            self.step_log.flush(trainer, pl_module)
            self.monitor.probe_now(trainer, pl_module, batch)
        alarms, self._waiting = [*self._waiting, *self._look()], []
        step = trainer.global_step
        if not self.config.acts:
            return
        new = self.step_log.flushes(step, trainer.max_steps) or step <= self._probe_until
        if new or step == self._first_step:  # a resume acts on the alarms of the interrupted step
            # Only the first rank has the probes, but all ranks must act on their alarms.
            self._act(trainer, pl_module, trainer.strategy.broadcast(alarms))
        else:  # no new values between flushes, and a broadcast would synchronize with the device
            self._waiting = alarms

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        with contextlib.suppress(OSError):
            self._look()

    def _look(self) -> list[Alarm]:
        """Check the logged values; print, write and log the new alarms, on the first rank only."""
        logged = self.collected.drain()
        if not self._first_rank:
            return []
        alarms = [alarm for step, values in logged for alarm in self.rules.update(step, values)]
        if alarms:
            store.append_alarms(self.folder, alarms)
            self._print(alarms)
            for logger in self._loggers:
                if isinstance(logger, RunLogger | StoryLogger):
                    logger.log_alarms(alarms)
        return alarms

    def _print(self, alarms: list[Alarm]) -> None:
        """Print the first alarms of each kind: at most `MOST_LINES` per alarm, statistic and modality."""
        for alarm in alarms:
            parsed = store.parse_tag(alarm.tag)
            kind = (alarm.name, parsed.statistic, parsed.modality or "")
            self._printed[kind] += 1
            if self._printed[kind] <= MOST_LINES.get(alarm.name, 1):
                print(f"alarm at {alarm.line()}", file=sys.stderr, flush=True)

    def _act(self, trainer: L.Trainer, pl_module: TrainingModule, alarms: list[Alarm]) -> None:
        if not alarms or self.step_log.divergence is not None:
            return
        names = {alarm.name for alarm in alarms}
        if names & set(self.config.probe):
            self._probe_until = trainer.global_step + self.config.probe_steps
        stop = next((alarm for alarm in alarms if alarm.name in self.config.stop), None)
        kept = {name for name in names if any(self.checkpoints.folder.glob(f"alarm_{name}_step*.ckpt"))}
        keep = [name for name in self.config.checkpoint if name in names - kept]
        if not keep and stop is None:
            return
        self.checkpoints.save(trainer, pl_module)
        if self.step_log.divergence is not None:
            return  # the flush before the checkpoint found a divergence
        if trainer.is_global_zero:
            for name in keep:
                self._keep(name, trainer.global_step)
        if stop is not None and trainer.global_step < trainer.max_steps:
            raise Interrupted(signal.SIGINT, f"stopped by an alarm at {stop.line()}")

    def _keep(self, name: str, step: int) -> None:
        """Give the new checkpoint a second name that is never removed (a hard link)."""
        newest = self.checkpoints.folder / checkpoint_name(step)
        path = newest.with_name(f"alarm_{name}_{newest.name}")
        try:
            os.link(newest, path)
        except OSError:  # a file system without hard links
            with open(newest, "rb") as source, store.replacing(path, path.with_suffix(PARTIAL_SUFFIX)) as file:
                shutil.copyfileobj(source, file)

    def state_dict(self) -> dict[str, Any]:
        # Include the alarms of the last flush, because after an interruption the resumed run must act on them.
        self._waiting += self._look()
        waiting = [asdict(alarm) for alarm in self._waiting]
        return {"rules": self.rules.state_dict(), "probe_until": self._probe_until, "waiting": waiting}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rules.load_state_dict(state_dict["rules"])
        self._probe_until = state_dict["probe_until"]
        self._waiting = [Alarm(**alarm) for alarm in state_dict.get("waiting", [])]
