"""Every front door is in the table of ``python -m mmqk``, and answers a mistake with one sentence."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import mmqk
from mmqk.__main__ import COMMANDS, main
from mmqk.store import cli_main, clock

PACKAGE = Path(mmqk.__file__).parent
TABLE = "mmqk"
# What each must be given besides the mistake.
REQUIRED = {
    "mmqk.ablate": ["--config", "grid.yaml"],
    "mmqk.report": ["runs/demo"],
    "mmqk.interop": ["--from=a", "--to=b"],
    "mmqk.shards": ["folder"],
    "mmqk.data.ids": ["--train=a", "--vocab-sizes=text=9", "--out=b"],
    "mmqk.data.tokenize": ["--shards=a", "--out=b"],
    "mmqk.training.caption_gain": ["--run", "runs/demo"],
}


def front_doors() -> list[str]:
    """The modules that call run_main."""
    return sorted(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__main__")
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^ +run_main\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    )


def test_every_front_door_is_in_the_table():
    listed = [command.split()[2] for command in COMMANDS]
    assert sorted([*listed, TABLE]) == front_doors()


@pytest.mark.parametrize("module", front_doors())
def test_an_unknown_flag_is_one_sentence(module, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_package = PACKAGE.parent.joinpath(*module.split("."), "__main__.py").exists()
    door = importlib.import_module(f"{module}.__main__" if is_package else module)
    code = cli_main(door.main)([*REQUIRED.get(module, []), "--no-such-flag"])
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert err.startswith("mmqk: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "no-such-flag" in err and "usage:" not in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_table_is_printed(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


def test_clock():
    assert [clock(s) for s in (-3, 0, 59.6, 61, 3600)] == ["0:00", "0:00", "1:00", "1:01", "60:00"]
