"""One run on two machines: two agents of torchrun with one process each, which meet by a rendezvous."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mmqk.store import is_locked, read_status
from mmqk.train import main
from tests.training.runs import series

pytestmark = pytest.mark.slow

STEP = ['--data.mix={"dial": 1}', "--data.seq_len=96", "--data.batch_size=8", "--model.qk_norm.kind=rms",
        "--monitor.every_n_steps=1"]  # fmt: skip
LONG = ["--trainer.max_steps=300", "--checkpoint.every_n_steps=20", "--monitor.every_n_steps=0",
        "--data.val_every_n_steps=0"]  # fmt: skip


def start(args: list[str], log: Path, strategy: str) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    for node in (0, 1):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run", "-m", "mmqk.train", *args,
            "--trainer.devices=1", "--trainer.num_nodes=2", f"--trainer.strategy={strategy}",
        ]  # fmt: skip
        with open(f"{log}{node}", "w") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            agents.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
    return agents


@pytest.fixture(scope="module")
def runs(tiny_args, tmp_path_factory) -> dict[str, list[dict]]:
    """The metrics of one process, and of two machines under ddp and fsdp."""
    folder = tmp_path_factory.mktemp("machines")
    assert main([*tiny_args, *STEP, f"--out={folder / 'one'}"]) == 0
    for strategy in ("ddp", "fsdp"):
        agents = start([*tiny_args, *STEP, f"--out={folder / strategy}"], folder / f"{strategy}.log", strategy)
        codes = [agent.wait(300) for agent in agents]
        assert codes == [0, 0], (folder / f"{strategy}.log0").read_text()
    return {name: series(folder / name) for name in ("one", "ddp", "fsdp")}


def test_gradient_norms_under_fsdp_are_those_of_ddp(runs):
    """Each rank of FSDP holds half of a gradient: its norm alone is too small by about the square root of 2.
    tests/monitors/attach/test_updates.py compares the parts."""
    norms = {
        name: np.array([line["grad_norm"] for line in lines if "grad_norm" in line]) for name, lines in runs.items()
    }
    assert len(norms["one"]) > 3 and norms["fsdp"] == pytest.approx(norms["ddp"], rel=1e-5)
    assert norms["ddp"] == pytest.approx(norms["one"], rel=1e-4)
    assert norms["fsdp"] / 2**0.5 != pytest.approx(norms["ddp"], rel=1e-5)  # the control


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_rank_ends_the_run_and_the_next_start_goes_on(tiny_args, tmp_path, strategy):
    args, out = [*tiny_args, *STEP, *LONG, f"--out={tmp_path / 'run'}"], tmp_path / "run"
    agents = start(args, tmp_path / "log", strategy)
    until = time.monotonic() + 120
    while not list(out.glob("checkpoints/*.ckpt")) and time.monotonic() < until:
        time.sleep(0.1)
    children = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    codes = [agent.wait(120) for agent in agents]
    assert 0 not in codes and not is_locked(out)
    said = [
        line
        for line in (tmp_path / "log0").read_text().splitlines()
        if "another process" in line and line.startswith("mmqk")
    ]
    assert len(said) == 1 and "same command" in said[0]
    step = max(int(re.findall(r"\d+", path.name)[0]) for path in out.glob("checkpoints/*.ckpt"))
    assert read_status(out).status == "failed"
    again = start(args, tmp_path / "again", strategy)
    assert [agent.wait(300) for agent in again] == [0, 0], (tmp_path / "again0").read_text()
    assert f"resuming from step {step}" in (tmp_path / "again0").read_text()
    assert read_status(out).status == "completed" and read_status(out).step == 300
