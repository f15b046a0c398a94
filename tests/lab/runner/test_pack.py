"""`mmqk.ablate --from`: the finished runs of a pack are not trained again, and their claims stay registered."""

import json
import shutil
from pathlib import Path

import pytest

from mmqk.lab.grid.claims import claims_hash
from mmqk.store import read_status
from mmqk.store.pack import write_pack
from tests.lab.runner.conftest import GRID

CLAIM = "claims:\n  - {id: A, treatment: good, control: wild, min_effect: 0.5, direction: greater}\n"
OUT = Path("runs/toy")


@pytest.fixture
def pack(toy):
    """Return a function that trains the grid, packs it and deletes its folder."""

    def make(grid=GRID, unfinished=""):
        assert toy(grid=grid) == 0
        if unfinished:
            (status,) = OUT.glob(f"{unfinished}/status.json")
            status.write_text(json.dumps({"status": "interrupted", "step": 2}))
        record = (OUT / "ablation.json").read_bytes()
        write_pack(OUT, Path("toy.zip"))
        shutil.rmtree("runs")
        return record

    return make


def trained():
    """Return the runs that were trained here: a run from a pack has no log."""
    return sorted(path.parent.relative_to(OUT).as_posix() for path in OUT.rglob("train.log"))


def test_finished_runs_of_a_pack_are_not_trained_again(toy, pack, capsys):
    record = pack()
    assert toy("--from", "toy.zip") == 0
    assert "toy.zip: copied 3 finished runs that runs/toy did not have" in capsys.readouterr().out
    assert trained() == [] and (OUT / "ablation.json").read_bytes() == record
    assert sorted(read_status(path.parent).status for path in OUT.rglob("run.json")) == [
        "completed", "completed", "diverged"
    ]  # fmt: skip
    # The control: without the pack the runs are trained.
    shutil.rmtree("runs")
    assert toy() == 0 and len(trained()) == 3


def test_an_unfinished_run_of_a_pack_is_trained(toy, pack, capsys):
    pack(unfinished="good-*/seed1")
    assert toy("--from", "toy.zip") == 0
    assert "2 finished runs" in capsys.readouterr().out
    (run,) = trained()
    assert run.startswith("good-") and run.endswith("/seed1") and read_status(OUT / run).status == "completed"


def test_a_run_that_the_folder_has_stays_as_it_is(toy, pack):
    pack()
    assert toy(grid=GRID.replace("[0, 1]", "[1]").replace("seeds: [0]", "seeds: [1]")) == 0
    before = trained()
    assert len(before) == 2
    assert toy("--from", "toy.zip") == 0
    assert trained() == before and len(list(OUT.rglob("run.json"))) == 4


FORKS = """
name: toy
base: base.yaml
seeds: [0]
arms:
  plain: {set: {size: 1}}
  late: {fork: {arm: plain, step: 3}, set: {size: 2}}
  later: {fork: {arm: plain, step: 2}, set: {size: 3}}
"""


def test_forks_of_a_pack(toy, pack):
    """A finished fork needs no checkpoint. For an unfinished fork the parent is trained again."""
    pack(FORKS, unfinished="later-*/seed0")
    assert toy("--from", "toy.zip", grid=FORKS) == 0
    assert [name.partition("-")[0] for name in trained()] == ["later", "plain"]
    assert trained()[1].endswith("seed0-again") and len(list(OUT.rglob("run.json"))) == 4
    assert all(read_status(path.parent).status == "completed" for path in OUT.rglob("run.json"))


@pytest.mark.parametrize("begun", [False, True])
def test_claims_changed_after_the_runs_of_the_pack_count_as_changed(toy, pack, begun):
    first = json.loads(pack(GRID + CLAIM))
    later = GRID + CLAIM.replace("0.5", "0.1")
    if begun:  # the new claims are registered in the folder before the call with --from
        assert toy("--dry-run", grid=later) == 0 and not OUT.exists()
        assert toy("--slice", "3/3", grid=later) == 0
        assert json.loads((OUT / "ablation.json").read_text())["registered"] != first["registered"]
    assert toy("--from", "toy.zip", grid=later) == 0
    record = json.loads((OUT / "ablation.json").read_text())
    assert record["registered"] == first["registered"] == claims_hash(first["grid"]) != claims_hash(record["grid"])
    packed = [run["claims"] for run in record["runs"] if run["folder"] not in trained()]
    assert len(packed) >= 2 and set(packed) == {first["registered"]}


def test_a_pack_does_not_replace_a_lost_registration(toy, pack):
    pack(GRID + CLAIM)
    assert toy("--slice", "1/3", grid=GRID + CLAIM) == 0
    (OUT / "ablation.json").unlink()
    assert toy("--from", "toy.zip", grid=GRID + CLAIM) == 0
    assert json.loads((OUT / "ablation.json").read_text())["lost"] is True


def test_a_pack_of_another_grid_is_refused_and_nothing_is_written(toy, pack, capsys):
    pack()
    assert toy("--from", "toy.zip", grid=GRID.replace("name: toy", "name: other")) == 2
    assert "toy.zip is not a pack of the grid 'other': pack the folder of its runs" in capsys.readouterr().err
    assert toy("--from", "base.yaml") == 2
    assert "base.yaml cannot be read as a pack (File is not a zip file)" in capsys.readouterr().err
    assert toy("--from", "nothing.zip") == 2
    assert "nothing.zip does not exist: --from takes a pack of the grid's runs" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("outside", ["../../made/seed0", "/made/seed0"])
def test_a_pack_cannot_take_a_run_from_outside_of_it(toy, tmp_path, outside):
    packed = tmp_path / "packed"
    (packed / "good/seed0").mkdir(parents=True)
    (packed / "good/seed0/status.json").write_text('{"status": "completed"}')
    (packed / "good/seed0/run.json").write_text("{}")
    for folder, code in ((outside, 2), ("good/seed0", 0)):
        entries = [{"arm": "good", "seed": 0, "folder": folder, "id": "", "claims": ""}]
        record = {"name": "toy", "registered": "", "grid": {}, "runs": entries}
        (packed / "ablation.json").write_text(json.dumps(record))
        write_pack(packed, Path("toy.zip"))
        assert toy("--from", "toy.zip") == code
    assert (OUT / "good/seed0/run.json").exists() and len(trained()) == 3
