import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmqk.lab.runner.executors import Local
from mmqk.lab.runner.pool import Pool, Task, TaskOutcome, standing
from mmqk.store import RunFolder, identity_hash, is_locked, read_json, read_status


def identity_of(act, seed):
    import fake_train

    return fake_train.identity_of(act, seed)


def make_task(out, act, seed=0, arm=None):
    identity = identity_of(act, seed)
    folder = out / (arm or act) / f"seed{seed}"
    return Task(arm or act, seed, ("--act", act, "--seed", str(seed)), folder, identity_hash(identity), 4)


def make_pool(tasks, jobs=2, **more):
    return Pool(tasks, jobs, Local("fake_train:main", ("fake_train",)), **more)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def until(condition, what, process=None):
    """Wait until a condition is true; the time limit only prevents a hang."""
    for _ in range(90_000):  # half an hour
        if condition():
            return
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)
    pytest.fail(f"never came: {what}")


def test_every_run_ends_as_it_does_and_none_stops_the_rest(fake, tmp_path):
    acts = ["raise", "sigkill", "refuse", "diverge", "finish"]
    tasks = [make_task(tmp_path, act) for act in acts]
    seen = []
    outcomes = make_pool(tasks, tick=lambda pool: seen.append(len(pool.running))).run()
    by_act = {task.arm: outcome for task, outcome in outcomes.items()}
    assert {act: outcome.status for act, outcome in by_act.items()} == {
        "raise": "failed",
        "sigkill": "failed",
        "refuse": "failed",
        "diverge": "diverged",
        "finish": "completed",
    }
    assert by_act["sigkill"].reason == "killed by SIGKILL (possibly out of memory)"
    assert by_act["raise"].reason == "exit code 1: RuntimeError: the arm is broken"
    assert by_act["refuse"].reason == "exit code 2: the shard is missing: build it"
    assert (by_act["finish"].step, by_act["finish"].loss) == (4, 4.0)
    assert by_act["sigkill"].step == 2
    assert max(seen) <= 2

    for act in ("raise", "sigkill"):
        status = read_status(tmp_path / act / "seed0")
        assert (status.status, status.step) == ("failed", 2)
        assert status.reason == by_act[act].reason
    log = (tmp_path / "finish/seed0/train.log").read_text()
    assert f"'--out', '{tmp_path}/finish/seed0', '--quiet'" in log
    assert "from a subprocess" in log
    assert "Traceback" in (tmp_path / "raise/seed0/train.log").read_text()
    assert "Traceback" not in (tmp_path / "refuse/seed0/train.log").read_text()


def test_a_second_call_trains_what_is_left_and_nothing_else(fake, tmp_path):
    tasks = [make_task(tmp_path, act) for act in ("finish", "diverge", "sigkill")]
    make_pool(tasks).run()
    before = {p: p.read_bytes() for act in ("finish", "diverge") for p in (tmp_path / act).rglob("*.*")}
    log = tmp_path / "sigkill/seed0/train.log"
    assert log.read_text().count("argv") == 1
    # `fake_train` is killed only if it trains step 2. The second call resumes the run after step 2.
    (tmp_path / "sigkill/seed0/status.json").write_text('{"status": "running", "step": 2}')
    outcomes = make_pool(tasks).run()
    assert [outcome.status for outcome in outcomes.values()] == ["completed", "diverged", "completed"]
    assert log.read_text().count("argv") == 2
    assert {p: p.read_bytes() for p in before} == before


def test_the_reason_of_an_earlier_session_is_not_taken_for_this_one(fake, tmp_path):
    task = make_task(tmp_path, "refuse")
    with RunFolder.open(task.folder, identity_of("refuse", 0), {}) as run:
        run.set_status("failed", 1, "an old reason")
    (outcome,) = make_pool([task]).run().values()
    assert outcome.reason == "exit code 2: the shard is missing: build it"
    assert read_status(task.folder).reason == outcome.reason


def test_a_folder_of_another_run_counts_as_nothing_and_is_left_alone(fake, tmp_path):
    task = make_task(tmp_path, "finish")
    with RunFolder.open(task.folder, identity_of("finish", 7), {}) as run:
        run.set_status("completed", 4)
    assert standing(task) == TaskOutcome("waiting")
    (outcome,) = make_pool([task]).run().values()
    assert outcome.status == "failed" and "seed (7 in the folder, 0 now)" in outcome.reason
    assert read_status(task.folder).status == "completed"


