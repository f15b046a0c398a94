"""Applies the alarm rules to the logged values of a run; prints, stores and, if configured, acts on each alarm."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers.logger import Logger

from mmqk.config.training import AlarmConfig
from mmqk.monitors.own.callback import RunMonitor
from mmqk.signals import Interrupted
from mmqk.store import Alarm, AlarmRules, append_alarms, parse_tag, replacing, truncate_alarms
from mmqk.store.checkpoints import PARTIAL_SUFFIX, checkpoint_name
from mmqk.training.loggers import RunLogger
from mmqk.training.loop import Checkpoints, StepLog, ends_step
from mmqk.training.module import TrainingModule
from mmqk.training.tensorboard import StoryLogger

# Maximum number of printed lines per alarm, statistic and modality; the default is 1. alarms.jsonl has all alarms.
MOST_LINES = {"spike": 5, "spike_median": 5}


class AlarmStop(Interrupted):
    """Raised when an alarm stops the run, after a checkpoint of that step has been written."""

    def __init__(self, alarm: Alarm):
        super().__init__(signal.SIGINT)
        self.args = (f"stopped by an alarm at {alarm.line()}",)


class Collected(Logger):
    """A logger that keeps all logged values until they are drained."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, dict[str, float]] = {}

    @property
    def name(self) -> str:
        return "alarms"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self._values.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

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
            truncate_alarms(self.folder, trainer.global_step or -1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        if not ends_step(trainer, batch_idx):
            return
        assert isinstance(pl_module, TrainingModule)
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
            append_alarms(self.folder, alarms)
            self._print(alarms)
            for logger in self._loggers:
                if isinstance(logger, RunLogger | StoryLogger):
                    logger.log_alarms(alarms)
        return alarms

    def _print(self, alarms: list[Alarm]) -> None:
        """Print the first alarms of each kind: at most `MOST_LINES` per alarm, statistic and modality."""
        for alarm in alarms:
            parsed = parse_tag(alarm.tag)
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
        keep = [name for name in self.config.checkpoint if name in names and not self._kept(name)]
        if not keep and stop is None:
            return
        self.checkpoints.save(trainer, pl_module)
        if self.step_log.divergence is not None:
            return  # the flush before the checkpoint found a divergence
        if trainer.is_global_zero:
            for name in keep:
                self._keep(name, trainer.global_step)
        if stop is not None and trainer.global_step < trainer.max_steps:
            raise AlarmStop(stop)

    def _kept(self, name: str) -> bool:
        return any(self.checkpoints.folder.glob(f"alarm_{name}_step*.ckpt"))

    def _keep(self, name: str, step: int) -> None:
        """Give the new checkpoint a second name that is never removed (a hard link)."""
        newest = self.checkpoints.folder / checkpoint_name(step)
        path = newest.with_name(f"alarm_{name}_{newest.name}")
        try:
            os.link(newest, path)
        except OSError:  # a file system without hard links
            with open(newest, "rb") as source, replacing(path, path.with_suffix(PARTIAL_SUFFIX)) as file:
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
