"""Read the samples of a shard from front to back: a tar, a file of lines, or a table.

`read_samples` reads a local file and ends with an error if it is damaged. `samples_of` reads a local or remote shard
from any sample on, for runs that read shards while they train.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mmqk.data.shards.files import REWRITE, Forward, base_name, filesystem, index_tar, is_remote, members
from mmqk.data.shards.samples import LINE, LONGEST_LINE
from mmqk.store import UserError
from mmqk.store.errors import reason_of


def read_samples(path: Path, kind: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the name and the content by field of each sample of a tar, or of each line of a file of kind text."""
    if kind != "text":
        yield from index_tar(path)
        return
    for number, line in read_lines(path):
        if line.strip():
            yield f"line {number}", {LINE: line}


def _cut_lines(file: Any) -> Iterator[bytes]:
    """Yield each line, of a line longer than `LONGEST_LINE` only the first `LONGEST_LINE` + 1 bytes."""
    while line := file.readline(LONGEST_LINE + 1):
        rest = line
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE + 1)
        yield line


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
            yield from enumerate(_cut_lines(lines), 1)
    except EOFError:
        raise UserError(f"{path} is truncated: {REWRITE}") from None
    except (OSError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): {REWRITE}") from None


# A download has this suffix until it is complete; one that has not grown for ABANDONED seconds may be deleted.
PART, ABANDONED = ".part", 3600
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no remote engine raises them


class CacheError(OSError):
    """The folder of a `ShardCache` cannot be written."""


