"""The lock that lets one process at a time train in a run folder. It ends with its process, even after a kill."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from mmqk.store.errors import UserError

LOCK_NAME = "run.lock"
# `is_locked` takes the lock for an instant, which must not make a run fail.
_WAIT_SECONDS = 0.2


def lock_folder(folder: Path) -> FileLock:
    """Lock a run folder; ``release()`` unlocks it.

    Raises:
        UserError: this or another process holds the lock, or the file system has no locks.
        OSError: the lock file cannot be written.
    """
    lock = FileLock(folder / LOCK_NAME, timeout=_WAIT_SECONDS, thread_local=False)
    try:
        lock.acquire(poll_interval=0.02)
    except Timeout:
        raise UserError(f"a process is already training in {folder}: wait for it or give another --out") from None
    except NotImplementedError as error:
        raise UserError(f"{folder} cannot be locked ({error}): put --out on a file system with locks") from error
    return lock


def is_locked(folder: Path) -> bool:
    """Return whether a living process trains in ``folder`` (False for a folder without a lock file)."""
    if not (folder / LOCK_NAME).exists():
        return False
    try:
        with FileLock(folder / LOCK_NAME, timeout=0):
            return False
    except (Timeout, PermissionError):
        return True
