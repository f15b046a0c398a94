"""A resume reports lost metrics and alarms, keeps damaged lines in a file, and marks the run in its status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmqk.analysis.runs.load import load_runs
from mmqk.store import read_alarms, read_metrics, read_status
from mmqk.train import main
from tests.training.test_resume import rewind, series


@pytest.fixture(scope="module")
def whole(tiny_args, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    # The learning rate is so high that alarms begin before step 8.
    args = [*tiny_args, "--checkpoint.keep=9", "--optim.lr=3", "--optim.warmup_steps=0", "--monitor.every_n_steps=1"]
    assert main([*args, f"--out={out}"]) in (0, 3)
    assert read_status(out).step >= 9
    return out


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl")]


def lines(path: Path) -> list[str]:
    return path.read_text(errors="surrogateescape").splitlines(keepends=True)


def write(path: Path, content: list[str]) -> None:
    path.write_text("".join(content), errors="surrogateescape")


HARMS = {
    "cut": (lambda found: found[:4], "metrics.jsonl lacks 5 steps (4 to 8)"),
    "emptied": (lambda found: [], "metrics.jsonl lacks 9 steps (0 to 8)"),
    "damaged": (lambda found: [*found[:3], "\0" * 50 + "\n", *found[4:]], "metrics.jsonl lacks 1 step (3)"),
    "changed": (
        lambda found: [*found[:3], found[3].replace('"loss":', '"loss":1'), *found[4:]],
        "metrics.jsonl was changed after it was written",
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_lost_metrics(whole, tmp_path, capsys, harm):
    out = tmp_path / "again"
    args = rewind(whole, out, 8, status="interrupted")
    do, says = HARMS[harm]
    write(out / "metrics.jsonl", do(lines(out / "metrics.jsonl")))
    code = main([*args, f"--out={out}"])
    said = capsys.readouterr().err
    assert f"{out}: {says}. The run continues and is marked" in said and "resuming from step 8" in said
    assert read_status(out).status == read_status(whole).status and code in (0, 3)
    assert read_status(out).lost == says and load_runs(out)[0].lost[0] == says
    if read_status(out).step == 12:  # the mark is in the checkpoints too
        (out / "status.json").unlink()
        assert main([*args, f"--out={out}"]) == 0
        assert read_status(out).lost == says
    kept = out / "metrics.jsonl.damaged"
    assert kept.exists() is (harm == "damaged") and (not kept.exists() or lines(kept) == ["\0" * 50 + "\n"])
    assert series(out)[-2:] == series(whole)[-2:]  # the steps after the resume are unchanged


def test_the_mark_stays_over_resumes_and_a_whole_run_has_none(whole, tmp_path, capsys):
    out = tmp_path / "again"
    args = rewind(whole, out, 8)
    # The control: the resume of an undamaged run.
    assert main([*args, f"--out={out}"]) in (0, 3)
    said = capsys.readouterr().err
    assert "lacks" not in said and "changed" not in said and series(out) == series(whole)
    assert "lost" not in json.loads((out / "status.json").read_text()) and load_runs(out)[0].lost == ()
    marked = "metrics.jsonl was changed after it was written"
    now = {"status": "interrupted", "step": 8, "lost": marked}
    (out / "status.json").write_text(json.dumps(now))
    assert main([*args, f"--out={out}"]) in (0, 3)
    assert read_status(out).status == read_status(whole).status and read_status(out).lost == marked


def test_lost_alarms(whole, tmp_path, capsys):
    out = tmp_path / "again"
    args = rewind(whole, out, 8)
    path = out / "alarms.jsonl"
    early = [alarm for alarm in read_alarms(out) if alarm.step <= 8]
    assert early  # the run has alarms that can be lost
    write(path, ['{"name": \udcff\n', *lines(path)[1:]])
    assert main([*args, f"--out={out}"]) in (0, 3)
    assert "alarms.jsonl lacks 1 alarm. The run continues" in capsys.readouterr().err
    assert read_status(out).lost == "alarms.jsonl lacks 1 alarm" == load_runs(out)[0].lost[0]
    assert (out / "alarms.jsonl.damaged").read_bytes() == b'{"name": \xff\n'


def test_before_the_first_checkpoint_nothing_is_lost(whole, tmp_path, capsys):
    """The resume repeats all steps."""
    out = tmp_path / "again"
    args = rewind(whole, out, 0)
    (out / "metrics.jsonl").write_text('{"step": 3')
    assert main([*args, f"--out={out}"]) in (0, 3)
    assert "lacks" not in capsys.readouterr().err and series(out) == series(whole)
    assert read_status(out).lost == ""