@dataclass(frozen=True)
class ShardCache:
    """A folder of whole shards. The least recently used shard is deleted first.

    Processes can share a folder: a file that another process deletes stays readable where it is open.

    Args:
        folder: the folder; it is created if it is missing.
        limit: limit of the size of its files in bytes; downloads in progress may exceed it.
    """

    folder: Path
    limit: int

    def open(self, url: str) -> BinaryIO | None:
        """Open the local copy of a shard, and download it first if there is none; None if it is larger than the limit.

        Raises:
            CacheError: the folder cannot be written. OSError and others of the engine: the download fails.
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
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PART}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size or 0)
            part.touch()
        except OSError as error:
            raise CacheError(error.errno, error.strerror, str(self.folder)) from error
        try:
            system.get_file(url, str(part))
            if size is not None and part.stat().st_size != size:
                raise OSError(f"{part.stat().st_size} of {size} bytes were sent")
            file = part.open("rb")
            part.replace(path)
            self._make_room(0)  # another process may have filled it meanwhile
        except OSError as error:
            if error.errno in FULL:
                raise CacheError(error.errno, error.strerror, str(self.folder)) from error
            raise
        finally:
            part.unlink(missing_ok=True)
        return file

    def _make_room(self, size: int) -> None:
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process made room
                files.append((path.stat().st_mtime, path.stat().st_size, path))
        used = sum(file[1] for file in files)
        for age, of_file, path in sorted(files):
            if used + size <= self.limit:
                return
            if path.suffix != PART or age < time.time() - ABANDONED:
                path.unlink(missing_ok=True)
                used -= of_file


# A remote shard is given up after this many failures in a row, each followed by twice the pause (seconds).
TRIES, PAUSE = 4, 0.5
BUFFER = 2**22  # bytes that are read ahead from a remote shard


class ShardError(Exception):
    """A shard cannot be read to its end; the message is the reason."""


@dataclass
class Sample:
    """One sample of a shard.

    Attributes:
        key: its key, or the number of its line.
        number: its number in the shard, from 0.
        fields: content by field.
        unread: names of the files around it that belong to no sample.
        end: the byte of the shard from which reading continues after it (of its content, if it is compressed).
    """

    key: str
    number: int
    fields: dict[str, bytes] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    end: int = 0


def open_shard(name: str, ranges: bool = True, cache: ShardCache | None = None) -> BinaryIO:
    """Open the content of a shard, decompressed by its suffix (.gz, .xz, .bz2, .zst).

    Args:
        name: path or URL.
        ranges: whether its server can begin an answer at any byte.
        cache: where a remote shard is copied to before it is read.

    Raises:
        UserError: an engine is not installed. OSError and others: the shard cannot be opened.
    """
    from fsspec.utils import infer_compression

    raw: Any = cache.open(name) if cache is not None and is_remote(name) else None
    if raw is None and is_remote(name):
        how: dict[str, Any] = {"block_size": BUFFER, "cache_type": "readahead"} if ranges else {"block_size": 0}
        raw = io.BufferedReader(filesystem(name).open(name, "rb", **how), 2**18)
    elif raw is None:
        raw = open(name, "rb")  # noqa: SIM115 - the caller closes it
    compression = infer_compression(name)
    if compression is None:
        return raw
    from fsspec.compression import compr

    if compression not in compr:
        raise UserError(f"shard {name} needs a package that is not installed: pip install zstandard")
    return io.BufferedReader(compr[compression](raw, mode="rb"), 2**18)


def samples_of(
    name: str, start: int = 0, number: int = 0, stride: int = 1, rest: int = 0, cache: ShardCache | None = None
) -> Iterator[Sample]:
    """Read a tar, a file of lines or a table from a sample on, and yield the samples whose number modulo ``stride`` is
    ``rest``.

    A remote shard that fails is opened again at the next sample. A pause follows each failure.

    Args:
        name: path or URL.
        start: `Sample.end` of an earlier sample, or 0.
        number: number of the sample at ``start``.
        stride, rest: which samples to yield.
        cache: as for `open_shard`.

    Raises:
        ShardError: the shard cannot be read to its end. CacheError: the cache cannot be written.
    """

    def wanted(n: int) -> bool:
        return n % stride == rest

    failures, ranges = 0, True
    while True:
        try:
            with contextlib.closing(open_shard(name, ranges, cache)) as file:
                for sample in _read(name, file, start, number, wanted):
                    start, number, failures = sample.end, sample.number + 1, 0
                    yield sample
            return
        except CacheError:
            raise
        except Exception as error:  # each engine has its own errors
            failures += 1
            ranges = ranges and "range requests" not in str(error)
            final = isinstance(error, (FileNotFoundError, PermissionError)) or not is_remote(name)
            if final or failures == TRIES:
                if isinstance(error, UserError):  # names the shard and what to do, as the caller does
                    raise ShardError(re.sub(r"^shard \S+ ", "it ", str(error)).partition(f": {REWRITE}")[0]) from None
                raise ShardError(reason_of(error)) from None
            time.sleep(PAUSE * 2**failures)


def _read(name: str, file: BinaryIO, start: int, number: int, wanted: Callable[[int], bool]) -> Iterator[Sample]:
    """Return the samples of an open shard from sample ``number`` on, whose first byte is ``start``."""
    suffixes = Path(name.partition("?")[0]).suffixes
    if suffixes[-1:] in ([".parquet"], [".arrow"]):
        return _rows(name, file, number, wanted)
    return (_lines if {".jsonl", ".json"} & set(suffixes) else _tar)(name, Forward(file, start), number, wanted)


def _tar(name: str, file: Forward, number: int, wanted: Callable[[int], bool]) -> Iterator[Sample]:
    sample, before = None, list[str]()
    for info, key, field_name in members(name, file):
        if key is None:
            (before if sample is None else sample.unread).append(info.name)
        else:
            if sample is None or key != sample.key:
                if sample is not None:
                    if wanted(sample.number):
                        yield sample
                    number += 1
                sample, before = Sample(key, number, unread=before), []
            if wanted(number):
                content = file.read(info.size)
                if len(content) != info.size:
                    raise ShardError("the shard is truncated")
                sample.fields.setdefault(field_name, content)
        if sample is not None:
            sample.end = info.offset_data + -(-info.size // 512) * 512
    if sample is not None and wanted(sample.number):
        yield sample


def _lines(name: str, file: Forward, number: int, wanted: Callable[[int], bool]) -> Iterator[Sample]:
    for n, line in enumerate(_cut_lines(file), number):
        if line.strip() and wanted(n):
            yield Sample(f"line {n + 1}", n, {LINE: line}, end=file.tell())


def _rows(name: str, file: BinaryIO, number: int, wanted: Callable[[int], bool]) -> Iterator[Sample]:
    """Yield the texts of a Parquet file, or of an Arrow stream as Hugging Face datasets keep on disk, from row
    ``number`` on, as lines of JSON."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"shard {name} needs a package that is not installed: pip install 'mmqk[parquet]'") from None

    def batches() -> Iterator[tuple[int, pa.RecordBatch]]:
        at = 0
        if ".parquet" not in name:
            for batch in pa.ipc.open_stream(file):
                if "text" not in batch.schema.names:
                    raise ShardError("it has no column text")
                yield at, batch
                at += len(batch)
            return
        table = pq.ParquetFile(file)
        if "text" not in table.schema_arrow.names:
            raise ShardError("it has no column text")
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if at + rows > number:
                for batch in table.iter_batches(1024, [group], ["text"]):
                    yield at, batch
                    at += len(batch)
            else:
                at += rows

    for first, batch in batches():
        for n, text in enumerate(batch.column("text").to_pylist() if first + len(batch) > number else (), first):
            if n >= number and wanted(n):
                yield Sample(f"row {n + 1}", n, {LINE: json.dumps({"text": text}).encode()})
