"""The logged series: the names of series, and ``metrics.jsonl``, which has one line per optimizer step.

A tag names a series: ``statistic/modality/layerNN/headNN``.

loss                                     one series per run
loss/image                               by modality
q_norm/text/layer03                      by modality and layer
attn_logit_absmax/text-image/layer03     by query and key modality, and layer
attn_logit_bound/layer03                 by layer
.../layer03/head02                       by head

A line of metrics.jsonl is ``{"step": s, tag: number, ...}``. A step that gets an alarm after its line was written has
a second line; `read_metrics` merges the two lines. A modality that is absent from a step has no keys in the line of
that step. Values that are not finite are the strings "nan", "inf" and "-inf", since JSON has no such numbers.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mmqk.store.files import json_line, naming, write_atomic

METRICS_NAME = "metrics.jsonl"
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LAYER = re.compile(r"layer\d{2,}")
_TAG = re.compile(r"([^/]+)(?:/([^/]+))??(?:/layer(\d{2,})(?:/head(\d{2,}))?)?")


class Tag(NamedTuple):
    """The parts of a tag; ``modality`` is "text", or "text-image" for query text and key image."""

    statistic: str
    modality: str | None = None
    layer: int | None = None
    head: int | None = None

    @property
    def pair(self) -> tuple[str, str] | None:
        """(query modality, key modality), or None when the tag has one modality or none."""
        query, dash, key = (self.modality or "").partition("-")
        return (query, key) if dash else None


def tag(statistic: str, *modalities: str, layer: int | None = None, head: int | None = None) -> str:
    """Build a tag from a statistic, up to two modality names (query, key), a layer and a head.

    Raises:
        ValueError: a name that `parse_tag` could not parse.
    """
    if not statistic or "/" in statistic:
        raise ValueError(f"a statistic's name has no '/' and is not empty: {statistic!r}")
    for name in modalities:
        if not name or "/" in name or "-" in name or _LAYER.fullmatch(name):
            raise ValueError(f"a modality's name has no '/' or '-' and is not like layer03: {name!r}")
    of_layer = "" if layer is None else f"layer{layer:02d}"
    of_head = "" if head is None else f"head{head:02d}"
    return "/".join(filter(None, (statistic, "-".join(modalities), of_layer, of_head)))


@lru_cache(maxsize=65536)
def parse_tag(text: str) -> Tag:
    """Return the parts of a tag, the inverse of `tag`; a name of any other form is a statistic as a whole."""
    if (match := _TAG.fullmatch(text)) is None:
        return Tag(text)
    statistic, modality, layer, head = match.groups()
    return Tag(statistic, modality, None if layer is None else int(layer), None if head is None else int(head))


class MetricsWriter:
    """Appends to a metrics file. A step is written when a later step arrives, or on `flush`.

    A killed process may leave a last line without a newline. Opening the file completes or removes this line.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._step: int | None = None
        self._values: dict[str, float] = {}
        with naming(self.path):
            _repair_end(self.path)
        # The file is unbuffered, so that after a failed write, close does not write the line again.
        self._file: BinaryIO = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add values of ``step``. All values added for one step become one line.

        Raises:
            ValueError: a value is named "step".
        """
        if "step" in values:
            raise ValueError("'step' is the key of the step itself and cannot name a series")
        if self._step is not None and step != self._step:
            self._emit()
        self._step = step
        self._values.update({name: float(value) for name, value in values.items()})

    def flush(self) -> None:
        """Write the collected values and fsync; called before every checkpoint."""
        self._emit()
        with naming(self.path):
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> None:
        """Remove every line after ``step``, for a resume from the checkpoint of ``step``.

        The file is replaced atomically, so the other lines cannot be lost.
        """
        self._emit()
        lines = self.path.read_bytes().splitlines(keepends=True)
        remaining = [line for line in lines if (record := parse_line(line)) is not None and record["step"] <= step]
        if len(remaining) < len(lines):
            self._file.close()
            try:
                write_atomic(self.path, b"".join(remaining))
            finally:
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _emit(self) -> None:
        if self._step is not None:
            line = json_line({"step": self._step, **self._values})
            with naming(self.path):
                while line:
                    line = line[self._file.write(line) :]
        self._step, self._values = None, {}


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a metrics file in the order of their steps, each ``{"step": int, tag: float}``.

    If the file does not exist, the list is empty.

    The lines of one step are merged, and later values win. A line that cannot be read is skipped.
    """
    steps: dict[int, dict[str, Any]] = {}
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    for record in parse_lines(content)[0]:
        steps.setdefault(record["step"], {}).update(record)
    return [with_floats(steps[step]) for step in sorted(steps)]


def last_metrics(path: str | os.PathLike[str], having: str | None = None, tail_bytes: int = 65536) -> dict[str, Any]:
    """Return the last complete record of a metrics file, or the last one with the tag ``having``; empty if there is
    none.

    The last ``tail_bytes`` of the file are read first. A record can be longer than that: while the tail has no such
    record, it grows eightfold.
    """
    try:
        with open(path, "rb") as file:
            size = start = file.seek(0, os.SEEK_END)
            while start:
                start = max(0, size - tail_bytes)
                file.seek(start)
                for line in reversed(file.read(size - start).splitlines()):
                    if (record := parse_line(line)) is not None and (having is None or having in record):
                        return with_floats(record)
                tail_bytes *= 8
    except OSError:
        pass
    return {}


def with_floats(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a line with the strings "nan", "inf" and "-inf" as numbers."""
    return {k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in record.items()}


def parse_lines(content: bytes) -> tuple[list[dict[str, Any]], bool]:
    """Return the records in the lines of a metrics file, and whether a line is damaged. Numbers that are not finite
    are still strings."""
    lines = content.splitlines()
    try:
        # One call of the JSON parser is faster than one call per line, and it creates each tag string only once.
        records = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        records = []
    if len(records) != len(lines):
        records = [parse_line(line) for line in lines]
    whole = [record for record in records if is_record(record)]
    return whole, len(whole) < len(lines)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line; None if the line is damaged. Numbers that are not finite are still strings."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if is_record(record) else None


def is_record(record: Any) -> bool:
    """Return whether ``record`` is a JSON object with a step."""
    return isinstance(record, dict) and isinstance(record.get("step"), int)


def _repair_end(path: Path) -> None:
    """Add the missing newline to a complete last line; remove an incomplete one."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        content = file.read()
        start = content.rfind(b"\n") + 1
        if start == len(content):
            return
        if parse_line(content[start:]) is not None:
            file.write(b"\n")
        else:
            file.truncate(start)
