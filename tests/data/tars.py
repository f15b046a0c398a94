"""Archives and damaged files for the tests of data."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> Path:
    """Write files, each a name and its content, into a tar."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_samples(path: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> Path:
    """Write samples, each a key and the content of each field, into a tar."""
    return write_tar(path, [(f"{key}.{field}", c) for key, fields in samples for field, c in fields.items()])
