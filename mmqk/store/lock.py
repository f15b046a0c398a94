"""One process per run folder.

The lock is POSIX (`fcntl.lockf`): it ends with the process, however that ends, and forked loader workers
that outlive a killed run do not inherit it. Two properties of such locks need care, and get it here: the
same process may take a lock twice without noticing, and closing *any* descriptor of the file drops it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from mmqk.store.errors import UserError

LOCK_NAME = "run.lock"

# Locks of this process by file, with the process that took them: a forked child has the table, not the locks.
_held: dict[tuple[int, int], int] = {}


class FolderLock:
    """The lock of a run folder, held from construction to `release`.

    Raises:
        UserError: another process, or this one, holds it; the lock file cannot be written.
    """

    def __init__(self, folder: Path):
        path = folder / LOCK_NAME
        if _held_here(path):
            raise UserError(f"this process is already training in {folder}: give another --out")
        try:
            # Not O_TRUNC: the holder's process id stands in the file.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}): give another --out") from error
        try:
            _take(descriptor)
        except OSError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise UserError(
                    f"{path} cannot be locked ({error.strerror}): put --out on a file system with locks"
                ) from error
            who = f" (process {holder})" if holder else ""
            raise UserError(
                f"another process{who} is training in {folder}: wait for it or give another --out"
            ) from None
        self._descriptor: int | None = descriptor
        self._pid = os.getpid()
        self._key = _file_key(os.fstat(descriptor))
        _held[self._key] = self._pid
        with contextlib.suppress(OSError):  # a full disk must not cost the run its lock
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{self._pid}\n".encode(), 0)

    def release(self) -> None:
        """Let go of the folder; doing so twice, or in a forked child, does no harm."""
        if self._descriptor is None:
            return
        os.close(self._descriptor)
        self._descriptor = None
        if os.getpid() == self._pid:
            _held.pop(self._key, None)


def is_locked(folder: Path) -> bool:
    """Whether a living process trains in ``folder`` (False for a folder without a lock file)."""
    path = folder / LOCK_NAME
    if _held_here(path):
        return True
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _take(descriptor: int) -> None:
    # `is_locked` holds the lock for an instant: a run that starts in that instant must not be refused.
    for _ in range(10):
        with contextlib.suppress(BlockingIOError, PermissionError):
            return fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _held_here(path: Path) -> bool:
    # Asked by stat, not by open: opening and closing the file would drop the lock that is held.
    try:
        return _held.get(_file_key(os.stat(path))) == os.getpid()
    except OSError:
        return False


def _file_key(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
