"""Damaged or lost `ablation.json` and run records: nothing is overwritten, and no claim benefits from the damage."""

import json
import shutil
from pathlib import Path

import pytest

from mmqk.lab.runner.plan import Plan
from mmqk.lab.runner.session import write_record
from mmqk.lab.study import load_study
from mmqk.store import UserError
from tests.lab.runner.conftest import GRID as ARMS

CLAIM = "{id: A, statement: more, treatment: good, control: wild, min_effect: 0.5, direction: greater}"
GRID = f"{ARMS}claims: [{CLAIM}]\n"
CHANGED = GRID.replace("0.5", "0.1")
RECORD = Path("runs/toy/ablation.json")


@pytest.mark.parametrize("damage", ["cut", "folder", "registered", "claims"])
def test_a_damaged_registration_is_refused_and_kept(world, capsys, damage):
    assert world(grid=GRID) == 0
    whole = RECORD.read_bytes()
    content = {
        "cut": whole[: len(whole) // 2],
        "registered": whole.replace(b'"registered"', b'"other"'),
        "claims": whole.replace(b'"claims": "', b'"other": "'),
    }.get(damage)
    RECORD.unlink()
    RECORD.mkdir() if content is None else RECORD.write_bytes(content)
    runs = {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*/seed*/*")}
    capsys.readouterr()
    for argv in ((), ("--dry-run",)):
        assert world(*argv, grid=CHANGED) == 2
        error = capsys.readouterr().err
        assert "runs/toy/ablation.json cannot be read (" in error and "registration" in error
        assert error.count("\n") == 1
    assert RECORD.is_dir() if content is None else RECORD.read_bytes() == content
    assert {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*/seed*/*")} == runs
    # The control: with the record restored, the same command continues and finds the registration.
    RECORD.rmdir() if content is None else RECORD.unlink()
    RECORD.write_bytes(whole)
    assert world(grid=CHANGED) == 0
    study = load_study("runs/toy")
    assert study.claims_changed and not study.registration_lost


def test_it_is_not_replaced_where_it_is_damaged_while_runs_train(world, tmp_path):
    """The planner reads `ablation.json` again whenever a run ends."""
    from mmqk.lab.grid import load_grid

    assert world(grid=GRID) == 0
    grid = load_grid("toy.yaml")
    RECORD.write_text("{")
    with pytest.raises(UserError, match=r"ablation\.json cannot be read"):
        write_record(RECORD.parent, grid, Plan, 1)
    assert RECORD.read_text() == "{"


def test_claims_whose_registration_was_lost_are_not_confirmatory(world):
    assert world(grid=GRID) == 0
    # The control: claims that are registered before the first run are confirmatory.
    assert [c.status for c in load_study("runs/toy").claims] == ["confirmatory"]
    assert "lost" not in json.loads(RECORD.read_text())
    RECORD.unlink()
    for grid in (CHANGED, GRID, CHANGED):  # a lost registration stays lost
        assert world(grid=grid) == 0
        assert json.loads(RECORD.read_text())["lost"] is True
        study = load_study("runs/toy")
        assert [c.status for c in study.claims] == ["exploratory"] and study.registration_lost


def test_a_grid_without_claims_has_no_registration_to_lose(world):
    grid = GRID.partition("claims:")[0]
    assert world(grid=grid) == 0
    RECORD.unlink()
    assert world(grid=grid) == 0
    assert "lost" not in json.loads(RECORD.read_text())


@pytest.mark.parametrize("name", ["status.json", "run.json"])
def test_a_damaged_run_does_not_stop_the_others(world, capsys, name):
    assert world(grid=GRID) == 0
    [path] = Path("runs/toy").glob("wild-*/seed0")
    (path / name).write_text('{"status": "comp')
    for other in Path("runs/toy").glob("good-*/seed1"):
        shutil.rmtree(other)
    capsys.readouterr()
    code = world(grid=GRID)
    said = capsys.readouterr()
    assert (path / name).read_text() == '{"status": "comp'
    assert f"{name} cannot be read" in said.out + said.err
    if name == "status.json":
        assert code == 1 and "good" in said.out and said.out.count("completed") == 2
    else:  # without run.json mmqk cannot tell which run the folder has
        assert code == 2
