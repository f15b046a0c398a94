"""A clone of the last commit has the whole package, and so does the wheel built from it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints; skip the test outside a repository."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"git {arguments[0]} fails: {done.stderr.strip()}")
    return done.stdout.splitlines()


def test_no_file_of_the_package_is_ignored_and_no_tracked_file_matches_gitignore():
    ignored = git("ls-files", "--others", "--ignored", "--exclude-standard", "mmqk")
    assert [path for path in ignored if "__pycache__" not in path] == []
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []


def test_the_wheel_of_the_last_commit_has_every_file(tmp_path):
    pytest.importorskip("hatchling", reason="pyproject.toml needs hatchling to build")
    packages = git("ls-tree", "-r", "--name-only", "HEAD", "mmqk")
    shipped = git("ls-tree", "-r", "--name-only", "HEAD", "configs", "data")
    source, archive = tmp_path / "source", tmp_path / "source.tar"
    source.mkdir()
    git("archive", "--output", str(archive), "HEAD", "mmqk", "configs", "data", "pyproject.toml", "README.md",
        "LICENSE", "NOTICE")  # fmt: skip
    shutil.unpack_archive(archive, source, filter="data")
    build = f"import hatchling.build as build; build.build_wheel({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        packed = {name for name in content.namelist() if name.startswith("mmqk/")}
    installed = {f"mmqk/shipped/{name}" for name in shipped if not name.startswith("data/build/")}
    assert packed == {*packages, *installed}
    assert {"mmqk/py.typed", "mmqk/lab/page/templates/index.html", "mmqk/shipped/configs/demo.yaml"} <= packed
