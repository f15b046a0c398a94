"""Read lines of plain or compressed text files, with the line number; a truncated file is an error."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mmqk.store import UserError

# Longest line in bytes; of a longer line only this many bytes plus one are read into memory.
LONGEST_LINE = 2**24
_CHUNK = 2**16
_XZ_MEMORY = 2**29  # in bytes; xz -9 needs 2**26
_REWRITE = "copy or download it again, or write it again"


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
            lines: IO[bytes] | gzip.GzipFile | io.BufferedReader = raw
            if start.startswith(b"\x1f\x8b"):
                lines = gzip.GzipFile(fileobj=raw)
            elif start.startswith(b"\xfd7zXZ\0"):
                lines = io.BufferedReader(_Xz(raw), _CHUNK)
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


class _Xz(io.RawIOBase):
    """The decompressed content of concatenated xz streams.

    `lzma.LZMAFile` treats a damaged stream, or the zero bytes that may follow a stream, as the end of the file. All
    later lines would be lost without an error.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file, self._stream = file, self._next_stream()

    def _next_stream(self) -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            packed = b""
            if self._stream.eof:
                rest = self._stream.unused_data
                while not (packed := rest.lstrip(b"\0")):
                    if not (rest := self._file.read(_CHUNK)):
                        return 0
                self._stream = self._next_stream()
            elif self._stream.needs_input and not (packed := self._file.read(_CHUNK)):
                raise EOFError
            content = self._stream.decompress(packed, len(buffer))
            if content:
                buffer[: len(content)] = content
                return len(content)
