"""What is missing of a run's records: steps of ``metrics.jsonl`` and alarms of ``alarms.jsonl`` that were written."""

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
_MOST_ALARMS = 10**6  # on one step; a larger count is damage


class Written:
    """Length and sha256 of files that only grow; each call reads what is new."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._known = {name: (0, hashlib.sha256()) for name in RECORDS}

    def now(self) -> dict[str, dict[str, Any]]:
        """``{"bytes": length, "sha256": hex digits}`` by name of the file; a file that is not there is empty."""
        found = {}
        for name, (length, digest) in self._known.items():
            path = self._folder / name
            if path.exists():
                with naming(path), open(path, "rb") as file:
                    file.seek(length)
                    while chunk := file.read(1 << 20):
                        digest.update(chunk)
                        length += len(chunk)
            self._known[name] = (length, digest)
            found[name] = {"bytes": length, "sha256": digest.hexdigest()}
        return found


def lost_steps(found: Iterable[int], first: int, last: int) -> str:
    """A sentence when steps from ``first`` to ``last`` have no line in metrics.jsonl; empty when all have one."""
    missing = sorted(set(range(first, last + 1)) - set(found)) if last > first else []
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


def lost_alarms(told: Mapping[tuple[int, str], float], there: Iterable[tuple[int, str]]) -> str:
    """A sentence when alarms are missing that metrics.jsonl counts; empty when none is.

    Args:
        told: by step and name of the alarm, the value of ``alarm/<name>``.
        there: step and name of each alarm of alarms.jsonl.
    """
    found = Counter(there)
    missing = sum(max(0, int(count) - found[key]) for key, count in told.items() if 0 < count < _MOST_ALARMS)
    return f"{ALARMS_NAME} lacks {missing} alarm{'s' if missing > 1 else ''}" if missing else ""


def examine(folder: Path, first: int, step: int, written: Mapping[str, Any] | None) -> list[str]:
    """What is missing up to a checkpoint, one sentence a file; damaged lines are kept in ``<file>.damaged``.

    Args:
        folder: of the run.
        first: step that the run began at.
        step: of the checkpoint; later lines may be missing, as their steps come again.
        written: what `Written.now` said when it was made; None of an older checkpoint.

    Raises:
        OSError: a file cannot be read, or damaged lines cannot be kept.
    """
    metrics, alarms = (_read(folder / name) for name in RECORDS)
    records = [record for line in metrics if (record := parse_line(line)) is not None]
    records = [record for record in records if record["step"] <= step]
    rang = [alarm for line in alarms if (alarm := alarm_of_line(line)) is not None]
    told = {
        (record["step"], tag.partition("/")[2]): value
        for record in records
        for tag, value in record.items()
        if tag.startswith("alarm/") and isinstance(value, int | float)
    }
    said = [
        lost_steps({record["step"] for record in records}, first, step),
        lost_alarms(told, ((alarm.step, alarm.name) for alarm in rang)),
    ]
    for place, (name, lines) in enumerate(zip(RECORDS, (metrics, alarms), strict=True)):
        if not said[place] and written is not None and _changed(lines, written.get(name)):
            said[place] = f"{name} was changed after it was written"
        readable = parse_line if name == METRICS_NAME else alarm_of_line
        damaged = [line for line in lines if readable(line) is None]
        # A line that a kill cut off is no damage: its step comes again.
        if damaged and not said[place] and damaged[-1] is lines[-1] and not lines[-1].endswith(b"\n"):
            damaged.pop()
        _keep(folder / f"{name}{DAMAGED_SUFFIX}", damaged)
    return [sentence for sentence in said if sentence]


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
    """Add lines that are not there yet, durably."""
    known = set(_read(path))
    new = [line for line in (line.rstrip(b"\n") + b"\n" for line in lines) if line not in known]
    if new:
        with naming(path), open(path, "ab") as file:
            file.write(b"".join(new))
            file.flush()
            os.fsync(file.fileno())
