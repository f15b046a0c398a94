"""``metrics.jsonl``: one line per optimizer step, ``{"step": s, tag: number, ...}``.

A step that an alarm is told of later has a second line; `read_metrics` joins them.

An absent modality is an absent key. Values that are not finite are the strings "nan", "inf" and "-inf",
which JSON has no numbers for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mmqk.store.files import naming, open_regular, parse_json, read_regular, write_atomic

METRICS_NAME = "metrics.jsonl"
LAST_STEP = 2**53  # no run is this long, so a larger number is damage
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsWriter:
    """Appends to a metrics file. A line goes to the file when a later step arrives, or on `flush`.

    A file whose last line was cut by a kill is repaired on opening, so that no new line is glued to it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._step: int | None = None
        self._values: dict[str, float] = {}
        with naming(self.path):
            _repair_end(self.path)
        # Unbuffered: a line that could not be written is not written later, by a close.
        self._file: BinaryIO = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add values of ``step``; values of the step being collected are merged into its line.

        Raises:
            ValueError: a value named "step".
        """
        if "step" in values:
            raise ValueError("'step' is the key of the step itself and cannot name a series")
        if self._step is not None and step != self._step:
            self._emit()
        self._step = step
        self._values.update({name: float(value) for name, value in values.items()})

    def flush(self) -> None:
        """Write what was collected and make it durable: called before every checkpoint."""
        self._emit()
        with naming(self.path):
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> None:
        """Drop every line later than ``step``, as a resume from the checkpoint of ``step`` needs.

        The lines kept are never at risk: the file is replaced whole, or stays as it was.
        """
        self._emit()
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if (record := parse_line(line)) is not None and record["step"] <= step]
        if len(kept) < len(lines):
            self._file.close()
            try:
                write_atomic(self.path, b"".join(kept))
            finally:
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        """Flush and close; doing so twice does no harm."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _emit(self) -> None:
        if self._step is not None:
            record: dict[str, Any] = {"step": self._step}
            record.update({name: as_json(value) for name, value in self._values.items()})
            line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
            with naming(self.path):
                while line:
                    line = line[self._file.write(line) :]
        self._step, self._values = None, {}


class MetricLines(list[dict[str, Any]]):
    """Records by rising step, each ``{"step": int, tag: float}``.

    Attributes:
        truncated: some line, as a rule the last of a killed run, could not be read and is missing here.
    """

    truncated: bool = False


def read_metrics(path: str | os.PathLike[str]) -> MetricLines:
    """The lines of a metrics file, those of one step merged (later values win); empty without a file."""
    steps: dict[int, dict[str, Any]] = {}
    lines = MetricLines()
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return lines
    for line in content.splitlines():
        record = parse_line(line)
        if record is None:
            lines.truncated = True
        else:
            steps.setdefault(record["step"], {}).update(record)
    lines.extend(_with_floats(steps[step]) for step in sorted(steps))
    return lines


def last_metrics(
    path: str | os.PathLike[str], having: str | None = None, tail_bytes: int = 65536
) -> dict[str, Any]:
    """The last whole line of a metrics file (that has the tag ``having``), read from the file's end.

    Empty when there is none in the last ``tail_bytes``.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - tail_bytes))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        if (record := parse_line(line)) is not None and (having is None or having in record):
            return _with_floats(record)
    return {}


def _with_floats(record: dict[str, Any]) -> dict[str, Any]:
    return {k: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in record.items()}


def as_json(value: float) -> float | str:
    """A number as JSON has it: one that is not finite is a string."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def from_json(value: float | str) -> float:
    """The inverse of `as_json`.

    Raises:
        ValueError: another string.
    """
    return float(_NOT_FINITE.get(value, value) if isinstance(value, str) else value)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line, its numbers as JSON has them; None for a line that no run writes."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if is_record(record) else None


def is_record(record: Any) -> bool:
    """Whether this is an object with the number of a step."""
    return isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] < LAST_STEP


def _repair_end(path: Path) -> None:
    """Close a whole last line that lacks its newline; drop one that was cut."""
    try:
        file = open(path, "r+b")  # noqa: SIM115 (the with statement below closes it)
    except FileNotFoundError:
        return
    with file:
        content = file.read()
        start = content.rfind(b"\n") + 1
        if start == len(content):
            return
        if parse_line(content[start:]) is not None:
            file.write(b"\n")
        else:
            file.truncate(start)
