"""`mmqk.ablate` with real training: a parent, its forks, and the replays of a diverged run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmqk.config import resolve
from mmqk.lab.grid.grid import load_grid
from mmqk.lab.runner.plan import plan
from mmqk.lab.runner.resolver import Resolver
from mmqk.store import read_json, read_metrics

ROOT = Path(__file__).parents[2]
SMALL = """
model: {d_model: 16, n_layers: 2, n_heads: 2}
data: {batch_size: 4, val_sequences: 8}
monitor: {every_n_steps: 5, probe_sequences: 4}
trainer: {max_steps: 10}
"""
GRID = f"""
name: real
base: [{ROOT}/configs/dial.yaml, small.yaml]
seeds: [1]
replay: {{depths: [0.2], replays: 1}}
arms:
  plain: {{set: {{model.qk_norm.kind: none}}}}
  same: {{fork: {{arm: plain, step: 5}}}}
  late: {{fork: {{arm: plain, step: 5}}, set: {{model.qk_norm.kind: rms}}}}
"""


COMMAND = """
import sys
from multiprocessing import forkserver
from mmqk import ablate
assert ablate.main(sys.argv[1:]) == 0
server = forkserver._forkserver._forkserver_pid
print(*(line for line in open(f"/proc/{server}/status") if line.startswith("Threads")))
"""


@pytest.fixture
def grid(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "real.yaml").write_text(GRID)
    return tmp_path / "real.yaml"


def test_forks_of_a_real_run_are_known_before_it_and_made_after_it(grid, tmp_path):
    """Check against a known answer: the losses of a fork without a change equal those of its parent, bit for bit."""
    arguments = ["--config", str(grid), "--out", str(tmp_path / "out"), "--jobs", "1"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Threads:\t1\n" in done.stdout, "the server that forks the runs must have a single thread"
    runs = {run["arm"]: run for run in json.loads((tmp_path / "out/ablation.json").read_text())["runs"]}
    losses = {}
    for arm, run in runs.items():
        folder = tmp_path / "out" / run["folder"]
        assert read_json(folder / "run.json")["id"] == run["id"]
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
        losses[arm] = {line["step"]: line["loss"] for line in lines if line["step"] > 5}
    assert list(losses["plain"]) == [6, 7, 8, 9, 10]
    assert losses["same"] == losses["plain"] != losses["late"]


def test_replays_are_runs_that_the_parser_knows(grid, tmp_path):
    """The parser accepts every field of the replays that are planned after a run and its control replay have
    diverged."""
    out, resolver = tmp_path / "out", Resolver(1)

    def says(task, checkpoint=None):
        task.folder.mkdir(parents=True)
        (task.folder / "run.json").write_text(json.dumps({"id": task.id}))
        (task.folder / "status.json").write_text(json.dumps({"status": "diverged", "step": 8}))
        if checkpoint:
            (task.folder / "checkpoints").mkdir()
            (task.folder / f"checkpoints/step{checkpoint:08d}.ckpt").write_text("")

    def tasks():
        return {task.arm: task for task in plan(load_grid(grid), out, resolver).tasks}

    says(tasks()["plain"], checkpoint=5)
    control = tasks()["plain-replay-control"]
    assert control.args[0] == "--fork" and control.args[1].endswith("step00000005.ckpt")
    assert "--checkpoint.at=[6]" in control.args
    says(control, checkpoint=6)
    replays = {arm: task for arm, task in tasks().items() if arm.startswith("plain-replay-d")}
    assert sorted(replays) == [f"plain-replay-d0.2-{n}-1" for n in ("bf16-fused", "bf16-math", "fp32")]
    plain = resolve(
        ["--config", f"{ROOT}/configs/dial.yaml", "--config", str(tmp_path / "small.yaml"), "--seed=1"]
    )
    for task in replays.values():
        assert task.max_steps == 6 + 3 * 2 and task.args[0] == "--fork" and "step00000006" in task.args[1]
    assert len({task.id for task in replays.values()} | {control.id, plain.id}) == 5
