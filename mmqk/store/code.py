"""The version of the code that a run records: the git commit of the checkout, or the version of the package.

The golden runs (`make golden`) tell whether a change of the code changes the numbers of a run.
"""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def code_version() -> str:
    """Return the commit at the first call, such as ``5a52617b21``; ``-dirty`` follows if files differ from it."""
    if not (ROOT / ".git").exists():
        return version("mmqk")
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"{version('mmqk')} (git cannot read {ROOT})"
