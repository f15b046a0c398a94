"""The code hash: every file that a run imports is in one of two lists, and only files of the first list change the
hash."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from mmqk.store.code import DECIDES, PACKAGE, code_hash, lists, same_code

# The files that `mmqk.train` imports and `DECIDES` does not list. They write, show or stop a run, and compute none of
# its numbers. A file that matches an entry of `DECIDES` and an entry here belongs to `DECIDES`.
LEAVES = (
    "__init__.py", "analysis", "api.py", "data/__init__.py", "data/tokenize.py", "grid", "monitors/__init__.py",
    "monitors/adapters.py", "monitors/attach.py", "monitors/lightning.py", "monitors/third_party", "progress.py",
    "store", "data/tokenizers/__init__.py", "train.py", "training/__init__.py", "training/logging",
    "training/loop/__init__.py", "training/loop/cpu_tuning.py", "training/loop/lean_torchmetrics.py",
    "training/loop/lifecycle.py", "training/loop/lightning_private.py", "training/loop/memory.py",
    "training/loop/signals.py",
)  # fmt: skip


def imported(package: Path, start: str = "train.py") -> set[str]:
    """Return ``start`` and the files of mmqk that it imports, directly or through other files.

    Imports inside functions count too.
    """
    seen, left = set(), [start]
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        left += [f"{parent}/__init__.py" for parent in map(str, Path(file).parents) if parent != "."]
        for node in ast.walk(ast.parse((package / file).read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = Path("mmqk", file).parts[: -node.level] if node.level else ()
                module = ".".join([*above, *filter(None, [node.module])])
                names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                path = name.removeprefix("mmqk").lstrip(".").replace(".", "/")
                if name.partition(".")[0] == "mmqk":
                    places = (f"{path}.py", f"{path}/__init__.py".lstrip("/"))
                    left += [place for place in places if (package / place).is_file()]
    return seen


def unlisted(package: Path) -> set[str]:
    return {file for file in imported(package) if not lists(file, DECIDES) and not lists(file, LEAVES)}


@pytest.fixture
def copy(tmp_path) -> Path:
    shutil.copytree(PACKAGE, tmp_path / "mmqk", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "mmqk"


def test_every_file_that_a_run_imports_is_in_a_list(copy):
    assert not unlisted(PACKAGE)
    assert {"training/step/losses.py", "model/norms.py", "config/__init__.py"} <= imported(PACKAGE)
    # The control: a new imported file that is in neither list is detected.
    (copy / "extra.py").write_text("")
    step = copy / "training/step/losses.py"
    step.write_text(step.read_text() + "\n\ndef late():\n    from mmqk import extra\n")
    assert unlisted(copy) == {"extra.py"}


def test_the_lists_name_what_exists():
    assert [name for name in (*DECIDES, *LEAVES) if not (PACKAGE / name).exists()] == []
    assert not set(DECIDES) & set(LEAVES)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("model/norms.py", True),
        ("config/__init__.py", True),
        ("store/alarms/divergence.py", True),
        ("training/step/losses.py", True),
        ("training/logging/heatmaps.py", False),
        ("inspection/page.py", False),
        ("store/folder.py", False),
        ("report/page.py", False),
    ],
)
def test_the_hash_follows_the_files_that_can_change_a_number(copy, file, changes):
    code_hash.cache_clear()
    before = code_hash(copy)
    assert len(before) == 10 and before == code_hash()
    path = copy / file
    path.write_text(path.read_text() + "\n# changed\n")
    code_hash.cache_clear()
    assert lists(file, DECIDES) == changes and (code_hash(copy) != before) == changes
    code_hash.cache_clear()


def test_a_renamed_file_changes_the_hash(copy):
    code_hash.cache_clear()
    before = code_hash(copy)
    (copy / "model/norms.py").rename(copy / "model/other.py")
    code_hash.cache_clear()
    assert code_hash(copy) != before
    code_hash.cache_clear()


def test_listed_hashes_are_the_same_code(tmp_path):
    listed = tmp_path / "equivalent.txt"
    listed.write_text("# a comment\naa bb  # renamed a function\ncc dd\nbb cc\nee ff\n")
    assert same_code("aa", "dd", listed) and same_code("aa", "aa", listed) and same_code("xx", "xx", listed)
    assert not same_code("aa", "ee", listed) and not same_code("aa", "xx", listed)
    assert not same_code(None, None, listed) and not same_code(None, "aa", listed)
    assert not same_code("aa", "bb", tmp_path / "absent.txt")


def test_a_run_of_several_versions_is_the_same_code_if_all_of_them_are_equivalent(tmp_path):
    listed = tmp_path / "equivalent.txt"
    listed.write_text("aa bb\nbb cc\nee ff\n")
    assert same_code("aa+bb", "cc", listed) and same_code("aa", "bb+cc", listed)
    assert not same_code("aa+ee", "cc", listed) and not same_code("aa+xx", "aa+xx", listed)
