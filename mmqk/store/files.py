"""Files that are whole or absent: a reader never sees half a file, whatever kills the writer."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

TEMPORARY_SUFFIX = ".mmqk-tmp"


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace ``path`` by ``content`` in one step that survives a crash on either side of it.

    Raises:
        OSError: the folder cannot be written; ``path`` is then as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of readable JSON with keys in the order given."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path``, or None when it is absent, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def is_temporary(path: Path) -> bool:
    """Whether ``path`` is what a killed `write_atomic` left behind."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY_SUFFIX)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    # The rename is durable only once the folder is; file systems that refuse this do not need it.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
