"""`mmqk.ablate` with real training: a parent and its forks."""

import json
import subprocess
import sys
from pathlib import Path

from mmqk.store import read_json, read_metrics

ROOT = Path(__file__).parents[3]
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


def test_forks_of_a_real_run_are_known_before_it_and_made_after_it(tmp_path):
    """Check against a known answer: the losses of a fork without a change equal those of its parent, bit for bit."""
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "real.yaml").write_text(GRID)
    arguments = ["--config", str(tmp_path / "real.yaml"), "--out", str(tmp_path / "out"), "--jobs", "1"]
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True)
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
