"""`read_json` refuses damaged records with one sentence, and commands read or refuse a grid that is damaged in
hundreds of ways."""

from __future__ import annotations

import shutil

import pytest

from mmqk import report
from mmqk.cli import watch
from mmqk.store import DamagedFile, UserError, cli_main, read_json, write_json
from tests.lab.fake_runs import write_demo

DAMAGE = {"cut": b'{"a": ', "bytes": b'{"a": "\xff"}', "empty": b"", "list": b"[1]"}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_be_a_record_is_one_sentence_that_names_the_file(tmp_path, name):
    path = tmp_path / "x.json"
    path.write_bytes(DAMAGE[name])
    with pytest.raises(UserError, match=r"x\.json cannot be read \(.+\): ask") as refusal:
        read_json(path, "ask")
    assert len(str(refusal.value)) < 300 + len(str(path)) and "\n" not in str(refusal.value)
    path.write_text('{"a": "x"}')
    assert read_json(path) == {"a": "x"}


def test_what_is_no_file_is_refused_at_once(tmp_path):
    path = tmp_path / "x.json"
    makers = {"Is a directory": path.mkdir, "Too many levels of symbolic links": lambda: path.symlink_to(path)}
    for why, make in makers.items():
        make()
        with pytest.raises(DamagedFile) as refusal:
            read_json(path)
        assert refusal.value.why == why
        path.rmdir() if path.is_dir() else path.unlink()
    # The controls: reading a missing file returns None, and reading a link to a record returns the record.
    assert read_json(path) is None and read_json(tmp_path / "nowhere/x.json") is None
    (tmp_path / "real.json").write_text('{"a": [1], "other": {"deep": [null, 1e300, 9223372036854775807]}}')
    path.symlink_to("real.json")
    assert read_json(path) == {"a": [1], "other": {"deep": [None, 1e300, 2**63 - 1]}}


def test_what_is_written_can_be_read(tmp_path):
    write_json(tmp_path / "x.json", {"a": [float("nan"), float("inf"), 1.5], "é": {"b": -float("inf")}})
    assert read_json(tmp_path / "x.json") == {"a": ["nan", "inf", 1.5], "é": {"b": "-inf"}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, module_without_figures):
    """Write the grid that the tests below damage."""
    return write_demo(tmp_path_factory.mktemp("whole") / "grid")


def test_the_grid_itself_is_read_without_a_note(whole, tmp_path, capsys):
    """The control of the damage tests: without damage nothing is refused or reported."""
    assert cli_main(report.main)([str(whole), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    assert "cannot be read" not in page and "is missing" not in page
    assert cli_main(watch)(["--once", str(whole)]) == 0
    assert "damaged" not in capsys.readouterr().out


def test_a_damaged_record_of_a_run_is_named_on_the_page_without_its_folder(whole, tmp_path):
    folder = tmp_path / "grid"
    shutil.copytree(whole, folder)
    arms = {"run.json": "mixed-0*", "status.json": "mixed-qk*", "data.json": "image-off*", "fork.json": "high-pre-0*"}
    for name, arm in arms.items():
        next(folder.glob(f"{arm}/seed0")).joinpath(name).write_text('{"share": ')
    assert cli_main(report.main)([str(folder), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page/report.md").read_text()
    for name in ("run.json", "status.json", "data.json", "fork.json"):
        assert f"ts {name} cannot be read: it is not JSON" in page, name
    assert str(tmp_path) not in page
