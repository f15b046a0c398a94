"""Shipped files are used only if the working directory has no file with the same path."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mmqk.config import resolve
from mmqk.store import UserError, find_file, named_config, relative, shipped, with_configs

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
    assert named_config("demo", shipped.GRIDS) == ROOT / "configs/ablations/demo.yaml"
    assert named_config("configs/cpu.yaml") == ROOT / "configs/cpu.yaml"
    assert named_config("nothing") is None
    (empty / "demo").write_text("seed: 1\n")
    assert named_config("demo") == Path("demo")


def test_a_command_line_with_names(empty):
    demo, cpu = str(ROOT / "configs/demo.yaml"), str(ROOT / "configs/cpu.yaml")
    assert with_configs(["demo", "seed=1"]) == ["--config", demo, "seed=1"]
    assert with_configs(["--config", "demo", "--config=cpu"]) == ["--config", demo, f"--config={cpu}"]
    unchanged = ["seed=1", "--out", "demo", "--config", '{"seed": 1}', "--config=missing.yaml"]
    assert with_configs(unchanged) == unchanged
    with pytest.raises(UserError, match=r"^nothing is neither a file .*one of cpu, demo, .*recipes/olmo2"):
        with_configs(["nothing"])


def test_several_names_are_merged_in_their_order(empty):
    demo, recipe = (str(ROOT / f"configs/{name}.yaml") for name in ("demo", "recipes/chameleon_34b"))
    both = ["--config", demo, "--config", recipe, "seed=1"]
    assert with_configs(["demo", "recipes/chameleon_34b", "seed=1"]) == both
    assert with_configs(["demo", "mine.yaml"]) == ["--config", demo, "--config", "mine.yaml"]
    grids = [str(ROOT / f"configs/ablations/{name}.yaml") for name in ("demo", "tournament")]
    assert with_configs(["demo", "tournament"], shipped.GRIDS) == ["--config", grids[0], "--config", grids[1]]
    # The controls: a word that names no config, and a word after a flag.
    for unchanged in (["optim.lr", "0.02"], ["seed=1", "cpu"], ["--out", "cpu"]):
        assert with_configs(["demo", *unchanged]) == ["--config", demo, *unchanged]


@pytest.mark.parametrize(
    ("given", "near"),
    [("dem", "demo"), ("demoo", "demo"), ("olmo2", "recipes/olmo2"), ("recipes/qwen", "recipes/qwen3")],
)
def test_a_typo_of_a_shipped_name_gets_the_nearest_name(empty, given, near):
    for argv in ([given], ["cpu", given], ["--config", given]):
        with pytest.raises(UserError, match=rf"^{given} is neither .* configuration: did you mean {near}\?$"):
            with_configs(argv)
    with pytest.raises(UserError, match=r"^tournamen .* a shipped grid: did you mean tournament\?$"):
        with_configs(["tournamen"], shipped.GRIDS)


def test_a_grid_is_not_trained_as_one_run(empty):
    (empty / "grid.yaml").write_text("name: mine\narms: {a: {}}\n")
    (empty / "run.yaml").write_text("data: {}  # no arms: here\n")
    for given in ("grid.yaml", "tournament", "configs/ablations/demo.yaml"):
        for argv in ([given], ["--config", given], ["demo", given], [f"--config={given}"]):
            with pytest.raises(UserError, match=rf"^{given} is a grid .*: train it with mmqk ablate {given}$"):
                with_configs(argv)
    assert with_configs(["grid.yaml"], shipped.GRIDS) == ["--config", "grid.yaml"]
    assert with_configs(["run.yaml"]) == ["--config", "run.yaml"]


def test_the_demonstration_resolves_in_an_empty_folder_as_in_the_repository(empty, monkeypatch):
    elsewhere = resolve(["demo", *SMALL])
    monkeypatch.chdir(ROOT)
    assert elsewhere.id == resolve(["--config", "configs/demo.yaml", *SMALL]).id
    assert elsewhere.out.parent == Path("runs/demo")


def test_data_beside_a_config(empty, tmp_path_factory):
    """A relative folder in a config is looked up beside the config; a folder on the command line is not."""
    project = tmp_path_factory.mktemp("project")
    for name in ("tokenizers", "text"):
        shutil.copytree(ROOT / "data" / name, project / name)
    content = {"data": {"tokenizers": "tokenizers", "text": "text", "mix": {"text": 1.0}, "seq_len": 96}}
    (project / "run.yaml").write_text(yaml.safe_dump(content))
    run = resolve(["--config", str(project / "run.yaml")])
    assert run.data.sources == {"text": project / "text"}
    assert run.data.tokenizers_folder == project / "tokenizers"
    with pytest.raises(UserError, match="elsewhere"):
        resolve(["--config", str(project / "run.yaml"), "--data.text=elsewhere"])
    content["data"]["pairs"] = "shards/{00..09}.tar"
    (project / "shards").mkdir()
    (project / "run.yaml").write_text(yaml.safe_dump(content))
    assert resolve(["--config", str(project / "run.yaml")]).data.pairs == str(project / "shards/{00..09}.tar")


def test_pages_print_shipped_paths_as_in_the_repository(monkeypatch, tmp_path):
    from mmqk.store import formatting

    installed = tmp_path / "site-packages/mmqk/shipped"
    monkeypatch.setattr(formatting, "SHIPPED", installed)
    assert relative(installed / "configs/demo.yaml") == "configs/demo.yaml"
    assert relative(tmp_path / "other/configs/demo.yaml") == "configs/demo.yaml"


def test_an_installed_package_reads_its_shipped_folder(tmp_path):
    package = tmp_path / "mmqk"
    shutil.copytree(ROOT / "mmqk/store", package / "store")
    shutil.copytree(ROOT / "mmqk/model", package / "model")
    shutil.copy(ROOT / "mmqk/__init__.py", package)
    (package / "shipped/configs").mkdir(parents=True)
    (package / "shipped/configs/mine.yaml").write_text("seed: 1\n")
    code = "from mmqk.store import named_config; print(named_config('mine'), named_config('demo'))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(package / "shipped/configs/mine.yaml"), "None"]
