"""Tests with two processes on a CPU: a probe covers both ranks and does not change the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmqk.monitors import attach
from mmqk.store import read_metrics
from tests.monitors.attach.nets import L, Net, batches

ROOT = Path(__file__).parents[3]
# The fully_shard of torch 2.6 uses stream events, which do not exist on a CPU.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 needs a GPU"),
]


def two_processes(way: str, out: Path) -> str:
    """Run train_foreign.py in two processes and return the output of both."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
         str(Path(__file__).with_name("train_foreign.py")), way, str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=1800,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
             "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def test_two_ranks_are_probed_as_one(tmp_path):
    printed = two_processes("plain", tmp_path)
    assert printed.count("mmqk: ") == 1 and f"attention measured in {L} of {L} layers" in printed
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [10, 20, 40]
    weights = json.loads((tmp_path / "weights.json").read_text())
    assert weights["on"] == weights["off"] != weights["at 10"]

    # One process measures the sequences of both ranks at step 10. The sequences of the first rank are all text.
    net = Net()
    shapes = {name: x.shape for name, x in net.state_dict().items()}
    net.load_state_dict({n: torch.tensor(x).view(shapes[n]) for n, x in weights["at 10"].items()})
    first, second = (batches(50, B=2, seed=rank)[9] for rank in (0, 1))
    ids = torch.cat([first % 10, second])
    alone = attach(net, modality={"image": range(10, 40)}).probe(ids=ids).flat()
    together = {k: v for k, v in lines[0].items() if k not in ("step", "attn_layers_seen", "attn_layers_hidden")}
    assert together == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in alone.items()}
    assert together["probe_sequences"] == 4
    # Control: the sequences of one rank alone give other numbers.
    one = attach(net, modality={"image": range(10, 40)}).probe(ids=second).flat()
    assert together["attn_logit_mean/text/layer02"] != pytest.approx(one["attn_logit_mean/text/layer02"], rel=1e-4)


def test_a_probe_that_fails_on_one_rank_is_skipped_on_both(tmp_path):
    printed = two_processes("failing", tmp_path)
    assert printed.count("mmqk: no probe at step") == 2
    assert "no probe at step 4, training goes on: the probe's forward of Net" in printed
    assert "no probe at step 6, training goes on: 'no modality'" in printed
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [2, 8]
    weights = json.loads((tmp_path / "weights.json").read_text())
    assert weights["on"] == weights["off"]
