"""Forks in a grid: when they start, when they are refused, and with how many threads they run."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from mmqk.store import read_json, read_status

HEAD = "name: toy\nbase: base.yaml\n"
FORKS = (
    HEAD + "seeds: [1]\narms:\n"
    "  late: {fork: {arm: plain, step: 3}, set: {size: 2}}\n"
    "  later: {fork: {arm: late, step: 4}, set: {trainer.max_steps: 6, fork_noise: 1.0e-6}}\n"
    "  plain: {set: {size: 1}}\n"
)


def record_of(out):
    record = json.loads((out / "ablation.json").read_text())
    return record, {(run["arm"], run["seed"]): run for run in record["runs"]}


def log_of(out, run):
    return (out / run["folder"] / "train.log").read_text()


@pytest.mark.parametrize(("jobs", "early"), [("2", True), ("1", False)])
def test_a_fork_begins_while_its_parent_goes_on_where_there_is_room(world, tmp_path, jobs, early):
    """The parent hangs after step 2 until the fork has ended. With one job the fork cannot start, and a time limit
    ends the wait."""
    grid = HEAD + "seeds: [1]\narms:\n  plain: {set: {act: hang}}\n"
    grid += "  late: {fork: {arm: plain, step: 2}, set: {act: finish}}\n"
    out, first = tmp_path / "runs/toy", []

    def let_go():
        until = time.monotonic() + (20 if early else 1.5)
        while time.monotonic() < until and not list(out.glob("late-*/seed1/status.json")):
            time.sleep(0.05)
        first.extend(out.glob("late-*/seed1/status.json"))
        next(out.glob("plain-*")).joinpath("let-go").touch()

    watch = threading.Thread(target=let_go)
    watch.start()
    assert world("--jobs", jobs, grid=grid) == 0
    watch.join()
    assert bool(first) == early
    assert all(read_status(path).status == "completed" for path in out.glob("*/seed1"))


def test_a_fork_of_a_fork_begins_after_it(world, capsys):
    assert world(grid=FORKS.replace("arm: late, step: 4", "arm: late, step: 3")) == 2
    assert "late is a fork from step 3, so it cannot be forked at step 3" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_checkpoint_that_was_removed_is_said_and_no_run_made_in_vain(world, tmp_path, capsys):
    out = tmp_path / "runs/toy"
    assert world(grid=HEAD + "seeds: [1]\narms: {plain: {set: {size: 1}}}\n") == 0
    assert world(grid=FORKS) == 0
    [again] = out.glob("plain-*/seed1-again")
    for path in (*out.glob("late-*"), again / "checkpoints"):
        shutil.rmtree(path)
    capsys.readouterr()
    assert world(grid=FORKS) == 1
    said = capsys.readouterr()
    assert "late seed 1 never: plain-again seed 1 kept no checkpoint of step 3: remove " in said.out
    assert said.err.count("cannot start") == 1
    shutil.rmtree(again)
    assert world(grid=FORKS) == 0


def test_forks_have_the_threads_of_the_run_that_they_leave(world, tmp_path):
    """The number of threads changes the order of sums, and so their rounding. A run that is trained again must equal
    the first one bit for bit."""
    out = tmp_path / "runs/toy"
    assert world("--jobs", "1", grid=HEAD + "seeds: [1]\narms: {plain: {set: {size: 1}}}\n") == 0
    [path] = out.glob("plain-*/seed1/run.json")
    path.write_text(json.dumps({**read_json(path), "details": {"config": {"threads": 7}}}))
    assert world("--jobs", "1", grid=FORKS + "  other: {set: {size: 9}}\n") == 0
    _, runs = record_of(out)
    for arm, has in (("plain-again", True), ("late", True), ("other", False)):
        assert ("--threads=7" in log_of(out, runs[arm, 1])) == has, arm
