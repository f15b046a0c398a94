import io
import re
from pathlib import Path

import pytest

from mmqk.lab.runner.pool import Pool
from mmqk.lab.runner.state import Task, TaskOutcome, standing
from mmqk.lab.runner.table import PoolProgress, outcome_table
from mmqk.store import MetricsWriter, write_json


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def now(monkeypatch):
    """A replacement for the monotonic clock, in seconds."""
    seconds = [1000.0]
    monkeypatch.setattr("mmqk.progress.time.monotonic", lambda: seconds[0])
    return seconds


def line(progress, pool):
    text, done, total = progress.state(pool, progress.views(pool))
    if done is not None:
        progress.progress.begin(done)
    return progress.progress.line(text, done, total)


def make(tmp_path, states):
    """Return a pool with the runs of ``states``: {arm: (outcome, step of its last metrics or None)}."""
    outcomes, running = {}, {}
    for arm, (outcome, step) in states.items():
        task = Task(arm, 0, (), tmp_path / arm, "id", 100)
        outcomes[task] = outcome
        if outcome.status == "running":
            running[task] = None
            log(task.folder, step)
    pool = Pool(list(outcomes), 2)
    pool.outcomes, pool.running = outcomes, running
    return pool


def log(folder: Path, step):
    folder.mkdir(exist_ok=True)
    if step is not None:
        writer = MetricsWriter(folder / "metrics.jsonl")
        writer.write(step, {"loss": 3.214})
        writer.write(step, {"val_loss/text": 1.0})
        writer.close()


def test_the_line_has_the_run_its_step_and_the_time_left(tmp_path, now):
    pool = make(
        tmp_path,
        {
            "old": (TaskOutcome("completed", 100), None),
            "gone": (TaskOutcome("failed", 30), None),
            "a": (TaskOutcome("running"), 20),
            "b": (TaskOutcome("running"), None),
            "next": (TaskOutcome("waiting"), None),
            "kept": (TaskOutcome("waiting", 40), None),
        },
    )
    progress = PoolProgress(io.StringIO())
    assert line(progress, pool) == "run 3 of 6 · a seed 0 · step 20/100 · loss 3.21 · 2 running"
    now[0] += 10.0
    # In 10 s arm a trains 20 more steps and arm b trains 10. Steps left: a 60, b 90, next 100, kept 60.
    log(tmp_path / "a", 40)
    log(tmp_path / "b", 10)
    assert line(progress, pool).endswith("step 40/100 · loss 3.21 · 2 running · about 1:43 left")
    progress.to_come = lambda: 3
    assert line(progress, pool).startswith("run 3 of 9")
    pool.signal_received = 2
    assert line(progress, pool).endswith("2 running · stopping (press Ctrl-C again to kill the runs)")


def test_a_run_without_metrics_is_starting_and_a_held_folder_is_named(tmp_path, monkeypatch):
    progress = PoolProgress(io.StringIO())
    pool = make(tmp_path, {"a": (TaskOutcome("running"), None)})
    assert line(progress, pool) == "run 1 of 1 · a seed 0 · starting · 1 running"
    pool = make(tmp_path, {"a": (TaskOutcome("waiting"), None), "b": (TaskOutcome("completed", 100), None)})
    assert line(progress, pool) == "about to start a seed 0"
    monkeypatch.setattr("mmqk.lab.runner.table.is_locked", lambda folder: folder == tmp_path / "a")
    assert line(progress, pool) == f"waiting: another process trains a seed 0 in {tmp_path / 'a'}"


def test_a_terminal_shows_the_table_of_the_running_runs_and_redraws_it(tmp_path, monkeypatch, now):
    pool = make(tmp_path, {"a" * 60: (TaskOutcome("running"), 7), "b": (TaskOutcome("running"), 3)})
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    progress = PoolProgress(out)
    for _ in range(5):
        progress(pool)
        progress(pool)
        now[0] += 1.0
    pool.running = {}
    progress(pool)  # no run is active: only a line is printed
    progress.close()
    text = out.getvalue()
    frames = text.split("b seed 0")
    assert len(frames) - 1 == 5  # one frame per second, not one per call
    assert all("\x1b[1A" in frame for frame in frames[1:]), "the cursor moves up to the first line"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    assert "running" in plain and "step" in plain
    assert all(len(line) <= 50 for line in plain.splitlines())
    assert text.rstrip().endswith(("\x1b[2K", "\x1b[?25h")), "the table is removed at the end"


def test_the_table_has_a_row_a_run_and_a_sentence_where_there_is_a_reason(tmp_path):
    task, bad = (Task(arm, 3, (), tmp_path, "id", 100) for arm in ("mixed-qk", "bad"))
    text = outcome_table(
        {
            task: TaskOutcome("completed", 100, seconds=61.4, loss=2.3456),
            bad: TaskOutcome("diverged", 7, "loss became nan", 3.0),
        }
    )
    assert text.splitlines() == [
        "arm       seed  status        step  last loss  seconds",
        "mixed-qk     3  completed  100/100      2.346       61",
        "bad          3  diverged     7/100                   3",
        "bad seed 3 diverged: loss became nan",
    ]


@pytest.mark.parametrize(
    ("text", "loss"), [("3.5", 3.5), ('"inf"', float("inf")), ('"abc"', None), ("[1]", None), ("null", None)]
)
def test_a_loss_that_is_no_number_is_left_out_of_the_table(tmp_path, text, loss):
    write_json(tmp_path / "run.json", {"id": "id", "identity": {}})
    write_json(tmp_path / "status.json", {"status": "completed", "step": 7})
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 7, "loss": {text}}}\n')
    task = Task("a", 0, (), tmp_path, "id", 100)
    assert standing(task) == TaskOutcome("completed", 7, loss=loss)
    assert "7/100" in outcome_table({task: standing(task)}).splitlines()[1]
