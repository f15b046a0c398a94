"""Every command reports a user error in one sentence."""

from __future__ import annotations

import pytest

from mmqk.cli import COMMANDS, main
from mmqk.store import cli_main

# The required arguments of each command.
REQUIRED = {
    "ablate": ["--config", "grid.yaml"], "report": ["runs/demo"], "pack": ["runs/demo"],
    "interop": ["--from=a", "--to=b"], "init": ["project"], "watch": ["runs"], "bench": ["runs"],
    "preflight": ["module:function"], "data ids": ["--train=a", "--vocab-sizes=text=9", "--out=b"],
    "data tokenize": ["--shards=a", "--out=b"],
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_flag_is_one_sentence(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = cli_main(main)([*name.split(), *REQUIRED.get(name, []), "--no-such-flag"])
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert err.startswith("mmqk: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "no-such-flag" in err and "usage:" not in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
