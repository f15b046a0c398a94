"""Every test that docs/reliability.md names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
CELLS = [line.rsplit("|", 2)[1] for line in PAGE.splitlines() if line.startswith("|") and "tests/" in line]


def named(cell: str) -> list[str]:
    """Return the tests of a cell; ``::test_b`` after ``tests/a.py::test_a`` is a test of the same file."""
    names: list[str] = []
    for name in re.findall(r"`((?:tests/[\w/]+\.py)?(?:::\w+)?)`", cell):
        names.append(name if name.startswith("tests/") else names[-1].split("::")[0] + name)
    return names


def exists(name: str) -> bool:
    path, _, function = name.partition("::")
    if not (ROOT / path).is_file():
        return False
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return not function or any(isinstance(n, ast.FunctionDef) and n.name == function for n in tree.body)


@pytest.mark.parametrize("cell", CELLS)
def test_every_named_test_exists(cell):
    assert named(cell)
    assert [name for name in named(cell) if not exists(name)] == []


def test_a_missing_test_is_found():
    assert exists("tests/test_reliability.py::test_a_missing_test_is_found")
    assert not exists("tests/test_reliability.py::test_none") and not exists("tests/test_none.py")
