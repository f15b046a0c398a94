"""Grids on a cluster: slices, locks, GPUs, time limits, changed code, and estimates of the remaining time."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mmqk.lab.runner.pool as pools
import mmqk.lab.runner.watch as watch
from mmqk import ablate
from mmqk.lab.runner.executors import Local, cores, gpus
from mmqk.lab.runner.pool import Pool, Task, TaskOutcome
from mmqk.lab.runner.session import time_left
from mmqk.store import RunFolder, identity_hash, read_status

HEAD = "name: toy\nbase: base.yaml\n"
GRID = HEAD + "seeds: [0, 1]\narms: {a: {set: {size: 2}}, b: {set: {size: 3}}, c: {set: {size: 4}}}\n"
FORKS = HEAD + "seeds: [0, 1, 2]\narms: {a: {}, late: {fork: {arm: a, step: 2}, set: {size: 2}}}\n"
BEST = (
    HEAD + "seeds: [1, 2]\nlr: {rule: own_best, grid: [0.01, 0.05], seeds: [5, 6], metric: final_loss/text}\n"
    "arms: {plain: {}, b: {set: {size: 2}}}\n"
)


def finished(out):
    """Return the number of times that each run was started, by folder."""
    logs = sorted(Path(out).glob("*/seed*/train.log"))
    return {log.parent.relative_to(out).as_posix(): log.read_text().count("argv") for log in logs}


def test_slices_share_the_runs_out_and_together_make_all(world, tmp_path, capsys):
    seen = []
    for k in (1, 2, 3, 4):
        before = set(finished("runs/toy"))
        assert world("--slice", f"{k}/4", grid=GRID) == 0
        seen.append(len(set(finished("runs/toy")) - before))
    assert seen == [2, 2, 1, 1]
    assert set(finished("runs/toy").values()) == {1} and len(finished("runs/toy")) == 6
    assert "toy: slice 4 of 4, 1 run in runs/toy, 1 to train" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "runs/toy/ablation.json").read_text())["runs"]) == 6


@pytest.mark.parametrize("grid", [FORKS, BEST], ids=["forks", "own best"])
def test_a_slice_alone_makes_what_its_own_runs_need_and_ends(world, tmp_path, grid):
    """A slice also trains the runs on which its own runs depend, because the other slices may never start."""
    assert world("--slice", "2/3", grid=grid) == 0
    here = finished("runs/toy")
    for k in (3, 1):
        assert world("--slice", f"{k}/3", grid=grid) == 0
    assert set(here) < set(finished("runs/toy"))
    assert set(finished("runs/toy").values()) == {1}
    assert len(finished("runs/toy")) == (6 if grid is FORKS else 8 + 4)
    assert world(grid=grid) == 0
    assert set(finished("runs/toy").values()) == {1}


def test_two_processes_on_one_folder_make_every_run_once(fake, world, tmp_path):
    """Two processes start at the same time, and each waits for the runs that the other process trains."""
    (tmp_path / "toy.yaml").write_text(FORKS)
    code = (
        "import sys, fake_train, mmqk, mmqk.config.parse\n"
        "sys.modules['mmqk.config'] = mmqk.config = fake_train\n"
        "from mmqk import ablate\n"
        "ablate.TRAIN, ablate.PRELOAD = 'fake_train:main', ('fake_train',)\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(ablate.main(['--config', 'toy.yaml', '--jobs', '2']))\n"
    )
    (tmp_path / "both.py").write_text(code)
    both = [
        subprocess.Popen([sys.executable, "both.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    runs = json.loads((tmp_path / "runs/toy/ablation.json").read_text())["runs"]
    assert len(runs) == 6
    for run in runs:
        folder = tmp_path / "runs/toy" / run["folder"]
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
        wanted = [3, 4] if run["fork"] else [1, 2, 3, 4]
        assert read_status(folder).status == "completed" and steps == wanted, run
    assert all("failed" not in out for out, _ in said)


def test_a_run_that_another_process_took_first_is_waited_for_and_has_not_failed(fake, tmp_path, monkeypatch):
    """The folder of the run is free when the pool checks it, and locked when the run opens it."""
    import fake_train

    identity = fake_train.identity_of("finish", 0)
    task = Task("finish", 0, ("--act", "finish", "--seed", "0"), tmp_path / "x/seed0", identity_hash(identity), 4)
    held = RunFolder.open(task.folder, identity, {})
    real, asked = pools.is_locked, []
    # At the first check, report the folder as free.
    monkeypatch.setattr(pools, "is_locked", lambda folder: asked.append(folder) or (len(asked) > 1 and real(folder)))
    seen = []

    def tick(pool):
        seen.append(pool.outcomes[task].status)
        if len(asked) > 1 and seen[-1] == "waiting":
            held.set_status("completed", 4)
            held.close()

    (outcome,) = Pool([task], 1, Local("fake_train:main", ("fake_train",)), tick=tick).run().values()
    assert "running" in seen and "failed" not in seen
    assert (task.folder / "train.log").read_text().count("argv") == 1
    assert (outcome.status, outcome.step) == ("completed", 4)


def on_tick(monkeypatch, tick):
    """Call ``tick`` with the pool, between its looks at the runs."""

    class Watching(watch.PoolProgress):
        def __call__(self, pool):
            tick(pool)

    monkeypatch.setattr(watch, "PoolProgress", Watching)


def test_minutes_stop_the_runs_in_order_and_the_next_call_goes_on(world, monkeypatch, capsys):
    grid = GRID.replace("{size: 3}", "{act: hang}")

    def hanging():
        return [read_status(path) for path in Path("runs/toy").glob("b-*/seed*")]

    def tick(pool):
        if sum(status is not None and status.step == 2 for status in hanging()) == 2:
            pool.until = 0.0  # the minutes are over

    on_tick(monkeypatch, tick)
    assert world("--max-minutes", "1000", "--jobs", "3", grid=grid) == 130
    assert "1000 minutes are over: run the same command again to resume" in capsys.readouterr().err
    assert [status.status for status in hanging()] == ["interrupted"] * 2
    on_tick(monkeypatch, lambda pool: None)
    for path in Path("runs/toy").glob("b-*"):
        (path / "let-go").touch()
    assert world("--max-minutes", "1000", grid=grid) == 0
    assert len(finished("runs/toy")) == 6


def test_each_run_sees_one_gpu_by_turns(world, tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "gpus", lambda: ("3", "5"))
    grid = HEAD + "arms: {a: {set: {act: hang, size: 2}}, b: {set: {act: hang, size: 3}}, c: {set: {size: 4}}}\n"
    seen = []

    def tick(pool):
        seen.append(sorted(run.device for run, _ in pool.running.values()))
        if seen[-1] == ["3", "5"]:
            for path in Path("runs/toy").glob("*-*"):
                (path / "let-go").touch()

    on_tick(monkeypatch, tick)
    assert world(grid=grid) == 0  # one run per GPU at the same time
    assert ["3", "5"] in seen and max(map(len, seen)) == 2
    said = [re.findall(r"^device (\S+)$", log.read_text(), re.M) for log in Path("runs").rglob("train.log")]
    assert sorted(said)[0] == ["3"] and sorted(said)[-1] == ["5"] and all(len(s) == 1 for s in said)


def test_gpus_are_those_of_the_scheduler(monkeypatch):
    for given, found in (("2, 0", ("2", "0")), ("", ()), ("-1", ()), ("MIG-1a/2,MIG-3", ("MIG-1a/2", "MIG-3"))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert gpus() == found
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path(f"/dev/nvidia{i}") for i in (10, 0, 2)])
    assert gpus() == ("0", "1", "2")
    assert cores() >= 1


def test_time_left_is_what_a_step_took_in_runs_of_the_same_arm():
    def task(arm, steps=100, seed=0, family=None):
        return Task(arm, seed, (), Path(arm, str(seed)), "id", steps, {"family": family or arm})

    done = {
        task("slow"): TaskOutcome("completed", 100, seconds=400.0),
        task("fast"): TaskOutcome("diverged", 50, seconds=50.0),
        task("fast", seed=1): TaskOutcome("completed", 100, seconds=300.0),  # median of 1 and 3 s per step
    }
    assert time_left(done, 2) == "nothing to train"
    open_runs = {
        task("slow", seed=1): TaskOutcome("waiting"),  # 400 s
        task("fast", seed=2): TaskOutcome("interrupted", 90),  # 20 s
        task("fast-lr1", 60, family="fast"): TaskOutcome("waiting"),  # 120 s
    }
    assert time_left(done | open_runs, 1) == "runs to train: 3, 1 at a time; about 9:00 (minutes:seconds)"
    assert time_left(done | open_runs, 3) == "runs to train: 3, 3 at a time; about 3:00 (minutes:seconds)"
    other = {task("new", 30): TaskOutcome("waiting")}  # the median over all runs is 3 s per step
    assert "about 1:30" in time_left(done | other, 1)
    assert "unknown" in time_left(open_runs, 1)
