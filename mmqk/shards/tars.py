"""Index tar archives of samples: one pass over the headers gives the offset of each member.

Nothing is extracted, so a member's name (``../x``, ``/etc/x``) serves only as a key. Members are grouped as in
webdataset: the key is the path up to the first dot of the last part, and the rest names the field. Unlike in
webdataset, a truncated archive is an error.
"""

from __future__ import annotations

import glob
import os
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmqk.shards.unread import HIDDEN, META, NO_DOT, NOT_REGULAR, Unread
from mmqk.store import UserError, check_regular

_REWRITE = "copy or download it again, or write it again"
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
# Splits a name as webdataset does; a file without a dot, or whose name begins with one, is not part of a sample.
_SPLIT = re.compile(r"((?:.*/|)[^/.]+)\.([^/]*)", re.DOTALL)
_BRACES = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}|\{([^{}]*,[^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a sample.

    Attributes:
        field: the part of the file's name after the first dot, in lower case.
        offset: start of its content in the archive, in bytes.
        size: length of its content in bytes.
    """

    field: str
    offset: int
    size: int


@dataclass
class TarIndex:
    """The samples of one archive. The index keeps no file open and can be sent to other processes.

    Attributes:
        path: the archive.
        keys: key of each sample, in the order of the archive.
        length: size of the archive in bytes.
        unread: files that belong to no sample.
        files: number of files in the archive.
    """

    path: Path
    keys: list[str]
    length: int
    # Flat arrays, not objects: an index of millions of samples must fit into memory. The members of sample i
    # are first[i] to first[i + 1].
    _fields: list[str] = field(repr=False)
    _extent_N2: np.ndarray = field(repr=False)  # offset, size
    _first: np.ndarray = field(repr=False)
    unread: Unread = field(default_factory=Unread, repr=False)
    files: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def members(self, i: int) -> list[Member]:
        """The files of sample i with their offsets."""
        return [
            Member(self._fields[m], int(self._extent_N2[m, 0]), int(self._extent_N2[m, 1]))
            for m in range(self._first[i], self._first[i + 1])
        ]

    def read(self, i: int) -> dict[str, bytes]:
        """Read the files of sample i: content by field.

        Raises:
            UserError: the archive is missing or has become shorter.
        """
        sample = {}
        try:
            with open(self.path, "rb") as file:
                for member in self.members(i):
                    file.seek(member.offset)
                    content = file.read(member.size)
                    if len(content) != member.size:
                        raise UserError(f"shard {self.path} has become shorter while in use: {_REWRITE}")
                    sample[member.field] = content
        except OSError as error:
            raise UserError(f"shard {self.path} cannot be read ({error.strerror}): {_REWRITE}") from None
        return sample

    def __iter__(self) -> Iterator[tuple[str, dict[str, bytes]]]:
        for i, key in enumerate(self.keys):
            yield key, self.read(i)


def index_tar(path: Path | str) -> TarIndex:
    """Index an archive from its headers, up to the last block.

    Files whose name has no dot or begins with one belong to no sample and are counted. Links and devices have no
    content and are counted too; their sample lacks the field. Folders are not counted.

    Raises:
        UserError: the file is missing, compressed, not a tar, damaged, truncated or continued after its end, or
            contains a member twice or a sample in two places.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            _refuse_compressed(path, file.read(6))
            length = os.fstat(file.fileno()).st_size
            file.seek(0)
            keys, members, first, unread = _walk(path, file)
    except OSError as error:
        raise UserError(f"shard {path} cannot be read ({error.strerror or error}): {_REWRITE}") from None
    extent_N2 = np.array([(m.offset, m.size) for m in members], dtype=np.int64).reshape(-1, 2)
    fields = [m.field for m in members]
    files = len(members) + unread.total
    return TarIndex(path, keys, length, fields, extent_N2, np.array(first, dtype=np.int64), unread, files)


def expand(patterns: Sequence[str]) -> list[Path]:
    """Return the files that patterns name, in order: brace ranges (``a{000..012}b``), lists, and globs.

    Raises:
        UserError: a pattern names no file, a missing file, a folder, a pipe or a URL, or a file is named twice.
    """
    files: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _files_of(pattern):
            check_regular(path)
            if files.setdefault(path.resolve(), path) is not path:
                raise UserError(f"{path} is named twice: name each file once")
    if not files:
        raise UserError("no files are named: give at least one path, such as 'shards/{00000..00099}.tar'")
    return list(files.values())


def _walk(path: Path, file) -> tuple[list[str], list[Member], list[int], Unread]:
    unread = Unread()
    keys: list[str] = []
    members: list[Member] = []
    first = [0]
    seen: set[str] = set()
    fields: set[str] = set()  # of the current sample
    for info in _headers(path, file):
        if info.isdir():
            continue
        if (split := _SPLIT.fullmatch(info.name)) is None or _is_meta(info.name):
            base = info.name.rpartition("/")[2]
            reason = HIDDEN if base.startswith(".") else NO_DOT if "." not in base else META
            unread.add(reason, info.name)
            continue
        key, name = split[1], sys.intern(split[2].lower())
        if not keys or key != keys[-1]:
            if key in seen:
                raise UserError(
                    f"shard {path} holds the sample {key} in two places: write it with the files of a sample "
                    "side by side, sorted by name"
                )
            seen.add(key)
            keys.append(key)
            fields = set()
            first.append(first[-1])
        if name in fields:
            raise UserError(f"shard {path} holds the file {key}.{name} twice: write it again")
        fields.add(name)
        if info.isreg() and not info.issparse():
            members.append(Member(name, info.offset_data, info.size))
            first[-1] = len(members)
        else:
            unread.add(NOT_REGULAR, info.name)
    return keys, members, first, unread


def _headers(path: Path, file) -> Iterator[tarfile.TarInfo]:
    """Yield every header, then check that the archive ends with its end blocks."""
    try:
        # A name that is not UTF-8 stays printable.
        with tarfile.open(fileobj=file, mode="r:", errors="backslashreplace") as tar:
            end = 0
            while (info := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # tarfile would keep all members
                if tar.offset <= end or info.size < 0:
                    raise tarfile.ReadError("a header leads backwards")
                end = tar.offset
                yield info
            # tarfile treats a damaged or missing header as the end.
            _check_end(path, file, tar.offset)
    except UserError:
        raise
    except tarfile.ReadError as error:
        if file.seek(0, os.SEEK_END) == 0 or "unexpected end" in str(error):
            raise _cut_short(path) from None
        raise UserError(f"shard {path} is no tar archive or is damaged ({error}): {_REWRITE}") from None
    except (tarfile.TarError, ValueError, EOFError, OverflowError, IndexError) as error:
        raise UserError(f"shard {path} is damaged ({error}): {_REWRITE}") from None


def _check_end(path: Path, file, offset: int) -> None:
    file.seek(offset)
    end = file.read(2 * tarfile.BLOCKSIZE)
    if len(end) >= tarfile.BLOCKSIZE and end.strip(b"\0"):
        raise UserError(f"shard {path} is damaged (no header at byte {offset}): {_REWRITE}")
    if len(end) < 2 * tarfile.BLOCKSIZE:
        raise _cut_short(path)
    while rest := file.read(2**20):
        if rest.strip(b"\0"):
            raise UserError(
                f"shard {path} goes on after its end, and what follows would not be read: write archives that "
                "were joined as one, or name them apart"
            )


def _cut_short(path: Path) -> UserError:
    return UserError(f"shard {path} is cut short (it ends early): {_REWRITE}")


def _is_meta(name: str) -> bool:
    return "/" not in name and name.startswith("__") and name.endswith("__")


def _refuse_compressed(path: Path, start: bytes) -> None:
    for magic, (method, unpack) in _PACKED.items():
        if start.startswith(magic):
            raise UserError(
                f"shard {path} is compressed ({method}) and cannot be read by offset: unpack it with {unpack}"
            )


def _files_of(pattern: str) -> Iterator[Path]:
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://|pipe:", pattern):
        raise UserError(f"{pattern} is no local path: download the files and name those")
    for name in _spelt_out(os.path.expanduser(pattern)):
        if os.path.isdir(name):
            raise UserError(f"{name} is a folder: name its files, such as {os.path.join(name, '*.tar')!r}")
        if os.path.exists(name):
            yield Path(name)
        elif matches := sorted(glob.glob(name)) if glob.has_magic(name) else []:
            yield from map(Path, matches)
        elif name == os.path.expanduser(pattern):
            raise UserError(f"{pattern} names no file: check the path")
        else:
            raise UserError(f"{pattern} names {name}, which does not exist: check the path and the range")


def _spelt_out(pattern: str) -> Iterator[str]:
    # Lazy, so that a range with a digit too many stops at the first missing name.
    if (braces := _BRACES.search(pattern)) is None:
        yield pattern
        return
    low, high, words = braces.groups()
    if words is not None:
        values: Iterable[str] = words.split(",")
    else:
        padded = any(len(end) > 1 and end[0] == "0" for end in (low, high))
        width = max(len(low), len(high)) if padded else 0
        step = 1 if int(low) <= int(high) else -1
        values = (f"{n:0{width}d}" for n in range(int(low), int(high) + step, step))
    for value in values:
        for rest in _spelt_out(pattern[braces.end() :]):
            yield pattern[: braces.start()] + value + rest
