"""The simulated crash of `file_layer` loses exactly what is not synced, and `judge` detects a command that ends
wrongly."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mmqk.store import write_atomic
from tests.soak.file_layer import AFTER, Lying, in_child, judge, status_of
from tests.soak.kills import equal

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc for names of open files")


def in_place(path: Path, content: str) -> None:
    path.write_text(content)


def without_sync(path: Path, content: str) -> None:
    (path.parent / "new").write_text(content)
    os.replace(path.parent / "new", path)


def states(write: Callable[[Path, str], None], tmp_path: Path) -> set[str | None]:
    """Call ``write`` on a file, followed by a crash, 40 times; return the different contents of the file."""
    found: set[str | None] = set()
    for seed in range(40):
        root = tmp_path / str(seed)
        root.mkdir()
        (root / "file").write_text("old")

        def crash(root: Path = root, seed: int = seed) -> None:
            with Lying(root, "crash", ("mkdir", "crash"), 0, random.Random(seed)).mounted():
                write(root / "file", "the new content")
                os.mkdir(root / "crash")

        assert in_child(crash) == -signal.SIGKILL
        path = Path(f"{root}{AFTER}") / "file"
        found.add(path.read_text() if path.exists() else None)
        shutil.rmtree(root)
    return found


def test_a_crash_loses_what_is_not_synced_and_nothing_else(tmp_path):
    assert states(write_atomic, tmp_path) == {"the new content"}


@pytest.mark.parametrize("write", [in_place, without_sync])
def test_a_write_that_is_not_durable_is_seen(write, tmp_path):
    assert len(states(write, tmp_path)) > 2


def test_a_bad_end_is_known(tmp_path):
    good = "mmqk: metrics.jsonl cannot be read or written (No space left on device): fix that.\n"
    judge(1, "full disk", good, "report", tmp_path, None)
    judge(-signal.SIGKILL, "crash", "", "report", tmp_path, None)
    for code, told in ((1, "Traceback (most recent call last)"), (1, ""), (1, good * 2), (99, good), (0, "Traceback")):
        with pytest.raises(AssertionError):
            judge(code, "full disk", told, "report", tmp_path, None)
    with pytest.raises(AssertionError):
        judge(-signal.SIGKILL, "full disk", good, "report", tmp_path, None)
    assert equal({"a": [1, (2.0,)]}, {"a": [1, (2.0,)]}) and not equal({"a": [1, (2.0,)]}, {"a": [1, (2.5,)]})


def test_the_status_after_an_error_is_failed_completed_or_that_of_the_earlier_call(tmp_path):
    good = "mmqk: metrics.jsonl cannot be read or written (Input/output error): fix that.\n"
    for name in ("metrics.jsonl", "run.json"):
        (tmp_path / name).write_text("{}")

    def passes(before, **record) -> bool:
        (tmp_path / "status.json").write_text(json.dumps(record))
        try:
            judge(1, "input/output error", good, "run", tmp_path, before)
        except AssertionError:
            return False
        return True

    assert passes(None, status="failed", step=3) and passes(None, status="completed", step=8)
    assert not passes(None, status="completed", step=3) and not passes(None, status="running", step=3)
    assert passes(status_of(tmp_path), status="running", step=3)
    assert not passes(b"{}", status="running", step=3)
