"""Read ``metrics.jsonl`` as one table with a row per number, and split the table into series by tag."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmqk.store import read_regular
from mmqk.store.metrics import is_record, parse_line

Series = tuple[NDArray[Any], NDArray[np.float64]]

EMPTY: Series = (np.zeros(0, dtype=np.int64), np.zeros(0))
_NOT_FINITE = ("nan", "inf", "-inf")


class Columns:
    """The numbers of a metrics file.

    Args:
        records: lines in the order of the file, each ``{"step": int, tag: number or "nan", "inf", "-inf"}``; other
            values are ignored.
        truncated: whether a line, usually the last line of a killed run, could not be read.

    Attributes:
        series: (steps, values) by tag. Steps ascend; if a step was written twice, the later value is used.
        steps: the steps of all lines.
        last_step: the last step with a number; 0 if there are no numbers.
        truncated: whether a line could not be read.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]], truncated: bool = False):
        import pandas as pd  # slow to import

        cells = [
            (record["step"], tag, number)
            for record in records
            for tag, value in record.items()
            if tag != "step" and (number := _number(value)) is not None
        ]
        table = pd.DataFrame(cells, columns=["step", "tag", "value"])
        table = table.drop_duplicates(["step", "tag"], keep="last").sort_values("step", kind="stable")
        steps, values = table["step"].to_numpy(), table["value"].to_numpy()
        rows = table.groupby("tag").indices
        self.series = {
            tag: (steps[rows[tag]], values[rows[tag]]) for tag in dict.fromkeys(c[1] for c in cells)
        }
        self.steps = {record["step"] for record in records}
        self.last_step = int(steps.max(initial=0))
        self.truncated = truncated


def read_columns(path: str | os.PathLike[str]) -> Columns:
    """Return the columns of a metrics file without the lines that cannot be read; empty if there is no file."""
    try:
        lines = read_regular(path).splitlines()
    except OSError:
        return Columns((), truncated=os.path.lexists(path))
    try:
        # One call of the JSON parser is faster than one call per line, and it creates each tag string only once.
        records = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        records = []
    if len(records) != len(lines):
        records = [parse_line(line) for line in lines]
    whole = [record for record in records if is_record(record)]
    return Columns(whole, truncated=len(whole) < len(lines))


def aligned(series: Sequence[Series]) -> Series:
    """Return the steps that all series have, and a table of the values at these steps with one row per series."""
    steps = reduce(np.intersect1d, [at for at, _ in series])
    return steps, np.stack([values[np.searchsorted(at, steps)] for at, values in series])


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return float(value) if value in _NOT_FINITE else None
    too_large = isinstance(value, int) and abs(value) > sys.float_info.max
    return float(value) if isinstance(value, int | float) and not too_large else None
