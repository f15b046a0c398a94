"""`mmqk.ablate`: its runs, record and table; `--only` trains some arms of a grid, and `--set` adds an arm."""

import json
import sys
from pathlib import Path

import pytest

import mmqk.ablate as ablate
from mmqk.ablate import _parse
from mmqk.config.parse import Fields
from mmqk.config.training import OptimConfig
from mmqk.lab.grid.arms import flags
from mmqk.lab.grid.claims import claims_hash
from mmqk.store import UserError, identity_hash, read_status
from tests.lab.runner.conftest import GRID


def test_a_grid_becomes_runs_a_record_and_a_table(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ablate, "cores", lambda: 6)
    assert toy("--jobs", "2") == 0
    record = json.loads((tmp_path / "runs/toy/ablation.json").read_text())
    assert record["name"] == "toy" and record["threads"] == 3
    assert record["grid"]["arms"]["wild"] == {"seeds": [0], "set": {"act": "diverge"}}
    identity = sys.modules["fake_train"].identity_of("finish", 0)
    variant = identity_hash({name: value for name, value in identity.items() if name != "seed"})
    assert [(r["arm"], r["seed"]) for r in record["runs"]] == [("good", 0), ("wild", 0), ("good", 1)]
    assert [r["folder"] for r in record["runs"][::2]] == [f"good-{variant}/seed0", f"good-{variant}/seed1"]
    for run in record["runs"]:
        folder = tmp_path / "runs/toy" / run["folder"]
        assert json.loads((folder / "run.json").read_text())["id"] == run["id"]
        assert "'--threads=3'" in (folder / "train.log").read_text()
        assert read_status(folder).status == {"good": "completed", "wild": "diverged"}[run["arm"]]
    out = capsys.readouterr().out
    assert "toy: 3 runs in runs/toy, 3 to train, 2 at a time" in out
    assert "wild seed 0 diverged: text loss became nan" in out


