"""Train the runs of null_arms.csv and write the file: `python docs/experiments/null_arms_train.py FOLDER`.

The script trains 104 runs of a toy model, one after another in one process, in eight minutes on one CPU core.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from null_arms import AT_END, HERE, LOSSES, PROBED, RATES, SEEDS, STEPS

from mmqk.lab.runs import Run, read_runs
from mmqk.train import main as mmqk_train

TRAIN = (
    "--config=configs/dial.yaml",
    *("--model.d_model=32", "--model.n_layers=2", "--model.n_heads=2", "--data.seq_len=48", "--data.batch_size=8"),
    '--data.dial.vocabulary={"text": 32, "image": 32}',
    '--data.dial.entropy={"text": 1.5, "image": 1.5}',
    '--data.dial.tokens={"text": 24, "image": 24}',
    '--data.dial.lag={"text": 1, "image": 1}',
    *(
        "--trainer.max_steps=300",
        "--optim.warmup_steps=30",
        "--monitor.every_n_steps=50",
        "--monitor.probe_sequences=8",
    ),
    *("--checkpoint.every_n_steps=300", "--quiet"),
)


def train(folder: Path) -> None:
    """Train every seed at every learning rate, one after another in this process."""
    for seed in SEEDS:
        for rate in RATES:
            mmqk_train(
                [*TRAIN, f"--optim.lr={rate}", f"--seed={seed}", "--out", str(folder / f"lr{rate}" / f"seed{seed}")]
            )


def to_csv(folder: Path) -> None:
    """Write the CSV from trained runs."""
    with open(HERE / "null_arms.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["rate", "seed", "step", *PROBED, *LOSSES, *AT_END])
        for rate in RATES:
            for seed in SEEDS:
                (run,) = read_runs(folder / f"lr{rate}" / f"seed{seed}")
                writer.writerows(_lines(run, rate, seed))


def _lines(run: Run, rate: float, seed: int) -> Iterator[list[Any]]:
    for step in STEPS:
        line: list[Any] = [rate, seed, step]
        for name, (_, reduce) in PROBED.items():
            statistic, _, modality = name.partition("/")
            line.append(_value(run.combined(statistic, reduce, modality or None), step))
        line += [_value(run.series(tag), step) for tag in LOSSES]
        for tag in AT_END:
            line.append(_value(run.series(tag), 0 if "unigram" in tag else step) if step == STEPS[-1] else "")
        yield line


def _value(series: tuple[Any, Any], step: int) -> str:
    steps, values = series
    return f"{values[list(steps).index(step)]:.5g}"


if __name__ == "__main__":
    train(Path(sys.argv[1]))
    to_csv(Path(sys.argv[1]))
