"""One alarm, and ``alarms.jsonl``: one line an alarm, beside metrics.jsonl, in the order in which they came."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from mmqk.store.files import naming, parse_json, read_regular, write_atomic
from mmqk.store.metrics import as_json, from_json
from mmqk.store.tags import parse_tag

ALARMS_NAME = "alarms.jsonl"
NAMES = ("spike", "spike_median", "stall", "growth", "collapse", "divergence", "non_finite")


@dataclass(frozen=True)
class Alarm:
    """A rule that a series has broken.

    Attributes:
        name: one of `NAMES`.
        step: optimizer step at which it began; an alarm that goes on is not repeated.
        tag: the series, with its modality and layer.
        value: what the rule looked at: the value, or a median or slope of it as the sentence says.
        threshold: what it would have had to stay on the other side of.
        sentence: what happened, for people.
    """

    name: str
    step: int
    tag: str
    value: float
    threshold: float
    sentence: str

    @property
    def where(self) -> str:
        """Modality and layer in words: ``image, layer 3``, ``text to image, layer 3``; empty for a whole run."""
        parsed = parse_tag(self.tag)
        pair = parsed.pair
        modality = f"{pair[0]} to {pair[1]}" if pair else parsed.modality
        layer = None if parsed.layer is None else f"layer {parsed.layer}"
        head = None if parsed.head is None else f"head {parsed.head}"
        return ", ".join(part for part in (modality, layer, head) if part)

    def line(self) -> str:
        """``step 120: growth: ...``"""
        return f"step {self.step}: {self.name}: {self.sentence}"


def append_alarms(folder: Path, alarms: Iterable[Alarm]) -> None:
    """Add lines to ``alarms.jsonl`` and make them durable; a file is made by the first alarm.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [_encode(alarm) for alarm in alarms]
    if lines:
        with naming(folder / ALARMS_NAME), open(folder / ALARMS_NAME, "ab", buffering=0) as file:
            file.write(b"".join(lines))
            os.fsync(file.fileno())


def read_alarms(folder: str | os.PathLike[str], after: int | None = None) -> list[Alarm]:
    """The alarms of a run folder, none without a file; a line that cannot be read is left out.

    Args:
        folder: the run folder.
        after: leave out those up to this step.
    """
    try:
        content = read_regular(Path(folder) / ALARMS_NAME)
    except OSError:
        return []
    found = [alarm for line in content.splitlines() if (alarm := alarm_of_line(line)) is not None]
    return found if after is None else [alarm for alarm in found if alarm.step > after]


def truncate_alarms(folder: Path, step: int) -> None:
    """Drop alarms later than ``step``, as a resume from the checkpoint of ``step`` needs."""
    path = folder / ALARMS_NAME
    if path.exists():
        kept = [alarm for alarm in read_alarms(folder) if alarm.step <= step]
        if kept:
            write_atomic(path, b"".join(_encode(alarm) for alarm in kept))
        else:
            path.unlink()


def _encode(alarm: Alarm) -> bytes:
    record = asdict(alarm)
    record |= {name: as_json(record[name]) for name in ("value", "threshold")}
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def alarm_of_line(line: bytes) -> Alarm | None:
    """The alarm of a line; None for a line that no run writes."""
    try:
        record = parse_json(line)
        return Alarm(
            str(record["name"]),
            int(record["step"]),
            str(record["tag"]),
            from_json(record["value"]),
            from_json(record["threshold"]),
            str(record["sentence"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
