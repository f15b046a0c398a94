"""Kill a run with SIGKILL at any moment, then resume it: the result must equal that of a run that was never killed.

Some kills come at a random time, the others at a chosen file operation. A kill at a write comes when half of
the bytes are written. The kinds of runs: one batch per step, accumulated micro-batches, a fork, two loader workers,
two ranks with DDP or FSDP, a grid.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmqk.lab.runner.executors import PRELOAD
from mmqk.store import cli_main, is_locked, read_alarms
from mmqk.train import main
from tests.faulty_disk import Disk
from tests.tiny import tiny_args, write_tiny_data
from tests.training.ranks import RANKS, _rank, free_port
from tests.training.runs import series

for name in PRELOAD:  # before the forks
    importlib.import_module(name)

CASES, QUICK, SECONDS = 1000, 20, 120.0
KINDS = (*["plain"] * 8, *["accumulation"] * 4, *["fork"] * 4, "workers", "ddp", "fsdp", "grid")
STRATEGIES = ("ddp", "fsdp")  # runs of two ranks
STEPS = 8
LAST = f"checkpoints/step{STEPS:08d}.ckpt"
BASE = ["--data.batch_size=4", "--data.val_sequences=8", "--model.d_model=16", "--model.n_layers=2",
        "--model.n_heads=2", "--optim.lr=0.01", "--optim.warmup_steps=4", f"--trainer.max_steps={STEPS}",
        "--trainer.accelerator=cpu",
        "--threads=1", "--monitor.every_n_steps=4", "--monitor.probe_sequences=1", "--data.val_every_n_steps=4",
        "--checkpoint.every_n_steps=2", "--model.residual_dropout=0.1", "--quiet"]  # fmt: skip
DIAL = ['--data.mix={"dial": 1}', "--data.seq_len=96"]


class Killer(Disk):
    """Kills this process at a chosen file operation, or after half of the bytes of a chosen write."""

    torn = False

    def strike(self, operation: str, path: str) -> None:
        if operation != "write":
            os.kill(os.getpid(), signal.SIGKILL)
        self.torn = True

    def write(self, file: Any, data: Any) -> Any:
        if self.torn:
            file.write(data[: len(data) // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return file.write(data)


def arguments(kind: str, shared: Path) -> list[str]:
    data = shared / "data"
    return {
        "plain": [*BASE, *DIAL],
        "accumulation": [*BASE, *DIAL, "--trainer.accumulate_grad_batches=2"],
        "fork": [f"--fork={shared / 'parent/checkpoints/step00000004.ckpt'}", "--optim.lr=0.02", "--quiet"],
        "workers": [*tiny_args(data), *BASE, "--data.read=shards", "--data.workers=2"],
        "ddp": [*BASE, *DIAL],
        "fsdp": [*BASE, *DIAL],
    }[kind]


def prepare(shared: Path) -> None:
    """Train one run of each kind without a kill, and record its file operations."""
    (shared / "data").mkdir()
    write_tiny_data(shared / "data")
    in_child(lambda: main([*arguments("plain", shared), "--checkpoint.keep=9", f"--out={shared / 'parent'}"]))
    for kind in dict.fromkeys(KINDS):
        if kind != "grid":
            train(kind, shared, shared / kind, record=shared / f"{kind}.sites")
    grid(shared, shared / "grid").communicate()


def in_child(call: Callable[[], object], begun: Callable[[], bool] | None = None, kill_after: float = 0.0) -> bool:
    """Call a function in a forked process, and return whether the process was killed. Fail if the process
    ended by itself with an exit code other than 0."""
    return waited([forked(call)], begun, kill_after)


def forked(call: Callable[[], object]) -> int:
    """Call a function in a forked process, which ends with the exit code that it returns; return the process's id."""
    if pid := os.fork():
        return pid
    try:
        code = int(call() or 0)  # type: ignore[call-overload]
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 99
    os._exit(code)


def waited(pids: list[int], begun: Callable[[], bool] | None = None, kill_after: float = 0.0) -> bool:
    """Wait for all processes, and return whether one was killed. The last process is killed ``kill_after`` seconds
    after ``begun`` returns true; the others end by themselves."""
    if begun is not None:
        while not begun() and os.waitid(os.P_PID, pids[-1], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.01)
        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[-1], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in reversed(pids)]
    killed = -signal.SIGKILL in codes
    assert killed or not any(codes), f"exit codes {codes}"
    return killed


def train(kind: str, shared: Path, out: Path, disk: Killer | None = None, record: Path | None = None,
          kill_after: float | None = None) -> bool:  # fmt: skip
    """Start or resume the run in ``out``; return whether it was killed.

    Args:
        kind: one of `KINDS`.
        shared: the folder that `prepare` filled.
        out: the run folder.
        disk: kills the process at a file operation.
        record: file for the file operations, each with the index of its last call.
        kill_after: seconds to the kill, from the lock of the run folder, or from the moment when all ranks have
            joined: a rank that waits for another to join would wait until torch's timeout of 30 minutes.
    """
    args = [*arguments(kind, shared), f"--out={out}"]
    seconds = kill_after or 0.0
    if kind in STRATEGIES:
        before = _written(out / "data.json")  # the first rank writes this file when all ranks have joined

        def joined() -> bool:
            return _written(out / "data.json") != before

        return waited(ranks(args, out.parent, kind), None if kill_after is None else joined, seconds)
    begun = None if kill_after is None else (out / "run.lock").exists

    def call() -> int:
        nonlocal disk
        if disk is None and record is None:
            return cli_main(main)(args)
        with (disk or Killer(out)).mounted() as mounted:
            code = cli_main(main)(args)
        if record:
            record.write_text(json.dumps(sorted((*site, last) for site, last in mounted.seen.items())))
        return code

    return in_child(call, begun, seconds)


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def ranks(args: list[str], folder: Path, strategy: str) -> list[int]:
    port = free_port()
    flags = [*args, f"--trainer.devices={RANKS}", f"--trainer.strategy={strategy}"]
    logs = [str(folder / f"log{rank}") for rank in range(RANKS)]
    return [forked(partial(_rank, rank, port, flags, log, 1, 0)) for rank, log in enumerate(logs)]


