"""Grids on a real SLURM with one node: the same numbers as on this machine, also after a preemption and a dead node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import ablate, metrics, trains
from tests.training.gates import wait_for

pytest.importorskip("submitit", reason="submitit is not installed: make cluster-test")
pytestmark = pytest.mark.slow
SLURM = ("--executor", "slurm", "--jobs", "2", "--job", "time=10")


def verdicts(out: str) -> list[dict[str, object]]:
    subprocess.run([sys.executable, "-m", "mmqk.report", out, "--out", f"{out}-page"], check=True, capture_output=True)
    return json.loads(Path(f"{out}-page", "verdicts.json").read_text())


def test_a_grid_equals_the_local_one(slurm, local):
    process = ablate("--out", "runs/slurm", *SLURM)
    assert process.wait() == 0, process.stdout.read()
    assert metrics("runs/slurm") == local and len(local) == 6
    assert [v["effect"] for v in verdicts("runs/slurm")] == [v["effect"] for v in verdicts("runs/local")]


@pytest.mark.parametrize("event", ["preempted", "dead node"])
def test_a_run_goes_on_after(event, slurm, local):
    process = ablate("--out", "runs/slurm", *SLURM, "--only", "plain")
    wait_for(lambda: trains("runs/slurm"))
    if event == "preempted":
        subprocess.run(["srun", "--partition=high", "--ntasks=2", "sleep", "1"], check=True)
    else:
        node = subprocess.run(["sinfo", "-h", "-o", "%n"], capture_output=True, text=True).stdout.split()[0]
        for state in (["state=down", "reason=test"], ["state=resume"]):
            subprocess.run(["scontrol", "update", f"nodename={node}", *state], check=True)
    assert process.wait() == 0, process.stdout.read()
    assert metrics("runs/slurm") == {name: lines for name, lines in local.items() if name.startswith("plain")}


def test_an_interrupted_grid_leaves_no_job_and_goes_on(slurm, local):
    process = ablate("--out", "runs/slurm", *SLURM, "--only", "plain")
    wait_for(lambda: trains("runs/slurm"))
    process.send_signal(2)
    assert process.wait() == 130
    wait_for(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout.strip())
    assert ablate("--out", "runs/slurm", *SLURM, "--only", "plain").wait() == 0
    assert metrics("runs/slurm") == {name: lines for name, lines in local.items() if name.startswith("plain")}
