"""What a change does to a failing run, on made-up losses."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from mmqk.bench.kinds import what_fails_first
from mmqk.bench.traces import outcomes, outcomes_table
from mmqk.lab.grid import load_grid
from mmqk.store import Status, UserError

GRIDS = ("bench", "rescue", "zoo")
STEPS = np.arange(1, 601)
HEALTHY = np.full(600, 3.0)


def fails(step: int) -> np.ndarray:
    return np.where(step > STEPS, 3.0, 5.0)


def run(arm: str, loss: np.ndarray, status: str = "completed"):
    series = {"loss/text": (STEPS, loss)}
    return SimpleNamespace(
        name=f"{arm}/seed1", arm=arm, seed=1, parent=None, tags=series, history=series.get, planned_steps=600,
        status=SimpleNamespace(status=status, step=600, finished=Status(status).finished),
    )  # fmt: skip


def test_outcomes_and_costs():
    runs = [
        run("healthy", HEALTHY),
        run("none-rate", fails(200)),
        run("none-scale", HEALTHY),
        run("qk_norm-rate", HEALTHY + 0.2),
        run("qk_norm-scale", HEALTHY),
        run("my-clip-rate-100", fails(300)),
        run("my-clip-rate-150", fails(230)),
    ]
    table = outcomes(runs).set_index(["change", "failure", "at"])
    assert table["outcome"].to_dict() == {
        ("none", "rate", 0): "lost", ("none", "scale", 0): "", ("qk_norm", "rate", 0): "saved",
        ("qk_norm", "scale", 0): "", ("my-clip", "rate", 100): "delayed", ("my-clip", "rate", 150): "lost",
    }  # fmt: skip
    assert table.loc[("qk_norm", "rate", 0), "cost"] == pytest.approx(0.2)
    assert table.loc[("none", "rate", 0), "cost"] == pytest.approx(2.0)
    text = outcomes_table(outcomes(runs))
    assert "| change | rate | rate @100 | rate @150 | scale |" in text
    assert "| my-clip |  | 1 delayed +2.00 | lost +2.00 |  |" in text


def test_a_change_without_its_failing_run_is_refused():
    with pytest.raises(UserError, match=r"qk_norm-rate/seed1 has no finished run"):
        outcomes([run("healthy", HEALTHY), run("qk_norm-rate", HEALTHY)])


def test_what_fails_first():
    """A loss that rises at step 300: the sign of the data, the divergence alarm, and the failure, in this order."""
    rises = HEALTHY + np.where(STEPS < 300, 0.0, 2.0) + 0.01 * np.sin(STEPS)
    runs = [run("healthy", HEALTHY), run("none-corrupted", rises), run("none-fine", HEALTHY)]
    for one in runs:
        one.warmup_steps, one.setting = 50, {}.get
    (found,) = [row for row in what_fails_first(runs).splitlines() if "corrupted" in row]
    assert re.fullmatch(r"\| corrupted \| 1 \| data @30\d \| loss/text \| rise @3\d\d \| 32\d \|", found)
    assert "| fine | 1 | none |  | none |  |" in what_fails_first(runs)


def test_every_arm_of_the_bench_has_a_label_and_every_failure_its_run():
    labels = yaml.safe_load(Path("configs/failures/bench/labels.yaml").read_text())
    arms = {grid: {job.arm for job in load_grid(f"configs/failures/{grid}.yaml").jobs} for grid in GRIDS}
    assert arms["bench"] == labels["faults"].keys() | labels["healthy"].keys()
    for grid in ("rescue", "zoo"):
        failures = {name.removeprefix("none-") for name in arms[grid] if name.startswith("none-")}
        changed = arms[grid] - {"healthy"}
        assert failures and all(any(f"-{failure}" in name for failure in failures) for name in changed)
