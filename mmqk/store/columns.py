"""The columns of a metrics file, for packs: the values of one series follow each other, so they compress better than
lines.

A file of columns is one JSON object. ``shapes`` lists the different sequences of keys that lines have. ``lines`` has
the index of each line's shape. ``values`` has the values of each key in the order of the lines.
"""

from __future__ import annotations

import json
from typing import Any

from mmqk.store.metrics import parse_line

COLUMNS_NAME = "metrics.columns.json"


def to_columns(metrics: bytes) -> bytes | None:
    """Return the columns of a metrics file.

    Returns None if `from_columns` would not restore the file byte for byte, for example because a line is unreadable.
    """
    shapes: dict[tuple[str, ...], int] = {}
    lines: list[int] = []
    values: dict[str, list[Any]] = {}
    for line in metrics.splitlines():
        if (record := parse_line(line)) is None:
            return None
        lines.append(shapes.setdefault(tuple(record), len(shapes)))
        for name, value in record.items():
            values.setdefault(name, []).append(value)
    columns = _compact({"shapes": list(shapes), "lines": lines, "values": values})
    return columns if from_columns(columns, len(metrics)) == metrics else None


def from_columns(columns: bytes, most_bytes: int) -> bytes:
    """Return the metrics file of these columns.

    Raises:
        ValueError: these are no columns, or the metrics file would have more than ``most_bytes`` bytes.
    """
    try:
        content = json.loads(columns)
        shapes, values = content["shapes"], {name: iter(v) for name, v in content["values"].items()}
        lines, size = [], 0
        for shape in content["lines"]:
            lines.append(_compact({name: next(values[name]) for name in shapes[shape]}) + b"\n")
            size += len(lines[-1])
            if size > most_bytes:
                raise ValueError(f"the metrics of a run have more than {most_bytes:,} bytes")
    except (LookupError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise ValueError("the columns of a metrics file are damaged") from error
    return b"".join(lines)


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
