"""`read_json` refuses damaged records with one sentence, and commands read or refuse a grid that is damaged in
hundreds of ways."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from mmqk import report, watch
from mmqk.store import DamagedFile, UserError, cli_main, read_json, read_regular, write_json
from tests.lab.fake_runs import Planted, write_grid

DAMAGE = {
    "cut": b'{"a": ',
    "bytes": b'{"a": "\xff"}',
    "empty": b"",
    "list": b"[1]",
    "levels": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "type": b'{"a": [1, "x"]}',
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_be_a_record_is_one_sentence_that_names_the_file(tmp_path, name):
    path = tmp_path / "x.json"
    path.write_bytes(DAMAGE[name])
    with pytest.raises(UserError, match=r"x\.json cannot be read \(.+\): ask") as refusal:
        read_json(path, {"a": str}, "ask")
    assert len(str(refusal.value)) < 300 + len(str(path)) and "\n" not in str(refusal.value)
    path.write_text('{"a": "x"}')
    assert read_json(path, {"a": str}) == {"a": "x"}


def test_what_is_no_file_is_refused_at_once(tmp_path):
    path = tmp_path / "x.json"
    makers = {
        "it is a folder": path.mkdir,
        "it is not a file": lambda: os.mkfifo(path),
        "Too many levels of symbolic links": lambda: path.symlink_to(path),
    }
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


def test_a_file_of_more_than_2_gib_is_not_read(tmp_path):
    """The file is sparse; reading it would take 2 GiB of memory."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    assert read_regular(path) == b'{"step": 1}\n'
    os.truncate(path, 2**31 + 1)
    with pytest.raises(OSError, match="more than 2048 MiB"):
        read_regular(path)


def test_what_is_written_can_be_read(tmp_path):
    write_json(tmp_path / "x.json", {"a": [float("nan"), float("inf"), 1.5], "é": {"b": -float("inf")}})
    assert read_json(tmp_path / "x.json") == {"a": ["nan", "inf", 1.5], "é": {"b": "-inf"}}


# The grid that the tests below damage.

CLAIM = {
    "id": "A", "statement": "more", "metric": "largest_attention_logit", "treatment": "hot", "control": "cold",
    "min_effect": 0.69, "direction": "greater", "finding": {"reproduced": "{ratio} times"}, "seeds": 2,
}  # fmt: skip
FORK = {
    "parent": {"id": "0000000000", "folder": "cold", "checkpoint": "x.ckpt", "step": 20},
    "changed": [{"field": "optim.lr", "from": 0.01, "to": 0.02}], "added": [{"name": "a", "how": "b"}], "dropped": [],
    "optimizer": "kept", "function": {"logits_rms_relative": 0.0, "loss": {"text": [1.0, 1.0]}},
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Write a grid of finished runs: two arms with two seeds, and a fork."""
    folder = tmp_path_factory.mktemp("whole") / "grid"
    grid = {
        "title": "Grid", "arms": {"hot": {"label": "hot", "set": {"optim.lr": 0.1}}, "cold": None, "late": None},
        "claims": [CLAIM], "report": {"hero": ["hot", "cold"], "cannot_tell": ["size"], "command": "make it"},
    }  # fmt: skip
    runs = [
        (
            {"arm": arm, "seed": seed, "id": "0" * 10, "family": arm, "point": {}, "role": "verdict"},
            planted,
            {},
        )
        for arm, planted in (("hot", Planted(80.0)), ("cold", Planted(9.0)))
        for seed in (0, 1)
    ]
    fork = {"parent": "cold-0000000002/seed0", "step": 20}
    runs.append(
        ({"arm": "late", "seed": 0, "id": "1" * 10, "fork": fork}, Planted(10.0), {"fork": {"step": 20}})
    )
    write_grid(folder, grid, runs)
    (folder / "late-0000000004/seed0/fork.json").write_text(json.dumps(FORK))
    for path in folder.glob("*/seed*/run.json"):
        record = json.loads(path.read_text())
        record["details"]["config"] |= {
            "threads": 1,
            "data": {"batch_size": 4, "seq_len": 8, "mix": {"pair": 1.0}},
        }
        record["identity"]["optim"] |= {"warmup_steps": 3}
        path.write_text(json.dumps(record))
    return folder


def test_the_grid_itself_is_read_without_a_note(whole, tmp_path, capsys):
    """The control of the damage tests: without damage nothing is refused or reported."""
    assert cli_main(report.main)([str(whole), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    assert "cannot be read" not in page and "is missing" not in page
    assert cli_main(watch.main)(["--once", str(whole)]) == 0
    assert "damaged" not in capsys.readouterr().out


def test_a_damaged_record_of_a_run_is_named_on_the_page_without_its_folder(whole, tmp_path):
    folder = tmp_path / "grid"
    shutil.copytree(whole, folder)
    arms = {"run.json": "hot-*", "status.json": "cold-*", "data.json": "cold-*", "fork.json": "late-*"}
    for name, arm in arms.items():
        sorted(folder.glob(f"{arm}/seed0/{name}"))[0].write_text('{"share": ')
    assert cli_main(report.main)([str(folder), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page/report.md").read_text()
    for name in ("run.json", "status.json", "data.json", "fork.json"):
        assert f"ts {name} cannot be read: it is not JSON" in page, name
    assert str(tmp_path) not in page


@pytest.mark.parametrize("name", ["../other/seed0", "/etc", "."])
def test_a_grid_names_no_folder_outside_itself(whole, tmp_path, capsys, name):
    folder = tmp_path / "grid"
    shutil.copytree(whole, folder)
    shutil.copytree(folder / "cold-0000000002", tmp_path / "other")
    record = json.loads((folder / "ablation.json").read_text())
    record["runs"][0]["folder"] = name
    (folder / "ablation.json").write_text(json.dumps(record))
    for command in (report.main, watch.main):
        argv = (
            ["--once", str(folder)]
            if command is watch.main
            else [str(folder), "--out", str(tmp_path / "page")]
        )
        assert cli_main(command)(argv) == 2
        assert "runs[0].folder is " in capsys.readouterr().err
