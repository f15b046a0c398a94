"""What the monitors cost: `python benchmarks/monitors.py`, step time in turns, off, between probes, and probing.

Each way trains a model of its own with the whole training stack on the same batches; the rounds are interleaved,
and a row is the median over rounds, with quartiles. The CPU part has the size of configs/demo.yaml on one thread;
with CUDA there is a second part, configs/gpu_124m.yaml at 1,024 tokens. `--quick` is for checking that it runs.
"""

from __future__ import annotations

import argparse
import logging
import platform
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from mmqk.config import RunConfig, resolve
from mmqk.data.batch import TokenBatch
from mmqk.monitors import MonitorConfig
from mmqk.monitors.lab.callback import RunMonitor
from mmqk.train import FLUSH_EVERY
from mmqk.training.loggers import RunLogger
from mmqk.training.module import TrainingModule
from mmqk.training.steps import StepLog

WARM = 3  # steps of a round before the clock starts


@dataclass(frozen=True)
class Setup:
    """One table.

    Attributes:
        title: its heading.
        run: shape, precision and optimizer.
        batch: sequences of a step.
        tokens: of a sequence.
        every: optimizer steps between two probes at the default cadence.
        rounds: of each way.
        steps: timed in a round: at least `every`.
    """

    title: str
    run: RunConfig
    batch: int
    tokens: int
    every: int
    rounds: int
    steps: int

    def ways(self) -> dict[str, tuple[MonitorConfig, int]]:
        """What is timed: the monitors, and how many steps of a round."""
        every_step = MonitorConfig(
            every_n_steps=1, heads=True, parameters=True, precision=True, gradient_agreement=True,
            budget_every_n_steps=50, budget_steps=50,
        )  # fmt: skip
        return {
            "off": (MonitorConfig(every_n_steps=0), self.steps),
            "on, between two probes": (MonitorConfig(every_n_steps=10**9), self.steps),
            f"a probe every {self.every} steps": (MonitorConfig(every_n_steps=self.every), self.steps),
            "a probe every step": (MonitorConfig(every_n_steps=1), min(self.steps, 10)),
            "everything, every step": (every_step, min(self.steps, 10)),
        }


class Clock(L.Callback):
    """Seconds per step between the warm-up and the end of the timed steps. Comes last."""

    def __init__(self, steps: int):
        self.steps, self.seconds, self._start = steps, float("nan"), 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        if trainer.global_step in (WARM, WARM + self.steps):
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds, self._start = (now - self._start) / self.steps, now


def batches(setup: Setup, n: int) -> list[TokenBatch]:
    """Random tokens: an image of a quarter of the sequence in each, somewhere in the text."""
    B, T, sizes = setup.batch, setup.tokens, list(setup.run.model.blocks.values())
    random = torch.Generator().manual_seed(0)
    made = []
    for _ in range(n):
        start_B1 = torch.randint(T - T // 4, (B, 1), generator=random)
        place_T = torch.arange(T)
        modality_BT = ((place_T >= start_B1) & (place_T < start_B1 + T // 4)).long()
        text_BT, image_BT = (torch.randint(size, (B, T), generator=random) for size in sizes)
        mask_BT = torch.ones(B, T, dtype=torch.bool)
        mask_BT[:, -1] = False
        ids_BT = torch.where(modality_BT == 0, text_BT, sizes[0] + image_BT)
        valid_BT = torch.ones_like(mask_BT)
        made.append(TokenBatch(ids_BT, modality_BT, mask_BT, valid_BT, mask_BT.sum()))
    return made


def one_round(
    setup: Setup, module: TrainingModule, monitor: MonitorConfig, steps: int, folder: Path
) -> float:
    """Seconds of a step."""
    run, clock = setup.run, Clock(steps)
    log = StepLog((FLUSH_EVERY, min(monitor.every_n_steps, 10**6)), run.optim.warmup_steps, {})
    trainer = L.Trainer(
        **run.trainer | {"max_steps": WARM + steps + 1},
        max_epochs=-1,
        logger=RunLogger(folder / "metrics.jsonl"),
        callbacks=[log, RunMonitor(monitor), clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
    )
    data = batches(setup, WARM + steps + 1)
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return clock.seconds


def table(setup: Setup) -> None:
    """Measure and print."""
    run, ways = setup.run, setup.ways()
    # One for all ways: where in memory its weights lie makes a per cent or two.
    module = TrainingModule(run.model, run.loss, run.optim, run.seed, run.backend)
    parameters = sum(p.numel() for p in module.model.parameters())
    times: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(setup.rounds + 1):  # the first is not counted
            order = list(ways.items())
            for j, (name, (monitor, steps)) in enumerate(order[i % len(order) :] + order[: i % len(order)]):
                place = Path(folder) / f"{i}-{j}"
                place.mkdir()
                module.step_watch = None
                seconds = one_round(setup, module, monitor, steps, place)
                if i:
                    times[name].append(seconds)
    print(f"## {setup.title}\n")
    size = f"{parameters / 1e6:.1f}M parameters, {setup.batch} x {setup.tokens} tokens a step"
    probed = f"probes of {MonitorConfig().sequences} sequences"
    print(f"{size}, {run.trainer['precision']}, {probed}; medians of {setup.rounds} rounds, in turns\n")
    print("| monitors | ms a step | quartiles | against off in the same round | quartiles |")
    print("| --- | --: | --: | --: | --: |")
    for name, found in times.items():
        low, middle, high = (1e3 * x for x in quartiles(found))
        less, ratio, more = quartiles([x / off - 1 for x, off in zip(found, times["off"], strict=True)])
        print(
            f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} | {ratio:+.1%} | {less:+.1%} to {more:+.1%} |"
        )
    print()


def quartiles(found: list[float]) -> list[float]:
    """The first, the median and the third."""
    return statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3


def setups(quick: bool) -> list[Setup]:
    """The CPU, and a GPU where there is one."""
    demo = resolve(["--config=configs/demo.yaml"])
    demo = replace(demo, trainer=demo.trainer | {"accelerator": "cpu"})
    found = [
        Setup("CPU, the demonstration, one thread", demo, 8, 128, 10, 1 if quick else 15, 10 if quick else 20)
    ]
    if torch.cuda.is_available():
        large = resolve(["--config=configs/gpu_124m.yaml"])
        large = replace(large, trainer=large.trainer | {"accelerator": "gpu", "devices": 1})
        name = torch.cuda.get_device_name()
        found.append(Setup(f"{name}, 124M", large, 8, 1024, 100, 1 if quick else 5, 100))
    return found


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--quick", action="store_true", help="one round of a few steps")
    quick = parser.parse_args().quick
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"`{shlex.join(['python', *sys.argv])}` on {platform.machine()}, Python {platform.python_version()},"
          f" torch {torch.__version__}, Lightning {L.__version__}\n")  # fmt: skip
    for setup in setups(quick):
        table(setup)
    return 0


if __name__ == "__main__":
    sys.exit(main())
