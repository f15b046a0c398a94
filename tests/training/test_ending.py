"""A run ends in order on a signal at any time, and child processes end when their parent dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmqk.store import is_locked, read_status
from mmqk.train import main
from tests.training.gates import SECONDS, gone, start, wait_for
from tests.training.test_resume import series, state

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GATED = """
import runpy, sys
from pathlib import Path
from tests.training.gates import stop_at_import
stop_at_import("torch", Path(sys.argv.pop(1)))
runpy.run_module("mmqk.train", run_name="__main__", alter_sys=True)
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="needs /proc to check which processes run"
)


@pytest.fixture(scope="module")
def whole(tiny_args, tmp_path_factory) -> Path:
    """Train a run that gets no signal, and return its folder."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*tiny_args, "--checkpoint.keep=9", f"--out={out}"]) == 0
    return out


def goes_on(args: list[str], out: Path, whole: Path) -> None:
    """Resume with the same command, and check that the result equals the run without a signal."""
    assert main([*args, f"--out={out}"]) == 0
    assert series(out) == series(whole)
    ours, theirs = state(out), state(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_before_torch_is_imported_ends_the_run_in_order(tiny_args, tmp_path, signum):
    out = tmp_path / "run"
    args = [sys.executable, "-c", GATED, str(tmp_path), *tiny_args, f"--out={out}"]
    with subprocess.Popen(args, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (tmp_path / "at").exists() or process.poll() is not None)
        process.send_signal(signum)
        said = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 128 + signum
    assert said == "interrupted before the run started; the same command starts it.\n"
    assert not out.exists()


@pytest.mark.parametrize(
    ("place", "signum", "reached"),
    [("data", signal.SIGUSR1, 0), ("step", signal.SIGINT, 1), ("step", signal.SIGTERM, 7)],
)
def test_a_signal_ends_the_run_at_once_before_training_and_later_at_the_next_step(
    tiny_args, tmp_path, whole, place, signum, reached
):
    out, args = tmp_path / "run", [*tiny_args, "--checkpoint.keep=9"]
    process = start([*args, f"--out={out}"], tmp_path, place, step=max(0, reached - 1))
    wait_for((tmp_path / "at").exists)
    os.kill(process.pid, signum)
    if place == "step":
        (tmp_path / "go").touch()
    process.join(SECONDS)
    assert process.exitcode == 128 + signum
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
    goes_on(args, out, whole)


def test_a_second_signal_ends_the_run_without_a_checkpoint(tiny_args, tmp_path, whole):
    out, args = tmp_path / "run", [*tiny_args, "--checkpoint.keep=9"]
    process = start([*args, f"--out={out}"], tmp_path, "step", step=6)
    wait_for((tmp_path / "at").exists)
    # The operating system merges two pending signals into one, so send signals until the process ends.
    until = time.monotonic() + SECONDS
    while process.is_alive() and time.monotonic() < until:
        os.kill(process.pid, signal.SIGTERM)
        process.join(0.3)
    assert process.exitcode == 128 + signal.SIGTERM
    assert (read_status(out).status, read_status(out).step) == ("interrupted", 4)
    assert sorted((out / "checkpoints").iterdir())[-1].name == "step00000004.ckpt"
    goes_on(args, out, whole)


@pytest.mark.slow
def test_a_rank_that_is_just_starting_does_not_outlive_its_parent(tiny_args, tmp_path, monkeypatch):
    """The first process waits for the second, which has not imported torch yet."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        "from tests.training.gates import stop_at_import\n"
        "if os.environ.get('LOCAL_RANK') == '1':\n"
        f"    stop_at_import('torch', pathlib.Path({str(tmp_path)!r}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    out = tmp_path / "run"
    args = [sys.executable, "-m", "mmqk.train", *tiny_args, "--trainer.devices=2", f"--out={out}"]
    with subprocess.Popen(args, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (tmp_path / "at").exists() or process.poll() is not None)
        rank = int((tmp_path / "at").read_text())
        try:
            assert not gone(rank)
            process.kill()
            process.wait(SECONDS)
            wait_for(lambda: gone(rank))
        finally:
            if not gone(rank):
                os.kill(rank, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not is_locked(out)


FOLLOWER = """
import pathlib, sys, time
from mmqk.signals import ENDING
ENDING.install()
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
PARENT_OF = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", *sys.argv[2:]], env={**os.environ, sys.argv[1]: str(os.getpid())})
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_rank_ends_with_its_parent(tmp_path, follows):
    name = "MMQK_PARENT" if follows else "NOTHING"
    args = [sys.executable, "-c", PARENT_OF, name, FOLLOWER, str(tmp_path / "there")]
    with subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        wait_for((tmp_path / "there").exists)
        parent.kill()
        parent.wait()
        try:
            if follows:
                wait_for(lambda: gone(child))
            else:
                time.sleep(2.0)
                assert not gone(child)
        finally:
            if not gone(child):
                os.kill(child, signal.SIGKILL)


def test_a_parent_that_is_gone_already_is_not_waited_for(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FOLLOWER, str(tmp_path / "there")],
        cwd=ROOT, env={**os.environ, "MMQK_PARENT": "1"}, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGKILL and not (tmp_path / "there").exists()


def test_the_signals_of_a_forked_worker_are_its_own():
    script = """
import os, signal, sys, time
from mmqk.signals import ENDING, Interrupted
ENDING.install()
reader, writer = os.pipe()
worker = os.fork()
if not worker:
    os.write(writer, b"x")
    time.sleep(600)
os.read(reader, 1)
os.kill(worker, signal.SIGINT)  # the worker ignores it, since its parent handles it
os.kill(worker, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
try:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(600)
except Interrupted as stop:
    sys.exit(128 + stop.signum)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=SECONDS)
    assert done.returncode == 128 + signal.SIGUSR1, done.stderr
