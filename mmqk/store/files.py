"""Atomic writes, checked reads, and the files that ship with mmqk.

A reader never sees a partly written file, even if the writer is killed.

`read_json` reads all of mmqk's JSON records (run.json, status.json, ablation.json, manifests).
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mmqk.store.errors import UserError

TEMPORARY_SUFFIX = ".mmqk-tmp"

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


def json_line(value: Any) -> bytes:
    """Return plain data as one line of JSON (`as_json`)."""
    return json.dumps(as_json(value), separators=(",", ":")).encode() + b"\n"


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
        OSError: the folder cannot be written. Its files are then unchanged.
    """
    with naming(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(TEMPORARY_SUFFIX, ".", out) as scratch:
            for name, content in files.items():
                path = Path(scratch) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            for folder in sorted({(out / name).parent for name in files}):
                folder.mkdir(parents=True, exist_ok=True)
            for name in files:
                os.replace(Path(scratch) / name, out / name)


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


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a user's file; see `check_regular`."""
    check_regular(Path(path))
    return Path(path).read_bytes()


def read_utf8(path: Path, advice: str = RESTORE) -> str:
    """Return the text of a user's file.

    Raises:
        DamagedFile: the path is missing or not a regular file, or the file is not UTF-8.
    """
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DamagedFile(path, "it is not UTF-8 text", advice) from error
    except OSError as error:
        raise DamagedFile(path, error.strerror or "it cannot be opened", advice) from error


def read_json(path: Path, advice: str = RESTORE) -> dict[str, Any] | None:
    """Return the JSON object in ``path``, or None if the file does not exist; ``advice`` ends the error message.

    Raises:
        DamagedFile: the path is not a file with a JSON object.
    """
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedFile(path, error.strerror or str(error), advice) from None
    except ValueError as error:
        raise DamagedFile(path, f"it is not JSON: {error}", advice) from None
    if not isinstance(record, dict):
        raise DamagedFile(path, "it is not a JSON object", advice)
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


# The files that ship with mmqk ------------------------------------------------------------------------------

# configs/, data/ and reports/bench/ are beside the package in a checkout, and in mmqk/shipped in an installed package.
PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = PACKAGE / "shipped" if (PACKAGE / "shipped").is_dir() else PACKAGE.parent
FOLDERS = ("configs", "data", "reports")

# Folders in which the name of a config or a grid is looked up.
CONFIGS = ("configs",)
GRIDS = ("configs/ablations", "configs/claims", "configs/failures")


def find_file(path: str | Path) -> Path:
    """Return the path of a file in the working directory or, if it is not there, among the shipped files. If the file
    is in neither place, return ``path`` unchanged."""
    path = Path(path)
    shipped = SHIPPED / path
    here = path.is_absolute() or path.exists() or path.parts[:1] == () or path.parts[0] not in FOLDERS
    return path if here or not shipped.exists() else shipped


def named_config(name: str, folders: Sequence[str] = CONFIGS) -> Path | None:
    """Return the file that a name (``demo``, ``recipes/olmo2``) or a path (``configs/demo.yaml``) stands for; None if
    there is none."""
    named = (SHIPPED / folder / f"{name}.yaml" for folder in folders)
    return next((path for path in (find_file(name), *named) if path.is_file()), None)


def _config(value: str, folders: Sequence[str]) -> str:
    """Return the value of ``--config`` with a shipped name replaced by the path of its file."""
    file = named_config(value, folders)
    grid = (file or named_config(value, GRIDS)) if folders == CONFIGS else None
    if grid is not None and re.search(rb"^arms\s*:", grid.read_bytes(), re.MULTILINE):
        raise UserError(
            f"{value} is a grid of runs, not the configuration of one run: train it with mmqk ablate {value}"
        )
    if file is not None:
        return str(file)
    if Path(value).suffix or Path(value).exists():
        return value  # the code that reads the file raises the error
    roots = [SHIPPED / folder for folder in folders]
    files = [(root, path) for root in roots for path in (*root.glob("*.yaml"), *root.glob("recipes/*.yaml"))]
    names = sorted(path.relative_to(root).with_suffix("").as_posix() for root, path in files)
    raise UserError(
        f"{value} is neither a file nor the name of a shipped {'grid' if folders == GRIDS else 'configuration'}: give a"
        f" path, or one of {', '.join(difflib.get_close_matches(value, names, n=1) or names)}"
    )


def with_configs(argv: Sequence[str], folders: Sequence[str] = CONFIGS) -> list[str]:
    """Return a command line in which the value of each ``--config`` is a path.

    The first words are configs too, up to one with leading dashes or with ``=``: ``demo optim.lr=0.01`` becomes
    ``--config path/to/configs/demo.yaml optim.lr=0.01``.

    Args:
        argv: the command line.
        folders: the shipped folders in which names are looked up.

    Raises:
        UserError: a config is neither a file nor a shipped name, or is a grid although one run is trained.
    """
    words, place = list(argv), 0
    while place < len(words) and not words[place].startswith("-") and "=" not in words[place]:
        words.insert(place, "--config")
        place += 2
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--config" and equals:
            words[i] = f"--config={_config(value, folders)}"
        elif i and words[i - 1] == "--config" and not word.startswith("-"):
            words[i] = _config(word, folders)
    return words
