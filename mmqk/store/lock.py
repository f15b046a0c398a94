"""File locks, and the lock that lets one process at a time train in a run folder.

The locks are POSIX (`fcntl.lockf`): a lock ends with its process, even if the process is killed, and forked loader
workers that outlive a killed run do not inherit it. `FolderLock` handles two properties of such locks: a process can
take the same lock twice without an error, and closing *any* descriptor of the file releases the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from mmqk.store.errors import UserError

LOCK_NAME = "run.lock"

# Held locks by file, with the id of the process that took them: a forked child inherits this table, but not the
# locks.
_held: dict[tuple[int, int], int] = {}


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file in the ``with`` block; create the file if it does not exist.

    Args:
        path: the lock file.
        wait: wait until no other process holds the lock.

    Raises:
        BlockingIOError: another process holds the lock, and ``wait`` is false.
        OSError: the file cannot be written or locked.
    """
    descriptor = _lock(path, wait)
    try:
        yield
    finally:
        os.close(descriptor)


class FolderLock:
    """The lock of a run folder, held from construction to `release`.

    Raises:
        UserError: this or another process holds the lock, or the lock file cannot be written.
    """

    def __init__(self, folder: Path):
        path = folder / LOCK_NAME
        if _held_here(path):
            raise UserError(f"this process is already training in {folder}: give another --out")
        try:
            descriptor = _lock(path, wait=False)
        except BlockingIOError:
            holder = path.read_bytes()[:32].decode(errors="replace").strip()
            who = f" (process {holder})" if holder else ""
            raise UserError(
                f"another process{who} is training in {folder}: wait for it or give another --out"
            ) from None
        except OSError as error:
            if error.filename is None:
                raise UserError(
                    f"{path} cannot be locked ({error.strerror}): put --out on a file system with locks"
                ) from error
            raise UserError(f"{path} cannot be written ({error.strerror}): give another --out") from error
        self._descriptor: int | None = descriptor
        self._pid = os.getpid()
        self._key = _file_key(os.fstat(descriptor))
        _held[self._key] = self._pid
        with contextlib.suppress(OSError):  # on a full disk, keep the lock without the process id
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{self._pid}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; a second call, or a call in a forked child, does nothing."""
        if self._descriptor is None:
            return
        os.close(self._descriptor)
        self._descriptor = None
        if os.getpid() == self._pid:
            _held.pop(self._key, None)


def is_locked(folder: Path) -> bool:
    """Return whether a living process trains in ``folder`` (False for a folder without a lock file)."""
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


def _lock(path: Path, wait: bool) -> int:
    """Open and lock a file; return the descriptor. Closing the descriptor releases the lock."""
    # No O_TRUNC: run.lock has the id of the process that holds the lock.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if wait:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            return descriptor
        for attempt in range(11):
            # Try again: `is_locked` takes the lock for an instant, which must not make this call fail.
            time.sleep(0.02 if attempt else 0)
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
        raise BlockingIOError
    except BaseException:
        os.close(descriptor)
        raise


def _held_here(path: Path) -> bool:
    # This uses stat, because opening and closing the file would release the lock.
    try:
        return _held.get(_file_key(os.stat(path))) == os.getpid()
    except OSError:
        return False


def _file_key(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
