"""What a change does to a failing run, on made-up losses."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mmqk.bench.outcomes import markdown, outcomes
from mmqk.store import Status, UserError

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
    text = markdown(outcomes(runs))
    assert "| change | rate | rate @100 | rate @150 | scale |" in text
    assert "| my-clip |  | 1 delayed +2.00 | lost +2.00 |  |" in text


def test_a_change_without_its_failing_run_is_refused():
    with pytest.raises(UserError, match=r"qk_norm-rate/seed1 has no finished run"):
        outcomes([run("healthy", HEALTHY), run("qk_norm-rate", HEALTHY)])