def grid(shared: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start a grid of two arms, which are trained at the same time."""
    (path := shared / "grid.yaml").write_text(json.dumps({
        "name": "grid", "seeds": [1], "arms": {"a": {}, "b": {"set": {"optim.lr": 0.02}}}, "base": ["base.json"]
    }))  # fmt: skip
    fields = [part.removeprefix("--").partition("=") for part in (*BASE, *DIAL) if part != "--quiet"]
    (shared / "base.json").write_text(json.dumps({name: json.loads(_quoted(value)) for name, _, value in fields}))
    return subprocess.Popen([sys.executable, "-m", "mmqk.ablate", "--config", path, "--jobs=2", f"--out={out}"],
                            stdout=subprocess.DEVNULL)  # fmt: skip


def _quoted(value: str) -> str:
    return value if re.match(r"[\d{]|true|false", value) else json.dumps(value)


def case(number: int, rng: random.Random, shared: Path, work: Path) -> str:
    kind = KINDS[number % len(KINDS)]
    kills = rng.choice((1, 1, 2, 3))
    if kind == "grid":
        return grid_case(rng, shared, work)
    out, killed = work / "run", 0
    for _ in range(kills):
        if kind not in STRATEGIES and rng.random() < 0.6:
            *site, last = rng.choice(json.loads((shared / f"{kind}.sites").read_text()))
            disk = Killer(out, site=(site[0], site[1]), nth=rng.randint(0, last))
            killed += train(kind, shared, out, disk)
        else:
            # The time from the start of `kill_after` to the end of the run (see `train`).
            start = "data.json" if kind in STRATEGIES else "run.lock"
            ended, started = ((shared / kind / name).stat().st_mtime for name in ("status.json", start))
            longest = ended - started
            killed += train(kind, shared, out, kill_after=rng.uniform(0, longest))
        age_events(out)
    assert not train(kind, shared, out)
    compare(shared / kind, out)
    return f"{kind}, killed {killed} times"


def grid_case(rng: random.Random, shared: Path, work: Path) -> str:
    """Kill the main process of a grid. Its runs end by themselves, and a second call trains the remaining steps."""
    out = work / "grid"
    pool = grid(shared, out)
    while not any(out.glob("*/*/metrics.jsonl")) and pool.poll() is None:
        time.sleep(0.05)
    time.sleep(rng.uniform(0, 1.5))
    pool.kill()
    killed = pool.wait() == -signal.SIGKILL
    while any(is_locked(path.parent) for path in out.glob("*/*/run.lock")):
        time.sleep(0.05)
    age_events(out)
    assert grid(shared, out).wait() == 0
    for status in sorted(out.glob("*/*/status.json")):
        compare(shared / "grid" / status.parent.relative_to(out), status.parent)
    assert len(list(out.glob("*/*/status.json"))) == 2
    return f"grid, killed {int(killed)} times"


def age_events(out: Path) -> None:
    """Give event files earlier times in their names. TensorBoard orders the files by this time, in seconds; a test
    resumes within a second, unlike a user."""
    for i, path in enumerate(sorted(out.rglob("events.out.tfevents.*"), key=os.path.getmtime)):
        if not re.search(r"tfevents\.1000000\d{3}\.", path.name):
            path.rename(path.with_name(re.sub(r"tfevents\.\d+", f"tfevents.{1000000000 + i}", path.name)))


def compare(whole: Path, again: Path, tensorboard: bool = True) -> None:
    """Compare status, metrics, alarms, last checkpoint and TensorBoard's points, bit for bit."""
    assert json.loads((again / "status.json").read_text())["status"] == "completed"
    for i, (ours, theirs) in enumerate(zip(series(again), series(whole), strict=True)):
        assert ours == theirs, f"line {i} of metrics.jsonl differs"
    assert read_alarms(again) == read_alarms(whole)
    mine, reference = (torch.load(folder / LAST, weights_only=True) for folder in (again, whole))
    for part in ("global_step", "loops", "state_dict", "optimizer_states", "lr_schedulers"):
        assert equal(mine[part], reference[part]), f"{part} of the last checkpoint differs"
    if not tensorboard:
        return
    ours_, theirs_ = scalars(again), scalars(whole)
    different = {key: (ours_.get(key), theirs_[key]) for key in theirs_ if ours_.get(key) != theirs_[key]}
    assert not different and ours_.keys() == theirs_.keys(), f"TensorBoard differs: {different}"


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for run in {path.parent for path in folder.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(run), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            if tag not in ("tokens_per_s", "alarms"):  # a resume at the last step adds no point to the tag `alarms`
                key = f"{run.relative_to(folder)}/{tag}"
                found[key] = [(event.step, event.value) for event in events.Scalars(tag)]
    return found