def test_run_again_it_trains_nothing(toy, tmp_path, capsys):
    assert toy() == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*/seed*/*")}
    capsys.readouterr()
    assert toy() == 0
    assert "3 runs in runs/toy, 0 to train" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_a_changed_field_is_another_run_and_the_old_one_stays(toy, tmp_path):
    assert toy() == 0
    assert toy(grid=GRID.replace("[0], set: {act: diverge", "[7], set: {act: finish")) == 0
    assert len(list((tmp_path / "runs/toy").glob("wild-*"))) == 2


def test_claims_stay_registered_as_they_first_were(toy, tmp_path):
    path = tmp_path / "runs/toy/ablation.json"
    grid = GRID + "claims:\n  - {id: A, treatment: good, control: wild, min_effect: 0.5, direction: greater}\n"
    assert toy(grid=grid) == 0
    first = json.loads(path.read_text())
    assert first["registered"] == claims_hash(first["grid"])
    assert toy(grid=grid.replace("0.5", "0.1")) == 0
    assert toy(grid=grid.replace("0.5", "0.2")) == 0
    later = json.loads(path.read_text())
    assert later["grid"]["claims"][0]["min_effect"] == 0.2
    assert later["registered"] == first["registered"] != claims_hash(later["grid"])


def test_a_failing_arm_is_exit_code_1_and_the_others_are_done(toy, tmp_path, capsys):
    assert toy(grid=GRID.replace("act: diverge", "act: sigkill")) == 1
    captured = capsys.readouterr()
    assert "wild seed 0 failed: killed by SIGKILL" in captured.out
    assert captured.out.count("completed") == 2
    assert "train.log" in captured.err


def test_a_dry_run_lists_the_runs_and_writes_nothing(toy, tmp_path, capsys):
    before = {"base.yaml", "toy.yaml"}
    assert toy("--dry-run") == 0
    assert capsys.readouterr().out.count("waiting") == 3
    assert {p.name for p in tmp_path.iterdir()} == before


def test_an_unknown_field_is_refused_with_its_arm_before_anything_is_written(toy, tmp_path, capsys):
    assert toy(grid=GRID.replace("act: diverge", "model.width: 3")) == 2
    assert "toy.yaml, arm wild: There is no field 'model.width'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_two_arms_that_are_the_same_run_are_refused_before_anything_is_written(toy, tmp_path, capsys):
    grid = GRID + "  twin: {set: {act: finish}}\n"
    assert toy(grid=grid) == 2
    assert "arms good and twin are the same run" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert toy() == 0


def test_a_folder_of_another_ablation_or_a_file_is_refused(toy, tmp_path, capsys):
    assert toy("--out", "here") == 0
    before = (tmp_path / "here/ablation.json").read_bytes()
    assert toy("--out", "here", grid=GRID.replace("name: toy", "name: other")) == 2
    assert "here has the runs of grid 'toy', not 'other'" in capsys.readouterr().err
    assert (tmp_path / "here/ablation.json").read_bytes() == before
    assert toy("--out", "base.yaml") == 2
    assert toy("--out", "base.yaml/runs") == 2
    assert toy("--out", "base.yaml/runs", "--dry-run") == 2
    assert "base.yaml/runs cannot be a folder, because" in capsys.readouterr().err
    assert (tmp_path / "base.yaml").read_text() == "{}"


# Some arms, and added arms ------------------------------------------------------------------------------------------

OUT = Path("runs/toy")


def trained():
    return sorted(path.parent.relative_to(OUT).as_posix().partition("-")[0] for path in OUT.rglob("train.log"))


def arms():
    return {run["arm"] for run in json.loads((OUT / "ablation.json").read_text())["runs"]}


@pytest.mark.parametrize(
    ("argv", "grid"), [(("--only", "good"), GRID), (("--quick",), GRID), (("--quick",), GRID.replace("[good]", "good"))]
)
def test_only_some_arms_are_trained_and_all_are_recorded(toy, argv, grid):
    assert toy(*argv, grid=grid) == 0
    assert trained() == ["good", "good"] and arms() == {"good", "wild"}
    # The control: without `--only` the other arm is trained too.
    assert toy() == 0
    assert trained() == ["good", "good", "wild"]


def test_quick_trains_the_quick_arms_of_every_grid(toy, capsys):
    other = "name: other\nbase: base.yaml\nquick: [tall]\narms: {tall: {set: {size: 5}}, low: {set: {size: 6}}}\n"
    Path("other.yaml").write_text(other)
    assert toy("--config", "other.yaml", "--quick", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "good" in said and "tall" in said and "wild" not in said and "low" not in said


def test_an_added_arm_changes_no_other_and_stays(toy, capsys):
    assert toy("--only", "good") == 0
    before = {path: path.read_bytes() for path in OUT.rglob("run.json")}
    assert toy("--only", "mine", "--set", "act=diverge", "--set", "size=7") == 0
    assert trained() == ["good", "good", "mine", "mine"] and arms() == {"good", "wild", "mine"}
    assert {path: path.read_bytes() for path in before} == before
    # A second arm is added, and a call without --set keeps both added arms.
    assert toy("--only", "other", "--set", "act=diverge", "--set", "size=8") == 0
    assert toy() == 0
    assert arms() == {"good", "wild", "mine", "other"}
    assert json.loads((OUT / "ablation.json").read_text())["grid"]["added"] == ["mine", "other"]


def read(setting):
    options = _parse(["--config=demo", "--only=mine", f"--set={setting}"])
    fields = Fields(OptimConfig)
    fields.add_words(flags(dict(options.settings)))
    return fields.build()


def test_a_set_value_is_read_as_mmqk_train_reads_it():
    """YAML 1.1 reads 010 as 8, 0x10 as 16 and 1:30 as 90."""
    assert read("warmup_steps=010").warmup_steps == 10
    assert read("lr=1e-3").lr == 0.001
    assert read("qk_clip=null").qk_clip is None
    assert read("decay_gains=true").decay_gains is True
    for refused in ("warmup_steps=1:30", "warmup_steps=0x10"):
        with pytest.raises(UserError, match="valid integer"):
            read(refused)
