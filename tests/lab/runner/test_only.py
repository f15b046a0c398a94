"""`mmqk.ablate --only` trains some arms of a grid, and `--set` adds an arm."""

import json
from pathlib import Path

import pytest

from mmqk.ablate import _parse
from mmqk.config.parse import Fields
from mmqk.config.training import OptimConfig
from mmqk.lab.grid.arms import flags
from mmqk.store import UserError

GRID = """
name: toy
base: base.yaml
seeds: [0, 1]
quick: [good]
arms:
  good: {set: {act: finish}}
  wild: {seeds: [0], set: {act: diverge}}
"""
OUT = Path("runs/toy")


@pytest.fixture
def toy(world):
    return lambda *argv, grid=GRID: world(*argv, grid=grid)


def trained():
    return sorted(path.parent.relative_to(OUT).as_posix().partition("-")[0] for path in OUT.rglob("train.log"))


def arms():
    return {run["arm"] for run in json.loads((OUT / "ablation.json").read_text())["runs"]}


@pytest.mark.parametrize("argv", [("--only", "good"), ("--quick",)])
def test_only_some_arms_are_trained_and_all_are_recorded(toy, argv):
    assert toy(*argv) == 0
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
