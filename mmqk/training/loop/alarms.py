"""Alarms while a run trains: found in what it logs, said once, written down, and acted on where that is asked for."""

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

from mmqk.monitors.training_run.callback import RunMonitor
from mmqk.store import Alarm, AlarmConfig, AlarmRules, append_alarms, parse_tag, truncate_alarms
from mmqk.store.checkpoints import PARTIAL_SUFFIX, checkpoint_name
from mmqk.training.logging.loggers import RunLogger, StoryLogger
from mmqk.training.loop.signals import Interrupted
from mmqk.training.loop.step_log import Checkpoints, StepLog, ends_step
from mmqk.training.step.module import TrainingModule

# Lines on the terminal for one alarm on one statistic of one modality; alarms.jsonl has all of them.
SAID_AT_MOST = {"spike": 5, "spike_median": 5}


class AlarmStop(Interrupted):
    """An alarm stopped the run; a checkpoint of that step has been written."""

    def __init__(self, alarm: Alarm):
        super().__init__(signal.SIGINT)
        self.args = (f"stopped by the alarm {alarm.line()}",)


class _Tap(Logger):
    """A logger that keeps what everybody logs, until it is drained."""

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
        """What was logged since the last time, by rising step."""
        found, self._values = sorted(self._values.items()), {}
        return found


class Alarms(L.Callback):
    """Puts every number that is logged through `AlarmRules`: the losses of each flush, the statistics of each probe.

    Comes after whatever logs and before `Checkpoints` in the list of callbacks, and its `tap` among the trainer's
    loggers. It reads what was logged already and synchronises nothing.

    Args:
        folder: where ``alarms.jsonl`` goes.
        config: what an alarm does.
        rules: with the length of the run and its warm-up.
        step_log: flushed before a probe, so that the numbers of a step come together.
        monitor: what probes.
        checkpoints: what writes them.
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
        self.tap = _Tap()
        self._probe_until, self._first_step = -1, 0
        self._waiting: list[Alarm] = []  # found where nothing can be done about them
        self._said: Counter[tuple[str, ...]] = Counter()
        self._loggers: list[Logger] = []
        self._first_rank = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._loggers, self._first_rank = trainer.loggers, trainer.is_global_zero
        self._first_step = trainer.global_step + 1
        if self._first_rank:
            # What an earlier process saw after the step that this one goes on from comes again.
            truncate_alarms(self.folder, trainer.global_step or -1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        if not ends_step(trainer, batch_idx):
            return
        assert isinstance(pl_module, TrainingModule)
        if trainer.global_step <= self._probe_until:
            self.step_log.flush(trainer, pl_module)
            self.monitor.probe_now(trainer, pl_module, batch)
        found, self._waiting = [*self._waiting, *self._look()], []
        step = trainer.global_step
        if not self.config.acts:
            return
        new = self.step_log.flushes(step, trainer.max_steps) or step <= self._probe_until
        if new or step == self._first_step:  # which may have been left something by an interruption
            # Only the first rank has seen the probes, and all have to act.
            self._act(trainer, pl_module, trainer.strategy.broadcast(found))
        else:  # nothing is new between flushes, and a broadcast waits for the device
            self._waiting = found

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        with contextlib.suppress(OSError):
            self._look()

    def _look(self) -> list[Alarm]:
        """Take what was logged; say, write and mark the alarms that begin: on the first rank, which logs."""
        logged = self.tap.drain()
        if not self._first_rank:
            return []
        found = [alarm for step, values in logged for alarm in self.rules.update(step, values)]
        if found:
            append_alarms(self.folder, found)
            self._say(found)
            for logger in self._loggers:
                if isinstance(logger, RunLogger | StoryLogger):
                    logger.log_alarms(found)
        return found

    def _say(self, found: list[Alarm]) -> None:
        """A line for each alarm, statistic and modality: the first layer stands for the others."""
        for alarm in found:
            parsed = parse_tag(alarm.tag)
            kind = (alarm.name, parsed.statistic, parsed.modality or "")
            self._said[kind] += 1
            if self._said[kind] <= SAID_AT_MOST.get(alarm.name, 1):
                print(f"alarm at {alarm.line()}", file=sys.stderr, flush=True)

    def _act(self, trainer: L.Trainer, pl_module: TrainingModule, found: list[Alarm]) -> None:
        if not found or self.step_log.divergence is not None:
            return
        names = {alarm.name for alarm in found}
        if names & set(self.config.probe):
            self._probe_until = trainer.global_step + self.config.probe_steps
        stop = next((alarm for alarm in found if alarm.name in self.config.stop), None)
        keep = [name for name in self.config.checkpoint if name in names and not self._kept(name)]
        if not keep and stop is None:
            return
        self.checkpoints.save(trainer, pl_module)
        if self.step_log.divergence is not None:
            return  # the flush before the checkpoint found it
        if trainer.is_global_zero:
            for name in keep:
                self._keep(name, trainer.global_step)
        if stop is not None and trainer.global_step < trainer.max_steps:
            raise AlarmStop(stop)

    def _kept(self, name: str) -> bool:
        return any(self.checkpoints.folder.glob(f"alarm_{name}_step*.ckpt"))

    def _keep(self, name: str, step: int) -> None:
        """A second name for the checkpoint of now, which outlives the first."""
        newest = self.checkpoints.folder / checkpoint_name(step)
        path = newest.with_name(f"alarm_{name}_{newest.name}")
        try:
            os.link(newest, path)
        except OSError:  # a file system without hard links
            partial = path.with_suffix(PARTIAL_SUFFIX)
            shutil.copyfile(newest, partial)
            os.replace(partial, path)

    def state_dict(self) -> dict[str, Any]:
        # What a last flush logged belongs to the checkpoint; an interruption leaves what it calls for to the resume.
        self._waiting += self._look()
        waiting = [asdict(alarm) for alarm in self._waiting]
        return {"rules": self.rules.state_dict(), "probe_until": self._probe_until, "waiting": waiting}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rules.load_state_dict(state_dict["rules"])
        self._probe_until = state_dict["probe_until"]
        self._waiting = [Alarm(**alarm) for alarm in state_dict.get("waiting", [])]
