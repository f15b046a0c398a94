"""One pass over a shard from front to back, from any sample on: local files and, through fsspec, remote ones."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mmqk.data.shards.archives import Forward, in_sample, tar_headers
from mmqk.data.shards.samples import LINE, LONGEST_LINE
from mmqk.data.stream.cache import ShardCache
from mmqk.data.stream.names import filesystem, is_remote, reason_of
from mmqk.store import UserError

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

    raw: Any
    copy = cache.open(name) if cache is not None and is_remote(name) else None
    if copy is not None:
        raw = copy
    elif is_remote(name):
        how: dict[str, Any] = {"block_size": BUFFER, "cache_type": "readahead"} if ranges else {"block_size": 0}
        raw = io.BufferedReader(filesystem(name).open(name, "rb", **how), 2**18)
    else:
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
        ShardError: the shard cannot be read to its end.
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
        except Exception as error:  # each engine has its own errors
            failures += 1
            ranges = ranges and "range requests" not in str(error)
            final = isinstance(error, (FileNotFoundError, PermissionError)) or not is_remote(name)
            if final or failures == TRIES:
                raise ShardError(reason_of(error)) from None
            time.sleep(PAUSE * 2**failures)


def _read(name: str, file: BinaryIO, start: int, number: int, wanted: Callable[[int], bool]) -> Iterator[Sample]:
    """Return the samples of an open shard from sample ``number`` on, whose first byte is ``start``."""
    suffixes = Path(name.partition("?")[0]).suffixes
    if suffixes[-1:] in ([".parquet"], [".arrow"]):
        return _rows(name, file, number, wanted)
    return (_lines if {".jsonl", ".json"} & set(suffixes) else _tar)(name, Forward(file, start), number, wanted)


def _tar(name: str, file: Forward, number: int, wanted: Callable[[int], bool]) -> Iterator[Sample]:
    from webdataset.tariterators import base_plus_ext

    sample, before = None, list[str]()
    for info in tar_headers(name, file):
        if in_sample(info):
            key, suffix = base_plus_ext(info.name)
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
                sample.fields.setdefault(suffix.lower(), content)
        elif not info.isdir():
            (before if sample is None else sample.unread).append(info.name)
        if sample is not None:
            sample.end = info.offset_data + -(-info.size // 512) * 512
    if sample is not None and wanted(sample.number):
        yield sample


def _lines(name: str, file: Forward, number: int, wanted: Callable[[int], bool]) -> Iterator[Sample]:
    while line := file.readline(LONGEST_LINE + 1):
        rest = line
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE + 1)
        if line.strip() and wanted(number):
            yield Sample(f"line {number + 1}", number, {LINE: line}, end=file.tell())
        number += 1


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
