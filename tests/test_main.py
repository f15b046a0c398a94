"""``python -m mmqk`` lists every command, and every command reports a user error in one sentence."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import mmqk
from mmqk.__main__ import COMMANDS, main
from mmqk.store import UserError, cli_main, clock

PACKAGE = Path(mmqk.__file__).parent
TABLE = "mmqk"
# The required arguments of each command.
REQUIRED = {
    "mmqk.ablate": ["--config", "grid.yaml"],
    "mmqk.report": ["runs/demo"],
    "mmqk.pack": ["runs/demo"],
    "mmqk.interop": ["--from=a", "--to=b"],
    "mmqk.init": ["project"],
    "mmqk.data.shards": ["folder"],
    "mmqk.data.ids": ["--train=a", "--vocab-sizes=text=9", "--out=b"],
    "mmqk.data.tokenize": ["--shards=a", "--out=b"],
}


def front_doors() -> list[str]:
    """Return the modules that call run_main."""
    return sorted(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__main__")
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^ +run_main\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    )


def test_every_front_door_is_in_the_table():
    listed = [module for module, _, _ in COMMANDS.values()]
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
    assert all(f"  mmqk {name} {arguments}".rstrip() in out for name, (_, arguments, _) in COMMANDS.items())


def mmqk_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mmqk", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_a_command_is_its_module():
    done = mmqk_command("remedies")
    alone = subprocess.run([sys.executable, "-m", "mmqk.remedies"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == alone.stdout != ""
    assert mmqk_command("watch", "--help").stdout.startswith("usage: mmqk watch ")
    refused = mmqk_command("watch")
    assert refused.returncode == 2 and refused.stderr.startswith("mmqk: no folder of runs") and not refused.stdout


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mmqk {version('mmqk')}\n"


def test_an_unknown_command_names_the_others():
    with pytest.raises(UserError, match="trian is not a command of mmqk: give one of train, ablate"):
        main(["trian"])


@pytest.mark.parametrize(("line", "words"), [
    ("mmqk watch --on", {"--once"}),
    ("mmqk watch --no-such", set()),
    ("mmqk train --optim.beta", {"--optim.beta1", "--optim.beta2"}),
    ("mmqk wa", {"watch"}),
])  # fmt: skip
def test_the_shell_completes_flags(line, words, tmp_path):
    """argcomplete reads the line from an environment variable and writes the completions to a file."""
    pytest.importorskip("argcomplete")
    answer = tmp_path / "answer"
    mmqk_command(_ARGCOMPLETE="1", COMP_LINE=line, COMP_POINT=str(len(line)), _ARGCOMPLETE_IFS="\n",
                 _ARGCOMPLETE_STDOUT_FILENAME=str(answer), _ARGCOMPLETE_SUPPRESS_SPACE="1")  # fmt: skip
    assert set(answer.read_text().split()) == words


def test_clock():
    assert [clock(s) for s in (-3, 0, 59.6, 61, 3600)] == ["0:00", "0:00", "1:00", "1:01", "60:00"]
