"""Atomic writes and checked reads: a reader never sees a partly written file, even if the writer is killed.

`read_json` reads all of mmqk's JSON records (run.json, status.json, ablation.json, manifests).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO

from mmqk.store.errors import UserError

TEMPORARY_SUFFIX = ".mmqk-tmp"

MOST_READ = 2**31  # bytes; all of metrics.jsonl is read at once
RESTORE = "restore it from a copy, or remove it"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set ``path`` as the file of an OSError, because after a failed write the error names no file or a temporary
    file."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


@contextlib.contextmanager
def writing(out: Path | str, advice: str = "give another --out") -> Iterator[None]:
    """Raise an OSError in the ``with`` block as a UserError that names ``out`` and says what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}): {advice}") from error


@contextlib.contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces ``path`` atomically and durably at the end of the ``with`` block.

    Args:
        path: the file to replace or create.
        temporary: path of the temporary file, in the folder of ``path``; by default a hidden file.

    Raises:
        OSError: the folder cannot be written. After any error ``path`` is unchanged.
    """
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with naming(path):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace ``path`` by ``content`` atomically and durably.

    Raises:
        OSError: the folder cannot be written; ``path`` is then unchanged.
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with `write_atomic`; numbers that are not finite become strings (`as_json`)."""
    write_atomic(path, json.dumps(as_json(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def as_json(value: Any) -> Any:
    """Return plain data in which the numbers that are not finite are the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: as_json(inner) for key, inner in value.items()}
    return [as_json(inner) for inner in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to ``out`` at the end of the ``with`` block.

    ``out`` must be empty or absent.

    Raises:
        OSError: the folder cannot be written. After any error the new folder is removed and ``out`` unchanged.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}-", dir=out.parent, ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "folder"  # other users can read it, unlike a temporary folder
        folder.mkdir()
        yield folder
        os.rename(folder, out)


def write_folder(out: Path, files: Mapping[str, bytes | str]) -> None:
    """Write all ``files`` (by relative name) into ``out``, or none of them if one cannot be written.

    Other files in ``out`` are not changed.

    Raises:
        OSError: the folder cannot be written. It is then unchanged, or still absent.
    """
    out = Path(os.path.abspath(out))
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = out.parent if made else out
        with naming(out), tempfile.TemporaryDirectory(TEMPORARY_SUFFIX, f".{out.name}.", beside) as scratch:
            for name, content in files.items():
                path = Path(scratch) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            for folder in sorted({(out / name).parent for name in files}):
                folder.mkdir(parents=True, exist_ok=True)
            for name in files:
                os.replace(Path(scratch) / name, out / name)
    except OSError:
        if made:
            shutil.rmtree(out, ignore_errors=True)
        for folder in made[1:]:
            with contextlib.suppress(OSError):  # the folder has other files
                folder.rmdir()
        raise


class DamagedFile(UserError):
    """A file that exists but cannot be used.

    Attributes:
        path: the file.
        why: what is wrong with it, in a few words without the path.
    """

    def __init__(self, path: Path, why: str, advice: str = RESTORE):
        super().__init__(f"{path} cannot be read ({why}): {advice}")
        self.path, self.why = path, why


def check_local(path: str, field: str = "", advice: str = "download the files and name the copies") -> None:
    """Refuse a URL or a pipe of webdataset.

    Raises:
        UserError: ``path`` is one; the message begins with the field that names it.
    """
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://|pipe:", path):
        raise UserError(f"{field}{' ' * bool(field)}{path} is not a local path: {advice}")


def check_empty(folder: Path, flag: str = "--out") -> None:
    """Refuse a path that exists and is not an empty folder.

    Raises:
        UserError: it is one; ``flag`` is the argument that named it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: give another {flag}.")


def check_regular(path: Path) -> None:
    """Refuse a path that is not a regular file, before a library opens it: reading a pipe may block.

    Raises:
        UserError: the path is a pipe, a device, a socket or a folder.
    """
    if path.exists() and not path.is_file():
        kind = "folder" if path.is_dir() else "pipe" if path.is_fifo() else "device or socket"
        raise UserError(f"{path} is a {kind} and not a regular file: give a file.")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading without blocking: a pipe or a device raises an error at once.

    Raises:
        OSError: the path cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(None, "it is a folder" if stat.S_ISDIR(mode) else "it is not a file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file of at most 2 GiB; see `open_regular`."""
    with naming(Path(path)), open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_READ:
            raise OSError(None, f"it has more than {MOST_READ // 2**20} MiB")
        return file.read()


def read_utf8(path: Path, advice: str = RESTORE) -> str:
    """Return the text of a user's file.

    Raises:
        DamagedFile: the path is missing or not a regular file, or the file is not UTF-8.
    """
    try:
        return read_regular(path).decode()
    except UnicodeDecodeError as error:
        raise DamagedFile(path, "it is not UTF-8 text", advice) from error
    except OSError as error:
        raise DamagedFile(path, error.strerror or "it cannot be opened", advice) from error


def read_json(
    path: Path, types: Mapping[str, type | UnionType] | None = None, advice: str = RESTORE
) -> dict[str, Any] | None:
    """Return the JSON object in ``path``, or None if the file does not exist.

    Args:
        path: the file.
        types: the types of the object's values. Keys may be missing, and other keys are accepted.
        advice: end of the error message, which states what to do.

    Raises:
        DamagedFile: the path is not a regular file with a JSON object of these types.
    """
    try:
        record = json.loads(read_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedFile(path, error.strerror or str(error), advice) from None
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"it is not JSON: {error}", advice) from None
    if not isinstance(record, dict):
        raise DamagedFile(path, "it is not a JSON object", advice)
    for key, kind in (types or {}).items():
        if key in record and not isinstance(record[key], kind):
            raise DamagedFile(path, f"its {key} is {record[key]!r:.40}", advice)
    return record


def is_temporary(path: Path) -> bool:
    """Return whether ``path`` is a temporary file of a killed `write_atomic`."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY_SUFFIX)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    # A rename is durable only after an fsync of the folder. File systems that refuse this fsync do not need it.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
