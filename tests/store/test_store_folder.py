"""Run folders: the identity of a run, its lock and its status."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from mmqk.store import (
    RunFolder,
    UserError,
    canonical,
    differing_fields,
    identity_hash,
    is_locked,
    mark_ended,
    read_status,
)

# The identity of a run --------------------------------------------------------------------------------------


RECORD = {"model": {"d_model": 64, "qk_norm": {"kind": "rms"}}, "optim": {"lr": 0.01}, "blocks": [3, 4]}


def test_the_hash_is_the_sha256_of_sorted_json_and_ignores_key_order():
    text = '{"blocks":[3,4],"model":{"d_model":64,"qk_norm":{"kind":"rms"}},"optim":{"lr":0.01}}'
    assert identity_hash(RECORD) == hashlib.sha256(text.encode()).hexdigest()[:10]
    assert identity_hash(dict(reversed(RECORD.items()))) == identity_hash(RECORD)
    assert identity_hash({**RECORD, "blocks": (3, 4)}) == identity_hash(RECORD)


def test_any_changed_field_changes_the_hash_and_is_named():
    other = {"model": {"d_model": 64, "qk_norm": {"kind": "none"}}, "optim": {}, "blocks": [3, 4], "seed": 0}
    assert identity_hash(other) != identity_hash(RECORD)
    assert differing_fields(RECORD, other) == ["model.qk_norm.kind", "optim", "optim.lr", "seed"]
    assert differing_fields(RECORD, dict(RECORD)) == []


def test_differing_fields_and_the_hash_agree_on_what_is_the_same():
    for a, b in [(1, 1.0), (1, True), (None, "None"), ([], {})]:
        assert differing_fields({"x": a}, {"x": b}) == ["x"]
        assert identity_hash({"x": a}) != identity_hash({"x": b})
    assert differing_fields({"x": (1, 2)}, {"x": [1, 2]}) == []


def test_a_value_that_is_not_plain_finite_data_is_refused():
    with pytest.raises(ValueError):
        canonical({"lr": float("nan")})
    with pytest.raises(TypeError):
        canonical({"path": Path("x")})


# Lock and status --------------------------------------------------------------------------------------------


IDENTITY = {"model": {"d_model": 64}, "optim": {"lr": 0.01}, "seed": 0}


def snapshot(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def open_run(path, identity=IDENTITY, code="c0de"):
    with patch("mmqk.store.folder.code_version", return_value=code):
        return RunFolder.open(path, identity, {"command": "test"})


def start(code, *args):
    """Start another process, and wait until it prints "go"."""
    text = "import sys, time\nfrom mmqk.store import *\n" + code
    child = subprocess.Popen([sys.executable, "-c", text, *map(str, args)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"go\n"
    return child


def kill(child):
    os.kill(child.pid, signal.SIGKILL)
    child.wait()


HOLD = f"""
run = RunFolder.open(sys.argv[1], {IDENTITY!r}, {{}})
run.set_status("running", 7)
print("go", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("running", "resume"),
        ("interrupted", "resume"),
        ("failed", "resume"),
        ("completed", "finished"),
        ("diverged", "finished"),
    ],
)
def test_what_the_same_command_finds(tmp_path, status, state):
    with open_run(tmp_path / "r", code="a") as run:
        run.set_status(status, 12, "because")
    with open_run(tmp_path / "r", code="a") as again:
        assert again.state == state
        assert (again.status().step, again.status().reason) == (12, "because")


