"""Read the folder of a run: its values, weights and moments. Rewind a run to one of its checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch

from mmqk.store import read_metrics

# The flags of the run that `conftest.whole` trains, beside those of `tiny_args`.
WHOLE = ["--model.residual_dropout=0.1", "--checkpoint.keep=9"]
LAST = 12  # steps


def series(folder: Path, after: int = -1) -> list[dict]:
    """Return the lines of metrics.jsonl of later steps than ``after``, without the wall-clock values."""
    return [
        {name: value for name, value in line.items() if name != "tokens_per_s"}
        for line in read_metrics(folder / "metrics.jsonl")
        if line["step"] > after
    ]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / f"checkpoints/step{step:08d}.ckpt"


def saved(folder: Path, step: int = LAST) -> dict:
    return torch.load(checkpoint(folder, step), weights_only=True)


def state(folder: Path, step: int = LAST) -> dict[str, torch.Tensor]:
    """Return weights and buffers, and the optimizer's moments by the position of their parameter."""
    content = saved(folder, step)
    moments = content["optimizer_states"][0]["state"]
    named = {f"{i}.{name}": torch.as_tensor(v) for i, own in moments.items() for name, v in own.items()}
    return {**content["state_dict"], **named}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return weights and buffers of the newest checkpoint."""
    newest = sorted((folder / "checkpoints").glob("step*.ckpt"))[-1]
    return torch.load(newest, weights_only=True)["state_dict"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def same_run(a: Path, b: Path) -> bool:
    """Return whether all values, the last weights and the last moments of two runs are equal, bit for bit."""
    return series(a) == series(b) and same(state(a), state(b))


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def command(folder: Path) -> list[str]:
    """Return the arguments of a run, without ``--out``."""
    return json.loads((folder / "run.json").read_text())["details"]["command"][3:-1]


def rewind(whole: Path, out: Path, step: int, status: str = "running") -> list[str]:
    """Copy a run to ``out`` as if its process had been killed some steps after the checkpoint of ``step``, and return
    its arguments. The lines that it wrote after the checkpoint remain."""
    shutil.copytree(whole, out)
    for path in (out / "checkpoints").glob("*.ckpt"):
        if int(path.stem.removeprefix("step")) > step:
            path.unlink()
    (out / "status.json").write_text(json.dumps({"status": status, "step": 0, "reason": ""}))
    for path in out.rglob("events.out.tfevents.*"):  # TensorBoard orders them by the time in the name
        path.rename(path.with_name(re.sub(r"tfevents\.\d+", "tfevents.1000000000", path.name)))
    return command(whole)
