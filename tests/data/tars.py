"""Archives and image files for the tests of data."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def encoded(image: Image.Image | np.ndarray, file_format: str, **options: Any) -> bytes:
    """Return the file of an image or of an array of pixels."""
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, file_format, **options)
    return file.getvalue()


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
