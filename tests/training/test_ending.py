"""A run ends in order on a signal at any time, and child processes end when their parent dies."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from mmqk.store import is_locked, read_status
from mmqk.train import main
from mmqk.training.ranks import _end_with
from tests.training.gates import SECONDS, gone, pause, process, start, wait_for
from tests.training.runs import WHOLE, same_run

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to check which processes run")

SLOW = pytest.mark.slow  # what another case shows too


def goes_on(args: list[str], out: Path, whole: Path) -> None:
    """Resume with the same command, and check that the result equals the run without a signal."""
    assert main([*args, f"--out={out}"]) == 0
    assert same_run(out, whole)


@pytest.mark.parametrize(
    ("place", "signum", "reached"),
    [("data", signal.SIGINT, 0), ("step", signal.SIGTERM, 7),
     pytest.param("step", signal.SIGINT, 1, marks=SLOW), pytest.param("step", signal.SIGUSR1, 6, marks=SLOW)],
)  # fmt: skip
def test_a_signal_ends_the_run_at_once_before_training_and_later_at_the_next_step(
    tiny_args, tmp_path, whole, place, signum, reached
):
    out, args = tmp_path / "run", [*tiny_args, *WHOLE]
    run = start([*args, f"--out={out}"], tmp_path, place, step=max(0, reached - 1))
    wait_for((tmp_path / "at").exists)
    os.kill(run.pid, signum)
    if place == "step":
        (tmp_path / "go").touch()
    run.join(SECONDS)
    assert run.exitcode == 128 + signum
    said = (tmp_path / "log").read_text().splitlines()
    assert [line for line in said if "interrupted at" in line and "continues" in line] == [
        f"interrupted at step {reached}; the same command continues from there."
    ]
    assert "Traceback" not in "".join(said)
    status = read_status(out)
    assert (status.status, status.step) == ("interrupted", reached)
    assert signal.Signals(signum).name in status.reason
    if reached:
        assert sorted((out / "checkpoints").iterdir())[-1].name == f"step{reached:08d}.ckpt"
    assert not is_locked(out)
    if signum == signal.SIGTERM:
        goes_on(args, out, whole)


@pytest.mark.parametrize("place", ["step", pytest.param("data", marks=SLOW)])
def test_sigterm_before_training_or_a_second_one_ends_the_run_without_a_checkpoint(tiny_args, tmp_path, whole, place):
    out, args = tmp_path / "run", [*tiny_args, *WHOLE]
    run = start([*args, f"--out={out}"], tmp_path, place, step=6)
    wait_for((tmp_path / "at").exists)
    # The operating system merges two pending signals into one, so send signals until the process ends.
    until = time.monotonic() + SECONDS
    while run.is_alive() and time.monotonic() < until:
        os.kill(run.pid, signal.SIGTERM)
        run.join(0.3)
    assert run.exitcode == -signal.SIGTERM and not is_locked(out)
    if place == "step":
        assert sorted((out / "checkpoints").iterdir())[-1].name == "step00000004.ckpt"
    goes_on(args, out, whole)


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_loader_workers_outlive_a_sigterm_but_not_their_run(tiny_args, tmp_path):
    for signum, target in ((signal.SIGTERM, "all"), (signal.SIGKILL, "worker"), (signal.SIGKILL, "run")):
        folder = tmp_path / f"{signum} {target}"
        out, _ = folder / "run", folder.mkdir()
        run = start([*tiny_args, "--data.workers=2", f"--out={out}"], folder, "step", step=6)
        wait_for((folder / "at").exists)
        (server,) = children(run.pid)
        workers = children(server)
        assert len(workers) == 2
        for pid in {"all": [*workers, run.pid], "worker": workers[:1], "run": [run.pid]}[target]:
            os.kill(pid, signum)
        time.sleep(0.5)
        assert target != "all" or not any(map(gone, workers))
        (folder / "go").touch()
        run.join(SECONDS)
        assert run.exitcode == {"all": 128 + signum, "worker": 2, "run": -signum}[target]
        assert "Traceback" not in (folder / "log").read_text()
        wait_for(lambda pids=workers: all(map(gone, pids)))
        if target == "all":
            assert (out / "checkpoints/step00000007.ckpt").exists()
        elif target == "worker":
            assert "loader worker" in read_status(out).reason


def _with_child(folder: Path, follows: bool) -> None:
    """Start a child process that pauses, and wait."""
    parent = os.getpid()
    if os.fork() == 0:
        _end_with(str(parent) if follows else None)
        pause(folder)
        os._exit(0)
    time.sleep(SECONDS)


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_rank_ends_with_its_parent(tmp_path, follows):
    parent = process(_with_child, tmp_path, follows)
    wait_for((tmp_path / "at").exists)
    child = int((tmp_path / "at").read_text())
    parent.kill()
    parent.join(SECONDS)
    try:
        if follows:
            wait_for(lambda: gone(child))
        else:  # the control
            time.sleep(1.0)
            assert not gone(child)
    finally:
        (tmp_path / "go").touch()


def test_a_parent_that_is_gone_already_is_not_waited_for():
    rank = process(_end_with, "1")
    rank.join(SECONDS)
    assert rank.exitcode == 128 + signal.SIGKILL
