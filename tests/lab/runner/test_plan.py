"""Plans in which runs depend on other runs: selected learning rates, forks, and grids that share runs."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from mmqk.lab.grid import load_grids
from mmqk.lab.runner.plan import Resolver, plan
from mmqk.store import read_json, read_status

HEAD = "name: toy\nbase: base.yaml\n"


def record_of(out):
    record = json.loads((out / "ablation.json").read_text())
    return record, {(run["arm"], run["seed"]): run for run in record["runs"]}


def log_of(out, run):
    return (out / run["folder"] / "train.log").read_text()


def identity_of(out, run):
    return read_json(out / run["folder"] / "run.json")["identity"]


BEST = (
    HEAD + "seeds: [1, 2]\nlr: {rule: own_best, grid: [0.01, 0.05, 0.2], seeds: [5], metric: final_loss/text}\n"
    "arms:\n  plain: {}\n  wild: {set: {act: diverge}}\n  late: {fork: {arm: plain, step: 2}, set: {size: 2}}\n"
)


def test_each_arm_is_judged_at_the_learning_rate_that_was_best_on_other_seeds(world, tmp_path, capsys):
    """The loss of `fake_train` is |lr - 0.03| + seed, so 0.01 and 0.05 tie, and the smaller one is selected."""
    out = tmp_path / "runs/toy"
    assert world("--dry-run", grid=BEST) == 0
    said = capsys.readouterr().out
    assert "plain seed 1 waiting: waits for 3 of the 3 runs that select its learning rate" in said
    assert "late seed 1 waiting: waits for plain seed 1" in said and not out.exists()
    assert world("--jobs", "2", grid=BEST.replace("0.05", "0.04")) == 0
    record, runs = record_of(out)
    assert len(runs) == 3 * 2 + 2 * 3
    for (arm, seed), run in runs.items():
        assert run["role"] == ("selection" if seed == 5 else "verdict"), arm
        best = 0.01 if arm == "wild" else 0.04  # if every learning rate diverges, the smallest is chosen
        assert identity_of(out, run).get("optim.lr", 0.1) == (run["point"].get("optim.lr") or best)
    assert runs["plain-lr0.2", 5]["point"] == {"optim.lr": 0.2} and runs["plain", 1]["point"] == {}
    [plain, _] = record["lr"]
    assert (plain["arm"], plain["lr"]) == ("plain", 0.04)
    assert plain["values"] == {"0.01": pytest.approx(5.02), "0.04": pytest.approx(5.01), "0.2": pytest.approx(5.17)}
    # The control: no run is both a selection run and a verdict run.
    assert not {r["folder"] for r in runs.values() if r["role"] == "selection"} & {
        r["folder"] for r in runs.values() if r["role"] == "verdict"
    }
    capsys.readouterr()
    assert world(grid=BEST.replace("0.05", "0.04")) == 0
    assert "0 to train" in capsys.readouterr().out


def test_the_end_of_the_learning_rates_is_reported_and_ties_go_to_the_smaller(world, tmp_path, capsys):
    assert world(grid=BEST) == 0
    assert record_of(tmp_path / "runs/toy")[0]["lr"][0]["lr"] == 0.01
    assert "plain: its best learning rate, 0.01, is the smallest of the grid" in capsys.readouterr().out


def test_what_cannot_be_planned_while_runs_go_on_ends_none_of_them(world, tmp_path, capsys, monkeypatch):
    from mmqk.lab.runner import session
    from mmqk.store import UserError

    real, calls = session.write_record, []

    def broken(*args):
        calls.append(args)
        if len(calls) == 2:
            raise UserError("the disk is full")
        return real(*args)

    monkeypatch.setattr(session, "write_record", broken)
    assert world("--jobs", "1", grid=HEAD + "seeds: [1, 2, 3]\narms: {plain: {}}\n") == 2
    captured = capsys.readouterr()
    assert "the disk is full" in captured.err and captured.out.count("completed") == 3


FORKS = (
    HEAD + "seeds: [1]\narms:\n"
    "  late: {fork: {arm: plain, step: 3}, set: {size: 2}}\n"
    "  later: {fork: {arm: late, step: 4}, set: {trainer.max_steps: 6, fork_noise: 1.0e-6}}\n"
    "  plain: {set: {size: 1}}\n"
)


def test_forks_begin_when_their_parents_are_there(world, tmp_path, capsys):
    out = tmp_path / "runs/toy"
    assert world(grid=FORKS) == 0
    _, runs = record_of(out)
    plain, late, later = (runs[arm, 1] for arm in ("plain", "late", "later"))
    assert plain["fork"] is None
    assert late["fork"] == {"parent": plain["folder"], "step": 3}
    assert later["fork"] == {"parent": late["folder"], "step": 4}
    assert "--checkpoint.at=[3]" in log_of(out, plain) and "--checkpoint.at=[4]" in log_of(out, late)
    assert f"'--fork', 'runs/toy/{plain['folder']}/checkpoints/step00000003.ckpt'" in log_of(out, late)
    fork = identity_of(out, later)["fork"]
    assert (fork["parent"], fork["step"], fork["noise"]) == (late["id"], 4, 1e-6)
    for run in (plain, late, later):
        assert read_json(out / run["folder"] / "run.json")["id"] == run["id"], "the id was known before the run"
    assert [line["step"] for line in map(json.loads, (out / later["folder"] / "metrics.jsonl").open())] == [5, 6]
    capsys.readouterr()
    assert world(grid=FORKS) == 0
    assert "3 runs in runs/toy, 0 to train" in capsys.readouterr().out


def test_a_parent_that_has_not_kept_the_step_is_made_again_beside_itself(world, tmp_path):
    out = tmp_path / "runs/toy"
    assert world(grid=HEAD + "seeds: [1]\narms: {plain: {set: {size: 1}}}\n") == 0
    before = {p: p.read_bytes() for p in out.rglob("seed1/*.json*")}
    assert len(before) >= 3
    assert world(grid=FORKS) == 0
    assert {p: p.read_bytes() for p in before} == before
    _, runs = record_of(out)
    again = runs["plain-again", 1]
    assert (again["role"], again["id"]) == ("parent", runs["plain", 1]["id"])
    assert again["folder"] == runs["plain", 1]["folder"] + "-again"
    assert read_status(out / runs["late", 1]["folder"]).status == "completed"


def test_a_fork_after_the_end_of_its_parent_is_said_and_stops_nothing(world, tmp_path, capsys):
    grid = FORKS.replace("{size: 1}", "{act: diverge, bad: 2}") + "  other: {set: {size: 5}}\n"
    assert world(grid=grid) == 0
    said = capsys.readouterr().out
    assert "late seed 1 never: plain seed 1 diverged at step 2, before step 3" in said
    assert "other" in said and said.count("completed") == 1
    runs = record_of(tmp_path / "runs/toy")[1]
    assert runs["late", 1]["never"] == "plain seed 1 diverged at step 2, before step 3"
    assert [arm for (arm, _), run in runs.items() if "never" in run] == ["late", "later"]
    assert world("--out", "b", grid=FORKS.replace("step: 3", "step: 9")) == 2
    assert "plain has 4 steps, so it cannot be forked at step 9" in capsys.readouterr().err


def test_a_fork_waits_for_a_parent_that_failed_and_the_exit_code_says_so(world, tmp_path, capsys):
    assert world(grid=FORKS.replace("{size: 1}", "{act: raise}")) == 1
    said = capsys.readouterr().out
    assert "plain seed 1 failed" in said and "late seed 1 waiting: waits for step 3 of plain seed 1" in said


def test_a_fork_of_a_checkpoint_has_the_seed_that_is_in_it(world, tmp_path):
    assert world(grid=FORKS.replace("seeds: [1]", "seeds: [7]")) == 0
    _, runs = record_of(tmp_path / "runs/toy")
    shutil.copy(tmp_path / "runs/toy" / runs["plain", 7]["folder"] / "checkpoints/step00000003.ckpt", tmp_path)
    grid = HEAD + "arms: {goes: {fork: {checkpoint: step00000003.ckpt}, set: {size: 2}}}\n"
    assert world("--out", "b", grid=grid) == 0
    _, others = record_of(tmp_path / "b")
    assert others["goes", 7]["fork"] == {"parent": "step00000003.ckpt", "step": 3}
    assert others["goes", 7]["id"] == runs["late", 7]["id"], "the id does not depend on the grid"


def test_grids_share_the_runs_that_they_have_in_common(world, tmp_path, capsys):
    one = HEAD + "seeds: [1]\narms: {plain: {set: {size: 2}}, odd: {set: {size: 3}}}\n"
    two = HEAD.replace("toy", "two") + "seeds: [1, 2]\narms: {alias: {set: {size: 2}}, more: {set: {size: 4}}}\n"
    assert world("--out", "both", grid=one, two=two) == 0
    record, runs = record_of(tmp_path / "both")
    assert record["name"] == "toy+two"
    assert runs["alias", 1]["folder"] == runs["plain", 1]["folder"]
    assert len({run["folder"] for run in runs.values()}) == 5 and len(runs) == 6
    assert len(list((tmp_path / "both").glob("*/seed*/run.json"))) == 5
    # Existing runs are found again if an arm of the grid is renamed.
    assert world("--out", "alone", grid=one) == 0
    capsys.readouterr()
    renamed = one.replace("plain", "bare")
    assert world("--out", "alone", grid=renamed) == 0
    assert "2 runs in alone, 0 to train" in capsys.readouterr().out


def test_a_plan_depends_on_the_disk_alone(world, tmp_path):
    world("--dry-run", grid=FORKS)
    grid, out = load_grids(["toy.yaml"]), tmp_path / "x"
    first = plan(grid, out, Resolver())
    assert [t.arm for t in first.tasks] == ["plain"] and {t.arm for t in first.waiting} == {"late", "later"}
    assert first == plan(grid, out, Resolver()) and not out.exists()
    assert world("--out", "x", grid=FORKS) == 0
    last = plan(grid, out, Resolver())
    assert {t.arm for t in last.tasks} == {"plain", "late", "later"} and not last.waiting


@pytest.mark.parametrize(("jobs", "early"), [("2", True), ("1", False)])
def test_a_fork_begins_while_its_parent_goes_on_where_there_is_room(world, tmp_path, jobs, early):
    """The parent hangs after step 2 until the fork has ended. With one job the fork cannot start, and a time limit
    ends the wait."""
    grid = HEAD + "seeds: [1]\narms:\n  plain: {set: {act: hang}}\n"
    grid += "  late: {fork: {arm: plain, step: 2}, set: {act: finish}}\n"
    out, first = tmp_path / "runs/toy", []

    def let_go():
        until = time.monotonic() + (1800 if early else 1.5)  # 1800: only prevents a hang
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