def test_seconds_of_training_add_up_over_resumes_without_the_time_before_it(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("mmqk.store.folder.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def seconds(run, status, after):
        clock[0] += after
        run.set_status(status, 1)
        return run.status().seconds

    with open_run(tmp_path / "r") as run:
        assert seconds(run, "running", 50) == 0
        run.begin_training()
        assert seconds(run, "interrupted", 7) == 7
    with open_run(tmp_path / "r") as run:
        assert seconds(run, "failed", 50) == 7
    with open_run(tmp_path / "r") as run:
        clock[0] += 50
        run.begin_training()
        assert seconds(run, "completed", 3) == 10


def test_another_identity_is_refused_by_field_and_nothing_is_touched(tmp_path):
    with open_run(tmp_path / "r") as run:
        run.set_status("completed", 3)
    before = snapshot(tmp_path)
    other = {"model": {"d_model": 128}, "optim": {"lr": 0.01, "eps": 1e-8}, "seed": 0}
    with pytest.raises(UserError, match=r"model\.d_model \(64 in the folder, 128 now\)") as refusal:
        open_run(tmp_path / "r", other)
    assert "optim.eps (absent in the folder, 1e-08 now)" in str(refusal.value)
    assert "optim.lr" not in str(refusal.value) and "seed" not in str(refusal.value)
    assert snapshot(tmp_path) == before
    assert not is_locked(tmp_path / "r")


def test_a_folder_of_other_files_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"has other files \(thesis\.tex\)"):
        open_run(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("here")
    for path in (tmp_path / "file", tmp_path / "file" / "run", "/proc/mmqk-test-run"):
        with pytest.raises(UserError, match=r"cannot be written \(.+\): give another --out"):
            open_run(path)
    assert (tmp_path / "file").read_text() == "here"


def test_a_full_disk_is_one_sentence_and_gives_the_lock_back(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mmqk.store.folder.write_json", full)
        with pytest.raises(UserError, match="No space left"):
            open_run(tmp_path / "r")
    open_run(tmp_path / "r").close()


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
    child = start(HOLD, tmp_path / "r")
    try:
        before = snapshot(tmp_path)
        with pytest.raises(UserError, match="a process is already training in"):
            open_run(tmp_path / "r")
        assert is_locked(tmp_path / "r")
        assert not mark_ended(tmp_path / "r", "failed", 9, "not mine to say")
        assert snapshot(tmp_path) == before
    finally:
        kill(child)
    assert not is_locked(tmp_path / "r")
    with open_run(tmp_path / "r") as run:
        assert run.state == "resume" and run.status().step == 7


def test_the_same_process_is_refused_too_and_keeps_its_lock(tmp_path):
    run = open_run(tmp_path / "r")
    with pytest.raises(UserError, match="a process is already training in"):
        open_run(tmp_path / "r")
    assert is_locked(tmp_path / "r")
    code = "import sys, pathlib, mmqk.store as s; sys.exit(s.is_locked(pathlib.Path(sys.argv[1])))"
    ask = [sys.executable, "-c", code, str(run.path)]
    assert subprocess.run(ask).returncode == 1
    run.close()
    assert subprocess.run(ask).returncode == 0
    open_run(tmp_path / "r").close()


ORPHAN = f"""
import os
run = RunFolder.open(sys.argv[1], {IDENTITY!r}, {{}})
read, write = os.pipe()
worker = os.fork()
if worker == 0:
    run.close()
    os.write(write, b"x")
    time.sleep(60)
os.read(read, 1)
print("go", flush=True)
print(worker, flush=True)
time.sleep(60)
"""


def test_an_orphaned_worker_does_not_keep_the_lock(tmp_path):
    child = start(ORPHAN, tmp_path / "r")
    worker = int(child.stdout.readline())
    try:
        # The worker has closed its copy of the lock file, and the run still holds the lock.
        assert is_locked(tmp_path / "r")
        kill(child)
        os.kill(worker, 0)
        assert not is_locked(tmp_path / "r")
        open_run(tmp_path / "r").close()
    finally:
        os.kill(worker, signal.SIGKILL)


BEFORE_RUN_JSON = f"""
import mmqk.store.folder as folder
def stop(path, record):
    print("go", flush=True)
    time.sleep(60)
folder.write_json = stop
RunFolder.open(sys.argv[1], {IDENTITY!r}, {{}})
"""
HALF_WRITTEN = f"""
import os
def stop(a, b):
    print("go", flush=True)
    time.sleep(60)
run = None
if len(sys.argv) > 2:
    run = RunFolder.open(sys.argv[1], {IDENTITY!r}, {{}})
os.replace = stop
if run is None:
    RunFolder.open(sys.argv[1], {IDENTITY!r}, {{}})
else:
    run.set_status("completed", 99)
"""


@pytest.mark.parametrize(
    ("code", "args", "state"),
    [
        (BEFORE_RUN_JSON, (), "new"),
        (HALF_WRITTEN, (), "new"),
        (HALF_WRITTEN, ("status",), "resume"),
        (HOLD, (), "resume"),
    ],
)
def test_a_kill_at_any_point_leaves_a_folder_that_the_next_call_takes(tmp_path, code, args, state):
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "train.log").write_text("the shell opened this before the run began\n")
    kill(start(code, folder, *args))
    with open_run(folder) as run:
        assert run.state == state
        assert run.status().status == "running"
        names = {p.name for p in folder.iterdir()}
    assert names <= {"train.log", "run.lock", "run.json", "status.json"}


def test_a_dead_process_is_recorded_as_failed_and_its_own_word_stands(tmp_path):
    kill(start(HOLD, tmp_path / "r"))
    assert mark_ended(tmp_path / "r", "failed", 8, "killed by SIGKILL")
    status = read_status(tmp_path / "r")
    assert (status.status, status.step, status.reason) == ("failed", 8, "killed by SIGKILL")
    for own in ("completed", "diverged", "interrupted", "failed"):
        with open_run(tmp_path / "r") as run:
            run.set_status(own, 5, "own word")
        assert not mark_ended(tmp_path / "r", "failed", 8, "killed by SIGKILL")
        assert read_status(tmp_path / "r").reason == "own word"


def test_a_process_that_died_before_it_began_can_begin_again(tmp_path):
    (tmp_path / "r").mkdir()
    assert mark_ended(tmp_path / "r", "failed", 0, "killed by SIGKILL")
    with open_run(tmp_path / "r") as run:
        assert run.state == "new" and run.status().status == "running"
