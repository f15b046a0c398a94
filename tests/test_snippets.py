"""The commands and the Python code of README.md and docs/*.md: every command is known and every flag of it exists,
every configuration can be read, and every import works."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest

from mmqk.cli import main
from mmqk.config import resolve

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A command whose arguments stand for a file, run or machine of the reader is not run; its flags are tested.
OF_THE_READER = re.compile(r"--fork|NAME|[<>]|\bG\.yaml|mine|wandb")


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def commands(page: Path) -> list[list[str]]:
    """Return the calls of mmqk in the shell blocks of a page."""
    lines = "\n".join(blocks(page, "")).replace("\\\n", " ").splitlines()
    calls = [line for line in lines if re.match(r"mmqk \S", line)]
    return [shlex.split(line, comments=True) for line in calls]


ALL = [pytest.param(page, call, id=f"{page.stem}: {' '.join(call)[:60]}") for page in PAGES for call in commands(page)]


@functools.cache
def help_of(*command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    assert "usage: " in printed.getvalue(), command
    return printed.getvalue()


def split(call: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the command without its arguments, and the arguments."""
    words = 3 if call[1] == "data" else 2
    return tuple(call[1:words]), call[words:]


def unknown(call: list[str]) -> list[str]:
    """Return the flags of a call that its help does not list."""
    command, args = split(call)
    flags = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
    shown = help_of(*command) + (help_of("train") if command == ("inspect",) else "")  # it takes these fields
    fields = set(re.findall(r"^  ([\w.]+)=", shown, re.MULTILINE)) | {"config"}
    return [f for f in flags if not re.search(rf"(?<![\w-]){f}\b", shown) and f.removeprefix("--") not in fields]


@pytest.mark.parametrize(("page", "call"), ALL)
def test_every_flag_of_a_command_exists(page, call):
    assert unknown(call) == []


def test_an_unknown_flag_is_found():
    assert unknown(["mmqk", "report", "runs/demo", "--outt=x"]) == ["--outt"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_code_can_be_parsed_and_its_imports_work(page):
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), {})


TRAINED = [case for case in ALL if split(case.values[1])[0] == ("train",)]
TRAINED = [case for case in TRAINED if not OF_THE_READER.search(" ".join(case.values[1]))]


@pytest.mark.parametrize(("page", "call"), TRAINED)
def test_the_configuration_of_a_run_can_be_read(page, call, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert resolve(split(call)[1]).trainer.max_steps > 0


def test_the_commands_are_found():
    assert len(ALL) > 30 and len(TRAINED) > 3
