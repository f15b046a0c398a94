"""``python -m mmqk`` lists every command, and every command reports a user error in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from mmqk.cli import COMMANDS, main
from mmqk.store import UserError, cli_main, clock

# The required arguments of each command.
REQUIRED = {
    "ablate": ["--config", "grid.yaml"],
    "report": ["runs/demo"],
    "pack": ["runs/demo"],
    "interop": ["--from=a", "--to=b"],
    "init": ["project"],
    "watch": ["runs"],
    "bench": ["runs"],
    "preflight": ["module:function"],
    "data shards": ["folder"],
    "data ids": ["--train=a", "--vocab-sizes=text=9", "--out=b"],
    "data tokenize": ["--shards=a", "--out=b"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_flag_is_one_sentence(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = cli_main(main)([*name.split(), *REQUIRED.get(name, []), "--no-such-flag"])
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert err.startswith("mmqk: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "no-such-flag" in err and "usage:" not in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["data"], ["data", "--help"]])
def test_the_table_is_printed(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    for name, (_, arguments, _) in COMMANDS.items():
        is_listed = argv[:1] != ["data"] or name.startswith("data ")
        assert (f"  mmqk {name} {arguments}".rstrip() in out) == is_listed


@pytest.mark.parametrize("module", ["mmqk.store", "mmqk.lab.remedies"])
def test_ctrl_c_during_an_import_is_one_line(module):
    code = (
        "import sys, mmqk.cli\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['mmqk', 'remedies']\n"
        "mmqk.cli.run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "mmqk: interrupted\n")


def mmqk_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mmqk", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_three_commands_are_modules_too():
    assert mmqk_command("remedies").stdout.startswith("Add the flags to: mmqk train demo")
    for name in ("train", "ablate", "report"):
        alone = subprocess.run([sys.executable, "-m", f"mmqk.{name}", "--help"], capture_output=True, text=True)
        assert alone.stdout == mmqk_command(name, "--help").stdout and alone.stdout.startswith(f"usage: mmqk {name} ")


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mmqk {version('mmqk')}\n"


def test_an_unknown_command_names_the_others():
    with pytest.raises(UserError, match="trian is not a command of mmqk: give one of train, ablate"):
        main(["trian"])


def test_clock():
    assert [clock(s) for s in (-3, 0, 59.6, 61, 3600)] == ["0:00", "0:00", "1:00", "1:01", "60:00"]
