"""The timed loops: a bare training loop, and the training stack of `mmqk.train`."""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from benchmarks.harness import seconds_of, synchronize
from benchmarks.setups import batches_of, labels_of
from mmqk.config import MonitorConfig, RunConfig
from mmqk.data.batch import TokenBatch
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.loader import PositionedLoader
from mmqk.monitors.own.callback import RunMonitor
from mmqk.store import AlarmRules
from mmqk.training.callbacks import FLUSH_EVERY, Alarms, StepLog
from mmqk.training.device import keep_freed_memory, resolve_device, skip_nvml_check
from mmqk.training.loggers import RunLogger, StoryLogger
from mmqk.training.losses import total_loss
from mmqk.training.module import TrainingModule
from mmqk.training.optimizers import make_optimizer
from mmqk.training.saving import Checkpoints

WARM = 3  # untimed steps before each timing of the training stack
CLIP = 1.0
Loss = Callable[[Any], Tensor]


class Loop:
    """A training loop: forward pass, backward pass, clipping by norm and a fused AdamW, on batches in device memory.

    Args:
        model: the trained model, or a module that contains it.
        loss: computes the loss of a batch.
        batches: batches that the loop cycles through.
        run: the run whose precision and optimizer settings are used.
        device: cpu or cuda.
        optimizer: the optimizer; None for AdamW with weight decay on all parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Sequence[Any],
        run: RunConfig,
        device: str,
        optimizer: torch.optim.Optimizer | None = None,
    ):
        if device == "cpu":
            skip_nvml_check()  # Lightning turns on this slow check; a script without Lightning does not have it
        c = run.optim
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer or torch.optim.AdamW(
            self.parameters, lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay, fused=True
        )  # fmt: skip
        self.loss, self.device, self.batches = loss, device, itertools.cycle(batches)
        self.mixed = run.trainer.precision == "bf16-mixed"
        self.first_loss: float | None = None
        self.first_seconds: float | None = None

    def __call__(self, n: int) -> float:
        if self.first_seconds is not None:
            return seconds_of(self.step, n, self.device)
        self.first_seconds = seconds_of(self._first, 1, self.device)
        return self.first_seconds

    def step(self) -> Tensor:
        """Make one update of the weights and return the loss."""
        with torch.autocast(self.device, torch.bfloat16) if self.mixed else nullcontext():
            loss = self.loss(next(self.batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _first(self) -> None:
        self.first_loss = float(self.step())


def own_loop(run: RunConfig, device: str) -> Loop:
    """Return a loop with mmqk's model, optimizer and loss by modality, without Lightning and monitors."""
    resolve_device(run, torch.device(device))  # refuses a kernel that cannot compute this run
    module = TrainingModule.of(run).to(device).train()
    batches = [batch.to(device) for batch in batches_of(run)]

    def loss(batch: TokenBatch) -> Tensor:
        return total_loss(module.losses(batch), *module.loss_weighting(batch))

    return Loop(module, loss, batches, run, device, make_optimizer(run.optim, module.model))


def ids_and_labels(run: RunConfig, device: str) -> list[tuple[Tensor, Tensor]]:
    """Return (ids, labels) of the run's batches, for models that do not take a `TokenBatch`."""
    return [(batch.ids_BT.to(device), labels_of(batch).to(device)) for batch in batches_of(run)]


class Clock(L.Callback):
    """A callback that times the steps after the warm-up. It must be the last callback.

    Args:
        steps: number of timed steps.
        gate: called after the warm-up, before the clock starts.
    """

    def __init__(self, steps: int, gate: Callable[[], object] | None = None):
        self.steps, self.gate = steps, gate
        self.start = self.end = self.begun = self.first = float("nan")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begun = time.monotonic()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        if trainer.global_step not in (1, WARM, WARM + self.steps):
            return
        synchronize(pl_module.device.type)
        if trainer.global_step == 1:
            self.first = time.monotonic() - self.begun
        elif trainer.global_step == WARM:
            if self.gate is not None:
                self.gate()
            self.start = time.monotonic()
        else:
            self.end = time.monotonic()


