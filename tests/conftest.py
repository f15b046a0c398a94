"""Fixtures of all tests: a tiny data set and the command line of a tiny run, created once per session."""

from __future__ import annotations

import os
from pathlib import Path

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # workers run in parallel, so each of them and its child processes use one thread
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests import tiny

# The slowest test files. They start first, so that none of them is still running when the other workers are idle.
SLOW = (
    "benchmarks/test_tables.py", "training/test_ranks.py", "test_pairs.py",
    "lab/page/test_page.py", "store/test_store_files.py", "training/test_run.py", "monitors/attach/test_fsdp.py",
    "lab/verdicts/test_null_arms.py", "model/test_transformer.py", "data/test_tokenize.py", "training/test_ending.py",
    "benchmarks/test_harness.py", "training/test_compiled_run.py", "test_config.py", "training/test_disk_errors.py",
    "test_imports.py", "lab/page/test_figures.py", "model/test_compiled.py", "monitors/attach/test_trainers.py",
    "test_add_a_norm.py", "training/test_own_trainer.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {Path(__file__).parent / name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: rank.get(item.path, len(SLOW)))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """Write the data of `tests.tiny` once per session, and return the folder."""
    root = tmp_path_factory.mktemp("tiny")
    tiny.write_tiny_data(root)
    return root


@pytest.fixture(scope="session")
def tiny_args(tiny_data: Path) -> list[str]:
    """Return the command line of a run that trains in a second."""
    return tiny.tiny_args(tiny_data)


@pytest.fixture
def without_figures(monkeypatch):
    """Leave the PNGs of figures empty, because they take most of the time."""
    monkeypatch.setattr("mmqk.lab.page.drawing.Drawing.png", lambda drawing: b"")
