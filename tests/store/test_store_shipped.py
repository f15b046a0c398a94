"""Shipped files are used only if the working directory has no file with the same path."""

from pathlib import Path

import pytest

from mmqk.config import resolve
from mmqk.store import GRIDS, UserError, find_file, named_config, with_configs

ROOT = Path(__file__).parents[2]
SMALL = ["--data.seq_len=96", "--trainer.max_steps=2"]


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_of_the_working_directory_comes_first(empty):
    assert find_file("data/emoji") == ROOT / "data/emoji"
    (empty / "data/emoji").mkdir(parents=True)
    assert find_file("data/emoji") == Path("data/emoji")
    assert find_file("data/text") == ROOT / "data/text"  # the user has no data/text


@pytest.mark.parametrize("path", ["data/none", "mmqk/train.py", "README.md", "/data/emoji", "", "../data/emoji"])
def test_nothing_else_is_shipped(empty, path):
    assert find_file(path) == Path(path)


def test_a_config_by_name(empty):
    assert named_config("demo") == ROOT / "configs/demo.yaml"
    assert named_config("recipes/olmo2") == ROOT / "configs/recipes/olmo2.yaml"
    assert named_config("demo", GRIDS) == ROOT / "configs/ablations/demo.yaml"
    assert named_config("configs/cpu.yaml") == ROOT / "configs/cpu.yaml"
    assert named_config("nothing") is None
    (empty / "demo").write_text("seed: 1\n")
    assert named_config("demo") == Path("demo")


def test_a_command_line_with_names(empty):
    demo, cpu = str(ROOT / "configs/demo.yaml"), str(ROOT / "configs/cpu.yaml")
    assert with_configs(["demo", "seed=1"]) == ["--config", demo, "seed=1"]
    assert with_configs(["--config", "demo", "--config=cpu"]) == ["--config", demo, f"--config={cpu}"]
    unchanged = ["seed=1", "--out", "demo", "--config=missing.yaml"]
    assert with_configs(unchanged) == unchanged
    with pytest.raises(UserError, match=r"^nothing is neither a file .*one of cpu, demo, .*recipes/olmo2"):
        with_configs(["nothing"])


def test_a_grid_is_not_trained_as_one_run(empty):
    (empty / "grid.yaml").write_text("name: mine\narms: {a: {}}\n")
    (empty / "run.yaml").write_text("data: {}  # no arms: here\n")
    for given in ("grid.yaml", "tournament", "configs/ablations/demo.yaml"):
        for argv in ([given], ["--config", given], ["demo", given], [f"--config={given}"]):
            with pytest.raises(UserError, match=rf"^{given} is a grid .*: train it with mmqk ablate {given}$"):
                with_configs(argv)
    assert with_configs(["grid.yaml"], GRIDS) == ["--config", "grid.yaml"]
    assert with_configs(["run.yaml"]) == ["--config", "run.yaml"]


def test_the_demonstration_resolves_in_an_empty_folder_as_in_the_repository(empty, monkeypatch):
    elsewhere = resolve(["demo", *SMALL])
    monkeypatch.chdir(ROOT)
    assert elsewhere.id == resolve(["--config", "configs/demo.yaml", *SMALL]).id
    assert elsewhere.out.parent == Path("runs/demo")
