"""Copies of remote shards in a local folder of limited size."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mmqk.data.stream.names import base_name, filesystem


@dataclass(frozen=True)
class ShardCache:
    """A folder of whole shards. The least recently used shard is deleted first.

    Processes can share a folder: a file that another process deletes stays readable where it is open.

    Args:
        folder: the folder; it is created if it is missing.
        limit: limit of the size of all its files, in bytes.
    """

    folder: Path
    limit: int

    def open(self, url: str) -> BinaryIO | None:
        """Open the local copy of a shard, and download it first if there is none; None if it is larger than the limit.

        Raises:
            OSError and others of the engine: the download fails, or the disk is full.
        """
        path = self.folder / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{base_name(url)}"
        try:
            file = path.open("rb")
            os.utime(file.fileno())
            return file
        except FileNotFoundError:
            pass
        system = filesystem(url)
        size = system.info(url).get("size")
        if size is not None and size > self.limit:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_room(size or 0)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            system.get_file(url, str(part))
            if size is not None and part.stat().st_size != size:
                raise OSError(f"{part.stat().st_size} of {size} bytes were sent")
            file = part.open("rb")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return file

    def _make_room(self, size: int) -> None:
        files = []
        for path in self.folder.iterdir():
            try:
                files.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:  # another process made room
                continue
        used = sum(file[1] for file in files)
        for _, of_file, path in sorted(files):
            if used + size <= self.limit:
                return
            path.unlink(missing_ok=True)
            used -= of_file
