"""`mmqk init` writes a project that trains, and changes no existing file."""

import pytest

from mmqk.cli import init as main
from mmqk.config import resolve
from mmqk.lab.grid import load_grid
from mmqk.store import UserError


def test_a_project_is_complete(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["study"]) == 0
    assert capsys.readouterr().out.split() == [f"study/{name}" for name in ("config.yaml", "grid.yaml", "README.md")]
    assert resolve(["study/config.yaml"]).id == resolve(["demo"]).id
    grid = load_grid("study/grid.yaml")
    assert grid.name == "study" and len(grid.jobs) == 6
    readme = (tmp_path / "study/README.md").read_text()
    assert len(readme.splitlines()) == 10 and "runs/study" in readme
    from mmqk.ablate import main as ablate

    monkeypatch.chdir(tmp_path / "study")
    assert ablate(["grid.yaml", "--dry-run"]) == 0


@pytest.mark.parametrize(("name", "says"), [("full", "not an empty"), ("file", "not an empty"), ("a b", "'a b'")])
def test_what_exists_stays(tmp_path, name, says):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=says):
        main([str(tmp_path / name)])
    assert sorted(tmp_path.rglob("*")) == before
