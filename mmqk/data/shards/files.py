"""Find the files of shards, and read tars of samples by offset, after one pass over the headers.

webdataset splits a name into key and field. tarfile reads the headers, because webdataset's reader gives no offsets,
does not count the files that it skips, and reads a truncated archive without an error. Nothing is extracted: a name
such as ``../x`` is only a key.
"""

from __future__ import annotations

import glob
import os
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from braceexpand import braceexpand

from mmqk.data.shards.samples import IGNORED, ReasonCounts, printable
from mmqk.store import UserError, check_local, check_regular
from mmqk.store.errors import reason_of

TIMEOUT = 30  # seconds without a byte
REWRITE = "copy or download it again, or write it again"
# The first bytes of gzip, bzip2, xz and zstd.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")


def is_remote(name: str) -> bool:
    """Return whether a name is a URL."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", name) is not None


def shard_names(pattern: str) -> list[str]:
    """Return the shards that a pattern names, in order: URLs, or the paths of `expand`.

    A brace range of URLs is not compared with what exists; a glob lists its folder.

    Raises:
        UserError: the pattern names no shard, or the engine of its protocol is missing.
    """
    if not is_remote(pattern):
        return [str(path) for path in expand([pattern])]
    found: list[str] = []
    for name in _braces(pattern):
        address = name.partition("://")[2]
        if "*" in address or "[" in address or ("?" in address and not name.startswith("http")):
            system = filesystem(name)
            try:
                found += [system.unstrip_protocol(path) for path in sorted(system.glob(name))]
            except Exception as error:
                raise UserError(
                    f"{name} cannot be listed ({reason_of(error)}): check the address and the access"
                ) from None
        else:
            found.append(name)
    if not found:
        raise UserError(f"{pattern} names no shard: check the address")
    if len(set(found)) < len(found):
        raise UserError(f"{pattern} names a shard twice: name each shard once")
    return found


def filesystem(url: str) -> Any:
    """Return fsspec's file system of a URL, with time limits.

    Raises:
        UserError: its engine is not installed, or the protocol is unknown.
    """
    import fsspec

    protocol = url.partition("://")[0]
    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT)
        options["client_kwargs"] = {"timeout": timeout}
    elif protocol in ("s3", "s3a"):
        options["config_kwargs"] = {"connect_timeout": TIMEOUT, "read_timeout": TIMEOUT}
    try:
        return fsspec.filesystem(protocol, **options)
    except ImportError:
        extra = "mmqk[s3]" if protocol.startswith("s3") else f"the package of fsspec for {protocol}://"
        raise UserError(f"{url} needs a package that is not installed: pip install '{extra}'") from None
    except ValueError as error:
        raise UserError(f"{url} cannot be read ({error}): give a local path, s3://, https:// or hf://") from None


def base_name(name: str) -> str:
    """Return the file name of a shard."""
    return name.partition("?")[0].rpartition("/")[2] if is_remote(name) else os.path.basename(name)


def expand(patterns: Sequence[str]) -> list[Path]:
    """Return the files that patterns name, in order.

    A pattern can have brace ranges (``a{000..012}b``), lists (``{a,b}``) and globs.

    Raises:
        UserError: a pattern names no file, a missing file, a folder, a pipe or a URL, or a file is named twice.
    """
    files: dict[str, Path] = {}
    real_folder = cache(os.path.realpath)  # a folder can have 100,000 shards
    for pattern in patterns:
        for path in _files_of(pattern):
            check_regular(path)
            folder, name = os.path.split(path)
            real = os.path.realpath(path) if os.path.islink(path) else os.path.join(real_folder(folder), name)
            if files.setdefault(real, path) is not path:
                raise UserError(f"{path} is named twice: name each file once")
    if not files:
        raise UserError("no files are named: give at least one path, such as 'shards/{00000..00099}.tar'")
    return list(files.values())


def _braces(pattern: str) -> list[str]:
    """Return the names that the brace ranges and lists of a pattern stand for."""
    try:
        return list(braceexpand(pattern, escape=False))
    except ValueError:  # unbalanced braces
        return [pattern]


def _files_of(pattern: str) -> Iterator[Path]:
    check_local(pattern)
    whole = os.path.expanduser(pattern)
    for name in [whole] if os.path.exists(whole) else _braces(whole):
        if os.path.exists(os.path.join(name, "tokens.json")):
            raise UserError(f"{name} is a token folder, not a shard: name shards, or read it with data.read tokens")
        if os.path.isdir(name):
            raise UserError(f"{name} is a folder: name its files, such as {os.path.join(name, '*.tar')!r}")
        if os.path.exists(name):
            yield Path(name)
        elif matches := sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else []:
            yield from map(Path, matches)
        elif name == whole:
            raise UserError(f"{pattern} names no file: check the path")
        else:
            raise UserError(f"{pattern} names {name}, which does not exist: check the path and the range")


@dataclass
class TarIndex:
    """The samples of one archive: N samples of M files. The index keeps no file open and can be pickled.

    Attributes:
        path: the archive.
        keys: key of each sample, in the order of the archive.
        fields: field of each file: its name after the first dot, in lower case.
        extent_M2: offset and size of each file in bytes. Flat arrays need little memory for millions of samples.
        first: sample i has the files first[i] to first[i + 1] - 1.
        files: number of files in the archive.
        unread: files that belong to no sample.
    """

    path: Path
    keys: list[str]
    fields: list[str] = field(repr=False)
    extent_M2: np.ndarray = field(repr=False)
    first: np.ndarray = field(repr=False)
    files: int = 0
    unread: ReasonCounts = field(default_factory=ReasonCounts, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, i: int) -> dict[str, bytes]:
        """Read the files of sample i: content by field.

        Raises:
            UserError: the archive is missing or has become shorter.
        """
        sample = {}
        try:
            with open(self.path, "rb") as file:
                for m in range(self.first[i], self.first[i + 1]):
                    offset, size = self.extent_M2[m].tolist()
                    file.seek(offset)
                    content = file.read(size)
                    if len(content) != size:
                        raise UserError(f"shard {self.path} has become shorter while in use: {REWRITE}")
                    sample[self.fields[m]] = content
        except OSError as error:
            raise UserError(f"shard {self.path} cannot be read ({error.strerror}): {REWRITE}") from None
        return sample

    def __iter__(self) -> Iterator[tuple[str, dict[str, bytes]]]:
        for i, key in enumerate(self.keys):
            yield key, self.read(i)


def index_tar(path: Path | str) -> TarIndex:
    """Index an archive from all its headers, and check that it ends with the end-of-archive blocks.

    A file belongs to no sample if its name has no dot or begins with one, or if it is a link, a device or a sparse
    file; `TarIndex.unread` counts these files. Folders are not counted.

    Raises:
        UserError: the file cannot be read as one whole, uncompressed archive, or it contains a file twice or a sample
            in two places.
    """
    path = Path(path)
    keys: dict[str, None] = {}
    fields: list[str] = []
    extent: list[tuple[int, int]] = []
    first, unread = list[int](), ReasonCounts()
    try:
        with open(path, "rb") as file:
            if file.peek(6).startswith(_COMPRESSED):
                raise UserError(f"shard {path} is compressed and cannot be read by offset: unpack it")
            for info, key, name in members(path, Forward(file)):
                if key is None:
                    unread.add(IGNORED, info.name)
                    continue
                if not keys or key != next(reversed(keys)):
                    if key in keys:
                        raise UserError(
                            f"shard {path} has the sample {printable(key)} in two places: write the archive again"
                            " with the files of a sample next to each other, sorted by name"
                        )
                    keys[key] = None
                    first.append(len(fields))
                elif name in fields[first[-1] :]:
                    raise UserError(f"shard {path} has the file {printable(info.name)} twice: write it again")
                fields.append(sys.intern(name))
                extent.append((info.offset_data, info.size))
    except OSError as error:
        raise UserError(f"shard {path} cannot be read ({error.strerror or error}): {REWRITE}") from None
    extent_M2 = np.array(extent, dtype=np.int64).reshape(-1, 2)
    first_N = np.array([*first, len(fields)], dtype=np.int64)
    return TarIndex(path, list(keys), fields, extent_M2, first_N, len(fields) + unread.total, unread)


def members(path: Path | str, file: Forward) -> Iterator[tuple[tarfile.TarInfo, str | None, str]]:
    """Yield each file of a tar with the key and the field of its sample; the key is None for a file of no sample (see
    `index_tar`)."""
    from webdataset.tariterators import base_plus_ext  # imports torch, which --help does not need

    for info in tar_headers(path, file):
        key, name = base_plus_ext(info.name)
        hidden = not key or key.endswith("/")  # of folder/.name webdataset takes folder/ as the key
        if info.isreg() and not info.issparse() and not hidden:
            yield info, key, name.lower()
        elif not info.isdir():
            yield info, None, ""


class Forward:
    """A file that is read from byte ``start`` to its end, as `tarfile` and `tar_headers` need it.

    It never goes back, so the file may be a decompressor or a connection.

    Attributes:
        last: the result of the latest read.
    """

    def __init__(self, file: Any, start: int = 0) -> None:
        self._file, self._at, self.last = file, 0, b""
        self.seek(start)

    def tell(self) -> int:
        return self._at

    def read(self, n: int) -> bytes:
        """Return n bytes, or fewer at the end of the file."""
        self.last = self._file.read(n)
        self._at += len(self.last)
        return self.last

    def readline(self, n: int) -> bytes:
        """Return a line, or its first n bytes."""
        self.last = self._file.readline(n)
        self._at += len(self.last)
        return self.last

    def seek(self, place: int) -> None:
        """Go to a byte after the current one."""
        if place == self._at:
            return
        try:
            self._file.seek(place)
            self._at = place
        except (ValueError, OSError):  # a connection
            while self._at < place and self.read(min(place - self._at, 2**20)):
                pass


def tar_headers(path: Path | str, file: Forward) -> Iterator[tarfile.TarInfo]:
    """Yield every header; the caller may read the content. Then check that the archive ends with the end-of-archive
    blocks.

    Raises:
        UserError: the archive is damaged or truncated, or data follow its end.
    """
    try:
        # With backslashreplace a name that is not UTF-8 stays printable.
        with tarfile.open(fileobj=file, mode="r:", errors="backslashreplace") as tar:  # type: ignore[call-overload]
            while (info := tar.next()) is not None:
                tar.members = []  # tarfile would store all members
                yield info
            end = tar.offset
    except (tarfile.TarError, ValueError, EOFError, OverflowError, IndexError, MemoryError, RecursionError) as error:
        if any(phrase in str(error) for phrase in ("unexpected end", "empty file", "end-of-stream")):
            raise UserError(f"shard {path} is truncated: {REWRITE}") from None
        raise UserError(f"shard {path} is damaged or not a tar archive ({error}): {REWRITE}") from None
    # tarfile treats a damaged or missing header as the end of the archive.
    blocks = file.last + file.read(tarfile.BLOCKSIZE)
    if len(blocks) >= tarfile.BLOCKSIZE and blocks.strip(b"\0"):
        raise UserError(f"shard {path} is damaged (no header at byte {end}): {REWRITE}")
    if len(blocks) < 2 * tarfile.BLOCKSIZE:
        raise UserError(f"shard {path} is truncated: {REWRITE}")
    while rest := file.read(2**20):
        if rest.strip(b"\0"):
            raise UserError(
                f"shard {path} has data after its end, as when archives are concatenated: write one archive, or "
                "name each archive separately"
            )
