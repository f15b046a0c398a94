"""Messages give the number of missing steps and alarms of a run, and damaged lines are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmqk.store import Alarm, MetricsWriter, append_alarms, mark_ended, read_status
from mmqk.store.folder import RunFolder
from mmqk.store.missing import Written, examine, lost_alarms, lost_steps


@pytest.mark.parametrize(
    ("found", "first", "last", "says"),
    [
        (range(61), 0, 60, ""),
        (range(80), 0, 60, ""),  # later steps do not matter
        ([], 0, 0, ""),
        ([*range(9), *range(31, 61)], 0, 60, "metrics.jsonl lacks 22 steps (9 to 30)"),
        ([0, 1, 3, 4, 5], 0, 5, "metrics.jsonl lacks 1 step (2)"),
        ([], 40, 50, "metrics.jsonl lacks 11 steps (40 to 50)"),
        (range(0, 20, 2), 0, 18, "metrics.jsonl lacks 9 steps (1, 3, 5, 7, 5 more gaps)"),
    ],
)
def test_steps(found, first, last, says):
    assert lost_steps(found, first, last) == says


def test_alarms():
    told = {(10, "spike"): 3, (20, "growth"): 1}
    there = [(10, "spike")] * 3 + [(20, "growth")]
    assert lost_alarms(told, there) == "" == lost_alarms({}, there)
    assert lost_alarms(told, there[1:]) == "alarms.jsonl lacks 1 alarm"
    assert lost_alarms(told, []) == "alarms.jsonl lacks 4 alarms"


def record(folder: Path, written: Written | None = None) -> dict:
    """Write ten steps with two alarms at step 4; return what a checkpoint of step 10 stores about metrics.jsonl and
    alarms.jsonl."""
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step in range(11):
        writer.write(step, {"loss": 5.0 - step / 10} | ({"alarm/spike": 2} if step == 4 else {}))
        if step == 5:
            writer.flush()
            written = Written(folder) if written is None else written
            written.now()  # as an earlier checkpoint does
    writer.close()
    append_alarms(folder, [Alarm("spike", 4, f"loss/{m}", 6.0, 5.0, "it rose") for m in ("text", "image")])
    return written.now()


def replace(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def cut(path: Path, keep: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))


HARMS = {
    "nothing": (lambda m, a: None, [], []),
    "a kill cut a later line": (lambda m, a: m.write_bytes(m.read_bytes() + b'{"step": 11, "lo'), [], []),
    "later steps": (lambda m, a: m.write_bytes(m.read_bytes() + b'{"step": 11, "loss": 1}\n'), [], []),
    "cut": (lambda m, a: cut(m, 6), ["metrics.jsonl lacks 5 steps (6 to 10)"], []),
    "emptied": (lambda m, a: cut(m, 0), ["metrics.jsonl lacks 11 steps (0 to 10)"], []),
    "removed": (lambda m, a: m.unlink(), ["metrics.jsonl lacks 11 steps (0 to 10)"], []),
    "a line damaged": (
        lambda m, a: replace(m, b'{"step":7,', b'{"st\x00p":7,'),
        ["metrics.jsonl lacks 1 step (7)"],
        [b'{"st\x00p":7,"loss":4.3}\n'],
    ),
    "a digit changed": (
        lambda m, a: replace(m, b'"loss":4.3', b'"loss":4.8'),
        ["metrics.jsonl was changed after it was written"],
        [],
    ),
    "a huge step": (
        lambda m, a: replace(m, b'{"step":7,', b'{"step":' + b"7" * 400 + b","),
        ["metrics.jsonl lacks 1 step (7)"],
        [b'{"step":' + b"7" * 400 + b',"loss":4.3}\n'],
    ),
    "nested": (lambda m, a: m.write_bytes(m.read_bytes() + b"[" * 100_000 + b"\n"), [], [b"[" * 100_000 + b"\n"]),
    "alarms cut": (lambda m, a: cut(a, 1), ["alarms.jsonl lacks 1 alarm"], []),
    "alarms removed": (lambda m, a: a.unlink(), ["alarms.jsonl lacks 2 alarms"], []),
    "an alarm changed": (
        lambda m, a: replace(a, b"it rose", b"it fell"),
        ["alarms.jsonl was changed after it was written"],
        [],
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_examine(tmp_path, harm):
    written = record(tmp_path)
    do, says, aside = HARMS[harm]
    do(tmp_path / "metrics.jsonl", tmp_path / "alarms.jsonl")
    for _ in range(2):  # the second call does not store damaged lines again
        assert examine(tmp_path, 0, 10, written) == says
        kept = tmp_path / "metrics.jsonl.damaged"
        assert (kept.read_bytes().splitlines(keepends=True) if kept.exists() else []) == aside
    # A checkpoint of an older version stores no length and sha256, so changed values are not detected.
    assert examine(tmp_path, 0, 10, None) == [s for s in says if "changed" not in s]


def test_a_damaged_alarm_is_kept(tmp_path):
    written = record(tmp_path)
    replace(tmp_path / "alarms.jsonl", b'"name"', b'"nam\xff"')
    assert examine(tmp_path, 0, 10, written) == ["alarms.jsonl lacks 1 alarm"]
    assert (tmp_path / "alarms.jsonl.damaged").read_bytes().startswith(b'{"nam\xff":"spike"')


def test_the_mark_stays(tmp_path):
    with RunFolder.open(tmp_path / "run", {"a": 1}, {}) as folder:
        folder.set_status("running", 5)
        assert "lost" not in json.loads((folder.path / "status.json").read_text())  # the control
        folder.mark_lost(["a", "b"])
        folder.set_status("interrupted", 7)
    with RunFolder.open(tmp_path / "run", {"a": 1}, {}) as folder:
        folder.mark_lost(["b", "c"])
        folder.set_status("running", 9)
    assert mark_ended(tmp_path / "run", "failed", 9, "killed")
    found = read_status(tmp_path / "run")
    assert (found.status, found.step, found.lost) == ("failed", 9, "a; b; c")
