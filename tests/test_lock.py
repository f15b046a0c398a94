"""The package versions that the report of the shipped demo prints are those of the lock file."""

import re
from pathlib import Path

from packaging.requirements import Requirement

EXAMPLES = Path("reports/examples")


def test_the_lock_has_the_versions_of_the_page():
    lines = (EXAMPLES / "requirements.txt").read_text().splitlines()
    locked = {(r := Requirement(line)).name: str(r.specifier) for line in lines if not line.startswith("#")}
    printed = re.search(r"- Versions: python [\d.]+, (.*)", (EXAMPLES / "demo/report.md").read_text())
    assert printed is not None
    for name, version in (part.split(" ") for part in printed[1].split(", ")):
        assert locked[name] == f"=={version}"


def test_the_lock_has_every_dependency():
    import tomllib

    declared = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    locked = {re.split("==", line)[0] for line in (EXAMPLES / "requirements.txt").read_text().splitlines()}
    assert {Requirement(line).name for line in declared} <= locked
