"""A cluster on this machine: one node of SLURM, from Debian's packages slurm-wlm and munge. ``make cluster-test``."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.training.gates import wait_for
from tests.training.runs import series

BASE = """\
trainer: {max_steps: 60}
model: {d_model: 32, n_heads: 2, n_layers: 2}
data: {batch_size: 4, seq_len: 64, val_sequences: 8, mix: {dial: 1}, dial: {tokens: {text: 16, image: 16}}}
checkpoint: {every_n_steps: 10}
monitor: {every_n_steps: 20}
"""
GRID = """\
name: toy
title: A toy grid
base: base.yaml
seeds: [1, 2]
arms:
  plain: {}
  qk: {set: {model.qk_norm.kind: rms}}
  late: {fork: {arm: plain, step: 30}, set: {optim.lr: 0.001}}
claims:
  - id: toy
    statement: a toy
    metric: final_loss/text
    treatment: plain
    control: qk
    min_effect: 0.1
    direction: greater
    would_contradict: less
"""
CONF = """\
ClusterName=test
SlurmctldHost={host}
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=10
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} CPUs=2 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes={host} State=UP PriorityTier=10 PreemptMode=off
"""


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """An empty folder with a grid, which is the working directory."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "grid.yaml").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "grid.yaml"


def ablate(*args: str, **variables: str) -> subprocess.Popen[str]:
    """Start ``mmqk ablate grid.yaml`` in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "mmqk.ablate", "grid.yaml", *args]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def metrics(out: str) -> dict[str, list[dict[str, object]]]:
    """Return the lines of metrics.jsonl of each run, without the wall-clock values."""
    return {"/".join(path.parts[-2:]): series(path) for path in sorted(Path(out).glob("*-*/seed*"))}


@pytest.fixture(scope="session")
def slurm():
    """SLURM with one node; its variables in the environment."""
    if not all(map(shutil.which, ("munged", "slurmctld", "slurmd"))):
        pytest.skip("SLURM is not installed: apt-get install slurm-wlm munge")
    folder = Path(tempfile.mkdtemp(prefix="mmqk-slurm-"))
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=socket.gethostname().partition(".")[0], folder=folder))
    files = [f"--{name}={folder}/munge.{end}" for name, end in (
        ("key-file", "key"), ("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"),
    )]  # fmt: skip
    subprocess.run(["munged", "--force", *files], check=True)
    os.environ["SLURM_CONF"] = str(conf)
    for program in ("slurmctld", "slurmd"):
        subprocess.run([program], check=True)
    wait_for(lambda: "idle" in subprocess.run(["sinfo", "-h"], capture_output=True, text=True).stdout)
    yield
    subprocess.run(["scancel", "--user=root"], check=False)
    for pid in ("slurmd.pid", "slurmctld.pid", "munge.pid"):
        subprocess.run(["kill", (folder / pid).read_text().strip()], check=False)
    del os.environ["SLURM_CONF"]
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def local(grid):
    """The metrics of the grid, trained on this machine."""
    process = ablate("--out", "runs/local", "--jobs", "2")
    assert process.wait() == 0
    return metrics("runs/local")


def trains(out: str, step: int = 10):
    """Return the folder of a run that has a checkpoint of at least this step and has not ended."""
    for folder in Path(out).glob("*-*/seed*"):
        status = folder / "status.json"
        if list(folder.glob(f"checkpoints/step*{step}.ckpt")) and '"running"' in status.read_text():
            return folder
    return None