class _FirstLoss(L.Callback):
    """A callback that stores the loss of the first step. It must precede `StepLog`, which removes the step record."""

    loss: float | None = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        if self.loss is None and pl_module.step_record is not None:
            self.loss = float(pl_module.step_record.values[0])


class Stack:
    """The training stack of `mmqk.train`: Lightning, loggers, alarms, monitors and data, without validation and
    checkpoints, whose cost depends on their interval.

    Each turn makes a new Trainer and does not time its first steps. All turns continue to train the same model.

    Args:
        run: the configuration of the run.
        module: the module of this run; None to make a new one.
        monitor: the monitors; None for those of the run.
        batches: batches in memory; None to use the run's loader with its workers.
    """

    warms_up = True

    def __init__(
        self,
        run: RunConfig,
        module: TrainingModule | None = None,
        monitor: MonitorConfig | None = None,
        batches: Sequence[TokenBatch] | None = None,
    ):
        self.run, self.batches = run, batches
        self.monitor = run.monitor if monitor is None else monitor
        self.module = TrainingModule.of(run) if module is None else module
        self.data = TokenDataModule(run.data, run.seed)
        self.data.setup()
        self.first_seconds: float | None = None
        self.first_loss: float | None = None
        if run.trainer.accelerator == "cpu":
            keep_freed_memory()  # as mmqk.train does
            skip_nvml_check()
        quieten()

    def __call__(self, n: int) -> float:
        clock = self.timed(n)
        return (clock.end - clock.start) / n

    def timed(self, n: int, gate: Callable[[], object] | None = None) -> Clock:
        """Train `WARM` untimed steps, n timed steps and one untimed step. Return the clock with the times."""
        steps, clock, first = WARM + n + 1, Clock(n, gate), _FirstLoss()
        with tempfile.TemporaryDirectory() as folder:
            callbacks, loggers = self._watching(Path(folder), steps)
            trainer = L.Trainer(
                **asdict(self.run.trainer) | {"max_steps": steps},
                max_epochs=-1,
                logger=loggers,
                callbacks=[first, *callbacks, clock],
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                log_every_n_steps=1,
            )
            self.module.update_monitor = None
            if self.batches is None:
                trainer.fit(self.module, datamodule=self.data)
            else:
                device = torch.device("cuda" if self.run.trainer.accelerator == "gpu" else "cpu")
                loader = PositionedLoader(_Around(self.batches, steps), 0, device)  # type: ignore[arg-type]
                trainer.fit(self.module, loader)
        if self.first_seconds is None:
            self.first_seconds, self.first_loss = clock.first, first.loss
        return clock

    def _watching(self, folder: Path, steps: int) -> tuple[list[L.Callback], list[Any]]:
        run, monitor = self.run, self.monitor
        every = (FLUSH_EVERY, min(monitor.every_n_steps, 10**6))
        log = StepLog(every)
        heldout = self.data.probe_batch(monitor.probe_sequences) if monitor.probe_split == "heldout" else None
        probes = RunMonitor(monitor, heldout, self.data.step_rows if self.batches is None else None)
        rules = AlarmRules(run.optim.warmup_steps, steps, self.module.trained_modalities)
        checkpoints = Checkpoints(folder, run.checkpoint, log)
        alarms = Alarms(folder, run.alarm, rules, log, probes, checkpoints)
        loggers: list[Any] = [
            RunLogger(folder / "metrics.jsonl"),
            StoryLogger(folder, run.model.modalities, monitor.tensorboard_layers),
            alarms.collected,
        ]
        return [log, probes, alarms], loggers


class _Around(torch.utils.data.Dataset):
    """A data set of n batches that cycles through the given batches."""

    ahead = 0

    def __init__(self, batches: Sequence[TokenBatch], n: int):
        self.batches, self.n = batches, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> TokenBatch:
        if i >= self.n:
            raise IndexError
        return self.batches[i % len(self.batches)]


def quieten() -> None:
    """Hide Lightning's warnings and notices."""
    warnings.filterwarnings("ignore", module="lightning.*")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
