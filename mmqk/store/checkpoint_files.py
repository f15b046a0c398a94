"""Names of checkpoint files, and the digest at their end that detects a changed byte (`mmqk.checkpoint`: the content).

A checkpoint is torch's file plus a footer of `FOOTER_BYTES` bytes with the sha256 of everything before it. The footer
is part of the file, so a rename, a copy, a hard link or a kill cannot separate it from the content. torch and zip
tools ignore the footer.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mmqk.store.files import replacing, sync_folder

PARTIAL_SUFFIX, REFUSED_SUFFIX = ".partial", ".refused"
_NAME = re.compile(r"step(\d{8,})\.ckpt", re.ASCII)
_KEPT = re.compile(r"alarm_\w+_step\d{8,}\.ckpt", re.ASCII)
_PREFIX = b"\nmmqk sha256 "
FOOTER_BYTES = len(_PREFIX) + 64 + 1
_CHUNK = 1 << 20


class CheckpointError(Exception):
    """Raised if a checkpoint cannot be used. The message completes the sentence "The checkpoint X ..."."""


def checkpoint_name(step: int) -> str:
    """Return the file name of a step's checkpoint: ``step00000500.ckpt``."""
    return f"step{step:08d}.ckpt"


def named_step(path: Path) -> int | None:
    """Return the step in a checkpoint's file name; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint from `checkpoints_in`.

    Raises:
        ValueError: the file does not have the name of a checkpoint.
    """
    if (step := named_step(checkpoint)) is None:
        raise ValueError(f"{checkpoint} is not named as a checkpoint of a run")
    return step


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the files with a checkpoint's name, oldest first; their content is not checked."""
    return sorted((path for path in folder.glob("step*.ckpt") if named_step(path) is not None), key=step_of)


def strays_in(folder: Path) -> list[Path]:
    """Return the files that end in .ckpt but do not have the name of a checkpoint of mmqk, sorted."""
    return sorted(p for p in folder.glob("*.ckpt") if named_step(p) is None and not _KEPT.fullmatch(p.name))


class _Hashed:
    """A file that is written sequentially. It keeps the sha256 of its bytes, and the error of a failed write."""

    def __init__(self, file: BinaryIO):
        self._file, self._digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def footer(self) -> bytes:
        return _PREFIX + self._digest.hexdigest().encode() + b"\n"


def write_checkpoint(path: Path, write: Callable[[_Hashed], None]) -> None:
    """Write a file with its digest under a temporary name, read it back from the disk, then rename it.

    After this call a valid checkpoint exists, so an older one may be removed.

    Args:
        path: replaced if it exists; its folder is created.
        write: writes the content sequentially to the file that it is called with.

    Raises:
        OSError: the file cannot be written, or its content differs when read back; ``path`` is then unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sync_folder(path.parent.parent)  # otherwise a crash can lose the folder with all its checkpoints
    partial = path.with_suffix(PARTIAL_SUFFIX)
    with replacing(path, partial) as file:
        hashed = _Hashed(file)
        try:
            write(hashed)
        except Exception:  # torch.save raises a RuntimeError after a write that failed halfway
            if hashed.error is not None:
                raise hashed.error from None
            raise
        file.write(hashed.footer())
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # the next read then comes from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            check_digest(partial, hashed.footer())
        except CheckpointError as error:
            raise OSError(errno.EIO, "the bytes read from the disk differ from those written") from error


def check_digest(path: Path, footer: bytes | None = None) -> None:
    """Read a file and check the digest at its end.

    Args:
        path: the file.
        footer: the footer that the file must have; None for any footer that matches the content.

    Raises:
        CheckpointError: the digest is missing or does not match the content.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        left, digest = os.fstat(file.fileno()).st_size - FOOTER_BYTES, hashlib.sha256()
        while left > 0 and (chunk := file.read(min(left, _CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
        ending = file.read()
    if not ending.startswith(_PREFIX):
        raise CheckpointError("is damaged or was not written by mmqk train (the sha256 at its end is missing)")
    if ending != _PREFIX + digest.hexdigest().encode() + b"\n" or ending != (footer or ending):
        raise CheckpointError("is damaged: its content does not match its sha256")


def set_aside(path: Path) -> Path:
    """Rename an unusable checkpoint, so that no run loads it and no data are lost; return its new path."""
    names = (path.name + REFUSED_SUFFIX + (f".{number}" if number > 1 else "") for number in itertools.count(1))
    aside = next(aside for name in names if not (aside := path.with_name(name)).exists())
    os.rename(path, aside)
    sync_folder(path.parent)
    return aside
