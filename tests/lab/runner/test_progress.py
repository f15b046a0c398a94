import io
from pathlib import Path

import pytest

from mmqk.lab.runner.pool import Pool
from mmqk.lab.runner.state import Task, TaskOutcome, standing
from mmqk.lab.runner.table import PoolProgress, outcome_table
from mmqk.store import MetricsWriter, write_json


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
