"""A run with missing numbers is named on the page, and no verdict uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmqk.analysis import judge, load_study
from mmqk.analysis.runs.load import load_runs
from mmqk.report.run_table import run_rows
from tests.analysis.fake_runs import Planted, write_demo, write_run


def keep(path: Path, steps) -> None:
    """Keep only the lines of these steps."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] in steps))


LACKS = "metrics.jsonl lacks 22 steps (90 to 111)"


def test_no_verdict_rests_on_a_run_that_lacks_steps(tmp_path):
    folder = write_demo(tmp_path / "demo")
    before = {v.claim.id: v for v in judge(load_study(folder))}
    assert before["C2"].verdict == "reproduced"  # the control: no steps are missing
    keep(folder / "mixed-0000000000/seed1/metrics.jsonl", {*range(90), *range(112, 201)})
    study = load_study(folder)
    after = {v.claim.id: v for v in judge(study)}
    assert after["C2"].verdict == "inconclusive"
    assert after["C2"].open == f"Without a value: “mixed, no QK-Norm” seed 1 ({LACKS})."
    assert after["C2"].open in after["C2"].as_record()["note"]
    rows = {row["name"]: row["remarks"] for row in run_rows(study, {})}
    assert rows["mixed-0000000000/seed1"] == f"{LACKS[0].upper()}{LACKS[1:]}."
    assert all("lacks" not in remark for name, remark in rows.items() if name != "mixed-0000000000/seed1")


def test_the_mark_of_a_resume_counts_too(tmp_path):
    """metrics.jsonl alone does not show that values were changed; a resume has recorded it in status.json."""
    folder = write_demo(tmp_path / "demo")
    path = folder / "mixed-qk-0000000001/seed2/status.json"
    reason = "metrics.jsonl was changed after it was written"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lost": reason}))
    found = {v.claim.id: v for v in judge(load_study(folder))}
    assert found["C2"].verdict == "inconclusive" and reason in found["C2"].open


def test_a_control_with_such_a_run_does_not_pass(tmp_path):
    folder = write_demo(tmp_path / "demo")

    def control():
        (found,) = (
            c for v in judge(load_study(folder)) for c in v.controls if c.name == "positive control P1"
        )
        return found

    assert control().passed  # no steps are missing yet
    keep(folder / "high-pre-0000000003/seed0/metrics.jsonl", range(100))
    assert not control().passed and "lacks 41 steps (100 to 140)" in control().detail


def test_what_is_shown_and_not_decided_says_it(tmp_path):
    folder = write_demo(tmp_path / "demo")
    keep(folder / "high-post-0000000005/seed0/metrics.jsonl", range(100))
    notes = {v.claim.id: v.notes for v in judge(load_study(folder))}
    assert any("lacks 101 steps (100 to 200)" in note for note in notes["C13"])
    assert not any("lacks" in note for note in notes["C2"])


def test_counts_leave_it_out(tmp_path):
    def change(grid):
        grid["claims"][0] |= {"test": "count", "at_least": 40.0, "min_effect": 0.05}

    folder = write_demo(tmp_path / "demo", seeds=tuple(range(6)), change=change)
    assert judge(load_study(folder))[0].verdict == "reproduced"
    keep(folder / "mixed-0000000000/seed1/metrics.jsonl", {0, *range(2, 201)})
    found = judge(load_study(folder))[0]
    assert found.verdict == "inconclusive" and "seed 1 (metrics.jsonl lacks 1 step (1))" in found.open


ALARM = {"name": "spike", "step": 40, "tag": "loss", "value": 9.0, "threshold": 8.0, "sentence": "it rose"}


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("nothing", ()),
        ("emptied", ("metrics.jsonl lacks 201 steps (0 to 200)",)),
        ("a line", ("metrics.jsonl lacks 1 step (5)",)),
        ("one more", ("a line of metrics.jsonl cannot be read",)),
        ("an alarm", ("alarms.jsonl lacks 1 alarm",)),
        ("huge", ("metrics.jsonl lacks 1 step (5)",)),
        ("deep", ("a line of metrics.jsonl cannot be read",)),
    ],
)
def test_what_the_report_sees_by_itself(tmp_path, harm, says):
    path = write_run(tmp_path / "x", Planted(50.0))
    metrics, alarms = path / "metrics.jsonl", path / "alarms.jsonl"
    metrics.write_text(metrics.read_text().replace('{"step": 40,', '{"step": 40, "alarm/spike": 1,'))
    alarms.write_text(json.dumps(ALARM) + "\n")
    content = metrics.read_text()
    if harm == "emptied":
        metrics.write_text("")
        alarms.unlink()
    elif harm == "an alarm":
        alarms.write_text(json.dumps(ALARM)[:40])
    else:
        changed = {"a line": content.replace('{"step": 5,', '{"step: 5,'), "one more": content + '{"step": 4',
                   "huge": content.replace('{"step": 5,', f'{{"step": {"5" * 400},'),
                   "deep": content + "[" * 100_000 + "\n"}  # fmt: skip
        metrics.write_text(changed.get(harm, content))
    (run,) = load_runs(tmp_path)
    assert run.lost == says and run.notes == says


def test_a_diverged_run_and_a_fork_are_whole(tmp_path):
    """The steps after a divergence and before a fork do not count as missing."""
    path = write_run(tmp_path / "a" / "x", Planted(50.0, diverges=120))
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 128, "val_loss/text": 5.0}\n')
    assert load_runs(tmp_path / "a")[0].lost == ()
    path = write_run(tmp_path / "b" / "x", Planted(50.0))
    keep(path / "metrics.jsonl", range(80, 201))
    assert load_runs(tmp_path / "b")[0].lost == ("metrics.jsonl lacks 80 steps (0 to 79)",)
    record = json.loads((path / "run.json").read_text())
    record["identity"]["fork"] = {"parent": "0123456789", "step": 80, "skip_batches": 0, "noise": 0.0, "seed": 0}
    (path / "run.json").write_text(json.dumps(record))
    assert load_runs(tmp_path / "b")[0].lost == ()
