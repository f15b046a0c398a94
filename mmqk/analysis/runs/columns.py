"""Reads ``metrics.jsonl`` as columns: hundreds of files in seconds.

A run writes few kinds of lines (step, probe, validation), and all lines of a kind have the same tags in the same
order. So the lines of a kind become one matrix, and a series is a column of the matrix.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmqk.store import read_regular
from mmqk.store.metrics import is_record, parse_line

Series = tuple[NDArray[Any], NDArray[np.float64]]

EMPTY: Series = (np.zeros(0, dtype=np.int64), np.zeros(0))
_NOT_FINITE = ("nan", "inf", "-inf")


class Columns(Mapping[str, Series]):
    """(steps, values) by tag: steps rise, and the later value counts for a step that was written twice.

    Args:
        records: lines in the order of the file, each ``{"step": int, tag: number or "nan", "inf", "-inf"}``; other
            values are ignored.
        truncated: whether a line, usually the last line of a killed run, could not be read.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]], truncated: bool = False):
        self.truncated = truncated
        self.steps = {record["step"] for record in records}
        # Parts of each series by tag: one for each kind of line, in the order of the file.
        self._parts: dict[str, list[_Part]] = {}
        self._joined: dict[str, Series] = {}
        kinds: dict[tuple[str, ...], list[int]] = {}
        for line, record in enumerate(records):
            kinds.setdefault(tuple(record), []).append(line)
        for names, lines in kinds.items():
            of_kind = [records[line] for line in lines]
            steps, order = np.array([record["step"] for record in of_kind], dtype=np.int64), np.array(lines)
            for name, (keep, values) in _columns(names, of_kind):
                if name != "step" and len(values):
                    self._parts.setdefault(name, []).append((steps[keep], order[keep], values))

    def __getitem__(self, name: str) -> Series:
        if name not in self._joined:
            self._joined[name] = _join(self._parts[name])
        return self._joined[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @cached_property
    def last_step(self) -> int:
        """The last step of all lines; 0 without lines."""
        return max((int(steps.max()) for parts in self._parts.values() for steps, _, _ in parts), default=0)


_Part = tuple[NDArray[Any], NDArray[Any], NDArray[np.float64]]  # steps, lines of the file, values
_Kept = tuple[NDArray[Any] | slice, NDArray[np.float64]]


def read_columns(path: str | os.PathLike[str]) -> Columns:
    """The columns of a metrics file, without lines that cannot be read; no columns without a file."""
    try:
        lines = read_regular(path).splitlines()
    except OSError:
        return Columns(())
    try:
        # One call of the JSON scanner is faster than one per line and reuses the strings of the tags.
        records = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        records = []
    if len(records) != len(lines):
        records = [parse_line(line) for line in lines]
    whole = [record for record in records if is_record(record)]
    return Columns(whole, truncated=len(whole) < len(lines))


def _columns(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, _Kept]]:
    """(name, (lines with a number, their numbers)) for lines with the same names."""
    rows = [list(record.values()) for record in records]
    try:
        table = np.array(rows, dtype=np.float64).T
    except (ValueError, TypeError, OverflowError):
        table = None
    for place, name in enumerate(names):
        # numpy also turns null into NaN.
        if table is None or np.isnan(table[place]).any():
            numbers = [_number(row[place]) for row in rows]
            keep = np.array([number is not None for number in numbers])
            yield name, (keep, np.array([number for number in numbers if number is not None]))
        else:
            yield name, (slice(None), table[place])


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return float(value) if value in _NOT_FINITE else None
    too_large = isinstance(value, int) and abs(value) > sys.float_info.max
    return float(value) if isinstance(value, int | float) and not too_large else None


def _join(parts: Sequence[_Part]) -> Series:
    """Join the parts of a series from several kinds of lines."""
    steps, lines, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    if (np.diff(steps) > 0).all():
        return steps, values
    order = np.lexsort((lines, steps))
    last = np.append(np.diff(steps[order]) > 0, True)
    return steps[order][last], values[order][last]
