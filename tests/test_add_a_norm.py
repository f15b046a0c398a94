"""Apply examples/add_a_norm.patch to a copy of the repository, and run the patched copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/add_a_norm.md"
PATCH = ROOT / "examples/add_a_norm.patch"
COPIED = ("mmqk", "configs", "tests", "examples/add_a_norm.patch", "pyproject.toml")

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git, which applies the patch, is not installed")


def commands() -> list[str]:
    """Return the commands in the first code block of the page."""
    block = re.search(r"^```\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1].splitlines()


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a copy of the repository: it imports the copy's mmqk, and git finds no repository above it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(folder.parent), "PYTHONPATH": str(folder)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=1800)


def copy_to(folder: Path) -> Path:
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return folder


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> Path:
    """Copy the repository, patch the copy with the command of the page, and return its folder."""
    folder = copy_to(tmp_path_factory.mktemp("add") / "copy")
    done = run(folder, "bash", "-c", f"set -o pipefail; {commands()[0]}")
    assert done.returncode == 0, done.stderr
    return folder


def added(folder: Path, name: str) -> list[str]:
    before = (ROOT / name).read_text(encoding="utf-8").splitlines() if (ROOT / name).exists() else []
    return [line for line in (folder / name).read_text(encoding="utf-8").splitlines() if line not in before]


def test_the_patch_is_the_whole_change_and_the_norm_is_ten_lines(patched):
    diffs = re.findall(r"^\+\+\+ b/(\S+)$", PATCH.read_text(encoding="utf-8"), re.MULTILINE)
    assert all(added(patched, name) for name in diffs)
    changed = {
        str(path.relative_to(patched))
        for folder in ("mmqk", "configs", "tests")
        for path in (patched / folder).rglob("*")
        if path.is_file() and added(patched, str(path.relative_to(patched)))
    }
    assert changed == set(diffs)
    assert len([line for line in added(patched, "mmqk/model/norms.py") if line.strip()]) <= 10


@pytest.mark.slow
def test_its_parity_test_passes_there(patched):
    assert commands()[1] == "python -m pytest tests/model/test_dyt.py"
    done = run(patched, sys.executable, *commands()[1].split()[1:], "-p", "no:warnings")
    assert done.returncode == 0, done.stdout + done.stderr
    # The control: with a different formula in the norm, the same test fails.
    norms = patched / "mmqk/model/norms.py"
    right = norms.read_text(encoding="utf-8")
    try:
        norms.write_text(right.replace("torch.tanh(self.alpha * wide)", "self.alpha * torch.tanh(wide)"))
        done = run(patched, sys.executable, *commands()[1].split()[1:], "-p", "no:warnings")
        assert done.returncode == 1 and "test_it_equals_its_peer" in done.stdout
    finally:
        norms.write_text(right, encoding="utf-8")
