"""A run that nothing interrupts, trained once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmqk.train import main
from tests.training.runs import WHOLE


@pytest.fixture(scope="session")
def whole(tiny_args, tmp_path_factory) -> Path:
    """Return the folder of a finished run of 12 steps with dropout and three checkpoints. Tests do not change it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*tiny_args, *WHOLE, f"--out={out}"]) == 0
    return out
