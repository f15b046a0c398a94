"""Read archives: tars of samples, by offset, and files of lines.

One pass over the headers of a tar gives the offset of each file.

webdataset groups the files into samples. tarfile reads the headers, because webdataset's reader gives no offsets,
does not count the files that it skips, and reads a truncated archive without an error. Nothing is extracted: a name
such as ``../x`` is only a key.
"""

from __future__ import annotations

import glob
import gzip
import lzma
import os
import sys
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from braceexpand import braceexpand

from mmqk.data.shards.samples import IGNORED, LINE, LONGEST_LINE, ReasonCounts, printable
from mmqk.store import UserError, check_local, check_regular

_REWRITE = "copy or download it again, or write it again"
# The first bytes of gzip, bzip2, xz and zstd.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")


@dataclass
class TarIndex:
    """The samples of one archive: N samples of M files. The index keeps no file open and can be pickled.

    Attributes:
        path: the archive.
        length: size of the archive in bytes.
        keys: key of each sample, in the order of the archive.
        fields: field of each file: its name after the first dot, in lower case.
        extent_M2: offset and size of each file in bytes. Flat arrays need little memory for millions of samples.
        first: sample i has the files first[i] to first[i + 1] - 1.
        files: number of files in the archive.
        unread: files that belong to no sample.
    """

    path: Path
    length: int
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
                        raise UserError(f"shard {self.path} has become shorter while in use: {_REWRITE}")
                    sample[self.fields[m]] = content
        except OSError as error:
            raise UserError(f"shard {self.path} cannot be read ({error.strerror}): {_REWRITE}") from None
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
    from webdataset.tariterators import group_by_keys  # imports torch, which --help does not need

    path = Path(path)
    keys: dict[str, None] = {}
    fields: list[str] = []
    extent: list[tuple[int, int]] = []
    first, unread = [0], ReasonCounts()
    try:
        with open(path, "rb") as file:
            if file.peek(6).startswith(_COMPRESSED):
                raise UserError(f"shard {path} is compressed and cannot be read by offset: unpack it")
            for sample in group_by_keys(_files(path, file, unread)):
                key = sample.pop("__key__")
                if key in keys:
                    raise UserError(
                        f"shard {path} has the sample {printable(key)} in two places: write the archive again"
                        " with the files of a sample next to each other, sorted by name"
                    )
                keys[key] = None
                for name, place in sample.items():
                    if name != "__url__":
                        fields.append(sys.intern(name))
                        extent.append(place)
                first.append(len(fields))
            length = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise UserError(f"shard {path} cannot be read ({error.strerror or error}): {_REWRITE}") from None
    except ValueError as error:  # from group_by_keys
        name = str(error.args[0]).partition(": duplicate file name")[0]
        raise UserError(f"shard {path} has the file {printable(name)} twice: write it again") from None
    extent_M2 = np.array(extent, dtype=np.int64).reshape(-1, 2)
    first_N = np.array(first, dtype=np.int64)
    return TarIndex(path, length, list(keys), fields, extent_M2, first_N, len(fields) + unread.total, unread)


def _files(path: Path, file: BinaryIO, unread: ReasonCounts) -> Iterator[dict[str, Any]]:
    """Yield the files of samples in the form that `group_by_keys` takes, and count the other files."""
    for info in tar_headers(path, Forward(file)):
        if in_sample(info):
            yield {"fname": info.name, "data": (info.offset_data, info.size), "__url__": None}
        elif not info.isdir():
            unread.add(IGNORED, info.name)


def in_sample(info: tarfile.TarInfo) -> bool:
    """Return whether a member of a tar is a file of a sample; see `index_tar`."""
    base = info.name.rpartition("/")[2]
    return info.isreg() and not info.issparse() and "." in base and not base.startswith(".")


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
            raise UserError(f"shard {path} is truncated: {_REWRITE}") from None
        raise UserError(f"shard {path} is damaged or not a tar archive ({error}): {_REWRITE}") from None
    # tarfile treats a damaged or missing header as the end of the archive.
    blocks = file.last + file.read(tarfile.BLOCKSIZE)
    if len(blocks) >= tarfile.BLOCKSIZE and blocks.strip(b"\0"):
        raise UserError(f"shard {path} is damaged (no header at byte {end}): {_REWRITE}")
    if len(blocks) < 2 * tarfile.BLOCKSIZE:
        raise UserError(f"shard {path} is truncated: {_REWRITE}")
    while rest := file.read(2**20):
        if rest.strip(b"\0"):
            raise UserError(
                f"shard {path} has data after its end, as when archives are concatenated: write one archive, or "
                "name each archive separately"
            )


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


def _files_of(pattern: str) -> Iterator[Path]:
    check_local(pattern)
    whole = os.path.expanduser(pattern)
    try:
        names = [whole] if os.path.exists(whole) else list(braceexpand(whole, escape=False))
    except ValueError:  # unbalanced braces
        names = [whole]
    for name in names:
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


def read_samples(path: Path, kind: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the name and the content by field of each sample of a tar, or of each line of a file of kind text."""
    if kind != "text":
        yield from index_tar(path)
        return
    for number, line in read_lines(path):
        if line.strip():
            yield f"line {number}", {LINE: line}


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield line number (from 1) and line from a plain, gzip or xz file.

    The compression is detected from the first bytes. Of a line longer than `LONGEST_LINE` bytes only the first
    `LONGEST_LINE` + 1 bytes are returned, which bounds memory, also for a compressed file.

    Raises:
        UserError: the file cannot be read, has another compression, is damaged or truncated (in a plain file,
            truncation cannot be detected).
    """
    try:
        with open(path, "rb") as raw:
            start = raw.peek(6)
            lines: Any = raw
            if start.startswith(b"\x1f\x8b"):
                lines = gzip.GzipFile(fileobj=raw)
            elif start.startswith(b"\xfd7zXZ\0"):
                lines = lzma.LZMAFile(raw)  # noqa: SIM115
            elif start.startswith((b"BZh", b"\x28\xb5\x2f\xfd")):
                raise UserError(f"{path} is compressed with bzip2 or zstd: decompress it, or use gzip or xz")
            number = 0
            while line := lines.readline(LONGEST_LINE + 1):
                number += 1
                rest = line
                while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
                    rest = lines.readline(LONGEST_LINE + 1)
                yield number, line
    except EOFError:
        raise UserError(f"{path} is truncated: {_REWRITE}") from None
    except (OSError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): {_REWRITE}") from None
