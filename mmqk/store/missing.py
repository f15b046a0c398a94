"""Detect lines that were written to ``metrics.jsonl`` and ``alarms.jsonl`` but are missing or changed."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqk.store.alarms.alarm import ALARMS_NAME, alarm_of_line
from mmqk.store.files import naming, read_regular
from mmqk.store.metrics import METRICS_NAME, parse_line

DAMAGED_SUFFIX = ".damaged"
RECORDS = (METRICS_NAME, ALARMS_NAME)
_SPANS_NAMED = 4
_MOST_ALARMS = 10**6  # at one step; a larger count means a damaged line


class Written:
    """Length and sha256 of the record files. Lines are only appended, so each call of `now` reads only the new
    bytes."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._read = {name: (0, hashlib.sha256()) for name in RECORDS}

    def now(self) -> dict[str, dict[str, Any]]:
        """Return ``{"bytes": length, "sha256": hex digits}`` by file name. A missing file counts as empty."""
        by_name = {}
        for name, (length, digest) in self._read.items():
            path = self._folder / name
            if path.exists():
                with naming(path), open(path, "rb") as file:
                    file.seek(length)
                    while chunk := file.read(1 << 20):
                        digest.update(chunk)
                        length += len(chunk)
            self._read[name] = (length, digest)
            by_name[name] = {"bytes": length, "sha256": digest.hexdigest()}
        return by_name


def lost_steps(present: Iterable[int], first: int, last: int) -> str:
    """Return a sentence that names the steps from ``first`` to ``last`` that have no line in metrics.jsonl; an empty
    string if there are none."""
    missing = sorted(set(range(first, last + 1)) - set(present)) if last > first else []
    if not missing:
        return ""
    spans: list[list[int]] = []
    for step in missing:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    named = [f"{a}" if a == b else f"{a} to {b}" for a, b in spans[:_SPANS_NAMED]]
    more = [f"{len(spans) - _SPANS_NAMED} more gaps"] if len(spans) > _SPANS_NAMED else []
    plural = "s" if len(missing) > 1 else ""
    return f"{METRICS_NAME} lacks {len(missing)} step{plural} ({', '.join([*named, *more])})"


def lost_alarms(counted: Mapping[tuple[int, str], float], stored: Iterable[tuple[int, str]]) -> str:
    """Return a sentence if alarms.jsonl lacks alarms that metrics.jsonl counts; otherwise return an empty string.

    Args:
        counted: the value of ``alarm/<name>`` in metrics.jsonl, by step and name of the alarm.
        stored: step and name of each alarm in alarms.jsonl.
    """
    present = Counter(stored)
    missing = sum(max(0, int(count) - present[key]) for key, count in counted.items() if 0 < count < _MOST_ALARMS)
    return f"{ALARMS_NAME} lacks {missing} alarm{'s' if missing > 1 else ''}" if missing else ""


def examine(folder: Path, first: int, step: int, written: Mapping[str, Any] | None) -> list[str]:
    """Return one sentence for each file in which lines up to a checkpoint are missing or changed, and copy damaged
    lines to ``<file>.damaged``.

    Args:
        folder: the run folder.
        first: first step of the run.
        step: the checkpoint's step; lines of later steps may be missing, because the resume repeats these steps.
        written: the result of `Written.now` when the checkpoint was written; None if the checkpoint does not store
            it.

    Raises:
        OSError: a file cannot be read, or damaged lines cannot be copied.
    """
    metrics, alarms = (_read(folder / name) for name in RECORDS)
    records = [record for line in metrics if (record := parse_line(line)) is not None]
    records = [record for record in records if record["step"] <= step]
    stored = [alarm for line in alarms if (alarm := alarm_of_line(line)) is not None]
    counted = {
        (record["step"], tag.partition("/")[2]): value
        for record in records
        for tag, value in record.items()
        if tag.startswith("alarm/") and isinstance(value, int | float)
    }
    sentences = [
        lost_steps({record["step"] for record in records}, first, step),
        lost_alarms(counted, ((alarm.step, alarm.name) for alarm in stored)),
    ]
    for place, (name, lines) in enumerate(zip(RECORDS, (metrics, alarms), strict=True)):
        if not sentences[place] and written is not None and _changed(lines, written.get(name)):
            sentences[place] = f"{name} was changed after it was written"
        readable = parse_line if name == METRICS_NAME else alarm_of_line
        damaged = [line for line in lines if readable(line) is None]
        # An incomplete last line after a kill is not damage: the resume repeats its step.
        if damaged and not sentences[place] and damaged[-1] is lines[-1] and not lines[-1].endswith(b"\n"):
            damaged.pop()
        _keep(folder / f"{name}{DAMAGED_SUFFIX}", damaged)
    return [sentence for sentence in sentences if sentence]


def _read(path: Path) -> list[bytes]:
    try:
        return read_regular(path).splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _changed(lines: Sequence[bytes], written: Any) -> bool:
    if not isinstance(written, Mapping):
        return False
    content = b"".join(lines)[: written["bytes"]]
    return len(content) != written["bytes"] or hashlib.sha256(content).hexdigest() != written["sha256"]


def _keep(path: Path, lines: Sequence[bytes]) -> None:
    """Append the lines that are not in the file yet, and fsync."""
    present = set(_read(path))
    new = [line for line in (line.rstrip(b"\n") + b"\n" for line in lines) if line not in present]
    if new:
        with naming(path), open(path, "ab") as file:
            file.write(b"".join(new))
            file.flush()
            os.fsync(file.fileno())
