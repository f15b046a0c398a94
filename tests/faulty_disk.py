"""Simulate a disk on which one file operation of a process fails, and optionally every later write too."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WRITES = {"open for writing", "write", "fsync", "mkdir", "replace", "rename", "ftruncate", "pwrite", "truncate"}
PATHS = ("open", "replace", "rename", "unlink", "mkdir", "link", "scandir", "listdir")
DESCRIPTORS = ("fsync", "ftruncate", "pwrite")
Site = tuple[str, str]


class _File:
    """An open file that reports its operations to the `Disk`."""

    def __init__(self, file: Any, path: str, disk: Disk):
        self._file, self._path, self._disk = file, path, disk

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        if name in ("read", "truncate", "readline", "readinto", "flush"):
            self._disk.see("write" if name == "flush" else name, self._path)
        return found

    def write(self, data: Any) -> Any:
        self._disk.see("write", self._path)
        return self._disk.write(self._file, data)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *exc: object) -> Any:
        return self._file.__exit__(*exc)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)


class Disk:
    """Intercept every file operation below ``root``; call number ``nth`` (from 0) at ``site`` fails with ``code``.

    Attributes:
        seen: index of the last call at each site; a site is an operation and a file name with all numbers set to 0.
        failed: whether the chosen operation was reached and failed.
    """

    def __init__(
        self, root: Path, site: Site | None = None, nth: int = 0, code: int = errno.ENOSPC, stays_full: bool = False
    ):
        self.root, self.site, self.nth, self.code, self.stays_full = str(root), site, nth, code, stays_full
        self.seen: dict[Site, int] = {}
        self.failed = False

    def see(self, operation: str, path: Any) -> None:
        path = os.fsdecode(path)
        if not path.startswith(self.root):
            return
        name = re.sub(r"\.\w{8}(?=\.mmqk-tmp)", "", os.path.relpath(path, self.root))  # drop the random part
        name = re.sub(r"tfevents.*|tmp\w+$", "", re.sub(r"\d+", "0", name))
        site = (operation, name)
        self.seen[site] = self.seen.get(site, -1) + 1
        now = site == self.site and self.seen[site] == self.nth
        if now or (self.failed and self.stays_full and operation in WRITES):
            self.failed = True
            self.strike(operation, path)

    def strike(self, operation: str, path: str) -> None:
        """Raise the error of the chosen operation."""
        # The operating system does not name the file if an operation on an open file fails.
        named = () if operation in (*DESCRIPTORS, "write", "read", "truncate", "readinto") else (path,)
        raise OSError(self.code, os.strerror(self.code), *named)

    def write(self, file: Any, data: Any) -> Any:
        return file.write(data)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Disk]:
        with pytest.MonkeyPatch.context() as patch:
            opened = io.open

            def fake_open(path, mode="r", *rest, **more):
                if isinstance(path, int):
                    return opened(path, mode, *rest, **more)
                self.see("open for writing" if set(mode) & set("wax+") else "open", path)
                file = opened(path, mode, *rest, **more)
                return _File(file, os.fsdecode(path), self) if os.fsdecode(path).startswith(self.root) else file

            patch.setattr(builtins, "open", fake_open)
            patch.setattr(io, "open", fake_open)
            for name in PATHS:
                patch.setattr(os, name, self._of_path(name, getattr(os, name)))
            for name in DESCRIPTORS:
                patch.setattr(os, name, self._of_descriptor(name, getattr(os, name)))
            yield self

    def _of_path(self, name: str, call: Any) -> Any:
        def fake(path=".", *rest, **more):
            if not isinstance(path, int):
                self.see(name, path)
            return call(path, *rest, **more)

        return fake

    def _of_descriptor(self, name: str, call: Any) -> Any:
        def fake(descriptor, *rest):
            self.see(name, os.readlink(f"/proc/self/fd/{descriptor}"))
            return call(descriptor, *rest)

        return fake
