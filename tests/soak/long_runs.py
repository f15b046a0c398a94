"""Long runs: memory, file handles, threads and the size of the log per step do not grow with the number of steps.

Case 0 trains `STEPS` steps with every monitor on. Case 1 measures ten times as many probes as case 0. In the second
half of a run, memory must grow by less than `MOST_BYTES` bytes per step.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from mmqk.store import cli_main, read_metrics, read_status
from mmqk.train import main
from mmqk.training.module import TrainingModule
from tests.soak.kills import BASE, DIAL

CASES, QUICK, SECONDS = 2, 0, 3600.0
STEPS = int(os.environ.get("MMQK_SOAK_STEPS", 50_000))
MOST_BYTES = 200.0
MONITORS = ["--monitor.budget_every_n_steps=500", *(f"--monitor.{name}=true" for name in (
    "heads", "parameters", "second_moment", "precision", "matrices", "gradient_agreement",
))]  # fmt: skip


def prepare(shared: Path) -> None:
    """Do nothing, because the cases share no files."""


def case(number: int, rng: random.Random, shared: Path, work: Path) -> str:
    every = (100, 10)[number]
    samples = sample_usage(STEPS // 50)
    out = work / "run"
    args = [*BASE, *DIAL, *MONITORS, f"--trainer.max_steps={STEPS}", f"--monitor.every_n_steps={every}",
            f"--checkpoint.every_n_steps={STEPS // 10}", f"--data.val_every_n_steps={STEPS // 50}"]  # fmt: skip
    assert cli_main(main)([*args, f"--out={out}"]) == 0
    status = read_status(out)
    assert status is not None and status.status == "completed" and status.step == STEPS, status
    steps, memory, handles, threads = (np.array(column) for column in zip(*samples, strict=True))
    late = steps >= STEPS / 2
    growth = np.polyfit(steps[late], memory[late], 1)[0]
    told = f"memory by step: {dict(zip(steps.tolist(), (memory >> 20).tolist(), strict=True))} MiB"
    assert growth < MOST_BYTES, f"memory grows by {growth:.0f} bytes per step; {told}"
    assert handles[late].max() <= handles[~late].max() and threads[late].max() <= threads[~late].max(), told
    metrics = (out / "metrics.jsonl").stat().st_size / STEPS
    events = sum(path.stat().st_size for path in out.rglob("events.out.tfevents.*")) / STEPS
    assert sum(1 for _ in read_metrics(out / "metrics.jsonl")) == STEPS + 1
    points = EventAccumulator(str(out), size_guidance={"scalars": 0}).Reload()
    assert len(points.Scalars("loss")) == STEPS
    per_step = f"memory grows by {growth:.0f} bytes, metrics by {metrics:.0f} and events by {events:.0f} per step"
    return f"a probe every {every} steps: {per_step}; at most {memory.max() >> 20} MiB of memory"


def sample_usage(every: int) -> list[tuple[int, int, int, int]]:
    """Return a list that collects (step, resident bytes, open files, threads) of this process every ``every`` steps
    of training."""
    samples: list[tuple[int, int, int, int]] = []
    training_step, page = TrainingModule.training_step, os.sysconf("SC_PAGE_SIZE")

    def sampled(self: TrainingModule, *rest: object) -> Tensor:
        if (step := self.trainer.global_step) % every == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
            samples.append((step, resident, len(os.listdir("/proc/self/fd")), threading.active_count()))
        return training_step(self, *rest)

    TrainingModule.training_step = sampled  # type: ignore[method-assign]
    return samples