def test_a_folder_that_cannot_be_written_fails_that_run_only(fake, tmp_path):
    (tmp_path / "file").write_text("")
    tasks = [make_task(tmp_path / "file", "raise"), make_task(tmp_path, "finish")]
    blocked, fine = make_pool(tasks).run().values()
    assert blocked.status == "failed" and "cannot be written" in blocked.reason
    assert fine.status == "completed"


DRIVER = """
import json, os, sys
from pathlib import Path
from fake_train import identity_of
from mmqk.lab.runner.executors import Local
from mmqk.lab.runner.pool import Pool, Task
from mmqk.store import identity_hash

def tick(pool):
    pids = {task.arm: run.process.pid for task, (run, _) in pool.running.items()}
    Path(out, "pids.tmp").write_text(json.dumps(pids))
    os.replace(Path(out, "pids.tmp"), Path(out, "pids"))
    if any(task.arm == last and o.status == "interrupted" for task, o in pool.outcomes.items()):
        pool._deadline = 0.0  # the grace is over

if __name__ == "__main__":
    out, acts, last = sys.argv[1], sys.argv[2].split(","), sys.argv[3]
    tasks = []
    for act in acts:
        args, id = ("--act", act, "--seed", "0"), identity_hash(identity_of(act, 0))
        tasks.append(Task(act, 0, args, Path(out, act, "seed0"), id))
    pool = Pool(tasks, 2, Local("fake_train:main", ("fake_train",)), tick=tick, grace=3600.0)
    outcomes = pool.run()
    print(json.dumps({task.arm: [o.status, o.reason] for task, o in outcomes.items()}))
    sys.exit(128 + pool.signal_received if pool.signal_received else 0)
"""


@pytest.fixture
def drive(fake, tmp_path):
    """Return a function that starts a pool with hanging runs in its own process group, as a terminal does."""
    (tmp_path / "driver.py").write_text(DRIVER)
    started = []

    def drive(acts, last=""):
        """Start runs with these acts. Once the run ``last`` was interrupted, the grace of the others is over."""
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "driver.py"), str(tmp_path), ",".join(acts), last],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        first = acts[:2]

        def hanging(act):
            status = read_status(tmp_path / act / "seed0")
            return status is not None and status.step == 2

        until(lambda: all(hanging(act) for act in first), "runs that hang at step 2", process)
        until(lambda: set(read_json(tmp_path / "pids") or {}) == set(first), "their process ids", process)
        return process, read_json(tmp_path / "pids")

    yield drive
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(("number", "whole_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_lets_the_runs_end_in_order_and_a_second_call_goes_on(drive, tmp_path, number, whole_group):
    process, pids = drive(["hang"])
    # Ctrl-C in a terminal and a SIGTERM to the group also reach the server that forks the runs.
    (os.killpg if whole_group else os.kill)(process.pid, number)
    out, err = process.communicate()
    assert json.loads(out) == {"hang": ["interrupted", "SIGINT"]}
    assert process.returncode == 128 + number and err == ""
    assert not any(alive(pid) for pid in pids.values())
    assert read_status(tmp_path / "hang/seed0").status == "interrupted"
    (tmp_path / "hang/let-go").touch()
    task = make_task(tmp_path, "hang")
    (outcome,) = make_pool([task]).run().values()
    assert (outcome.status, outcome.step) == ("completed", 4)


def test_runs_that_do_not_obey_are_ended_and_those_not_begun_stay_so(drive, tmp_path):
    process, pids = drive(["deaf", "hang", "finish"], last="hang")
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate()
    outcomes = json.loads(out)
    assert outcomes["hang"] == ["interrupted", "SIGINT"]
    assert outcomes["deaf"] == ["interrupted", "the run was stopped before it wrote its status"]
    assert outcomes["finish"] == ["waiting", ""]
    assert read_status(tmp_path / "deaf/seed0").status == "interrupted"
    assert not any(alive(pid) for pid in pids.values())
    assert not (tmp_path / "finish").exists()
    assert err == ""


def test_a_second_signal_ends_the_runs_at_once(drive, tmp_path):
    process, pids = drive(["deaf"])
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert not any(alive(pid) for pid in pids.values())


def test_runs_end_in_order_when_the_pool_itself_is_killed(drive, tmp_path):
    process, pids = drive(["hang"])
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not any(alive(pid) for pid in pids.values()), "the end of the runs")
    assert read_status(tmp_path / "hang/seed0").status == "interrupted"
    assert not is_locked(tmp_path / "hang/seed0")
    # The server had imported the training code before it forked the run.
    assert "preloaded True" in (tmp_path / "hang/seed0/train.log").read_text()
