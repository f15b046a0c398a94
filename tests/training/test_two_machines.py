"""One run on two machines: two agents of torchrun with one process each, which meet by a rendezvous."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmqk.store import is_locked, read_status
from tests.training.gates import SECONDS, wait_for
from tests.training.ranks import free_port

pytestmark = pytest.mark.slow

STEP = ['--data.mix={"dial": 1}', "--data.seq_len=96", "--data.batch_size=8", "--model.qk_norm.kind=rms",
        "--monitor.every_n_steps=1"]  # fmt: skip
LONG = ["--trainer.max_steps=300", "--checkpoint.every_n_steps=20", "--monitor.every_n_steps=0",
        "--data.val_every_n_steps=0"]  # fmt: skip


def start(args: list[str], log: Path, strategy: str) -> list[subprocess.Popen]:
    port, agents = free_port(), []
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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_rank_ends_the_run_and_the_next_start_goes_on(tiny_args, tmp_path, strategy):
    args, out = [*tiny_args, *STEP, *LONG, f"--out={tmp_path / 'run'}"], tmp_path / "run"
    agents = start(args, tmp_path / "log", strategy)
    wait_for(lambda: list(out.glob("checkpoints/*.ckpt")))
    children = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    codes = [agent.wait(SECONDS) for agent in agents]
    assert 0 not in codes and not is_locked(out)
    (said,) = re.findall("^mmqk.*another process.*$", (tmp_path / "log0").read_text(), re.MULTILINE)
    assert "same command" in said
    step = max(int(re.findall(r"\d+", path.name)[0]) for path in out.glob("checkpoints/*.ckpt"))
    assert read_status(out).status == "failed"
    again = start(args, tmp_path / "again", strategy)
    assert [agent.wait(SECONDS) for agent in again] == [0, 0], (tmp_path / "again0").read_text()
    assert f"resuming from step {step}" in (tmp_path / "again0").read_text()
    assert read_status(out).status == "completed" and read_status(out).step == 300
