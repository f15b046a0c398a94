"""Identify the code of a run by a hash of the files that can change the run's numbers.

A finished run whose hash differs from that of the current code is stale. `equivalent_code.txt` lists hashes of code
versions whose golden runs are bit-identical, so that a rename does not make finished runs stale.
`python -m tests.golden --equivalent HASH` adds a line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from mmqk.store.identity import HASH_DIGITS

PACKAGE = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_code.txt")

# Files and folders of mmqk that can change a number of a run. tests/store/test_store_code.py lists the others that a
# run imports.
DECIDES = (
    "checkpoint.py", "config", "data/batch.py", "data/config.py", "data/datamodule.py", "data/mixture.py",
    "data/order", "data/statistics.py", "data/synthetic", "data/tokens", "distributed.py",
    "model", "monitors/collect.py", "monitors/measures", "monitors/probe.py", "monitors/record.py",
    "monitors/training_run", "ranges.py", "data/shards", "store/alarms", "data/tokenizers/autoencoder.py",
    "data/tokenizers/files.py", "data/tokenizers/image.py", "data/tokenizers/text.py",
    "training/fork", "training/fsdp.py", "training/loop/alarms.py",
    "training/loop/device.py", "training/loop/processes.py", "training/loop/resume.py",
    "training/loop/step_log.py", "training/step",
)  # fmt: skip


def lists(file: str, names: Iterable[str]) -> bool:
    """Return whether a file of mmqk (`model/norms.py`) is one of ``names``, or lies in a folder that is one of
    ``names``."""
    return any(file == name or file.startswith(f"{name}/") for name in names)


@cache
def code_hash(package: Path = PACKAGE) -> str:
    """Return the hash of the files of `DECIDES` as they were at the first call (10 hex digits)."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        if lists(file, DECIDES):
            source = path.read_bytes()
            digest.update(f"{file}\0{len(source)}\0".encode())
            digest.update(source)
    return digest.hexdigest()[:HASH_DIGITS]


def same_code(a: str | None, b: str | None, listed: Path = EQUIVALENT) -> bool:
    """Return whether two code hashes are equal or listed as equivalent, directly or through other hashes.

    A run that several versions of the code trained has their hashes, joined by "+". All of them must be equivalent.
    """
    if a is None or b is None:
        return False
    codes = {*a.split("+"), *b.split("+")}
    if len(codes) == 1:
        return True
    classes: list[set[str]] = []
    for line in listed.read_text().splitlines() if listed.exists() else ():
        joined = set(line.partition("#")[0].split())
        for other in [c for c in classes if c & joined]:
            joined |= other
            classes.remove(other)
        classes.append(joined)
    return any(codes <= c for c in classes)
