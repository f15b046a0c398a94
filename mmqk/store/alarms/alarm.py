"""An alarm, the file ``alarms.jsonl`` of a run folder, and what a run does when an alarm begins.

The file has one line per alarm, in the order in which alarms begin.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mmqk.ranges import MOST_STEPS, check_fields, number
from mmqk.store.files import as_json, naming, read_regular, write_atomic
from mmqk.store.metrics import from_json
from mmqk.store.tags import parse_tag

ALARMS_NAME = "alarms.jsonl"
NAMES = ("spike", "spike_median", "stall", "growth", "collapse", "divergence", "non_finite")


@dataclass(frozen=True)
class Alarm:
    """An alarm: a series met the condition of a rule.

    Attributes:
        name: one of `NAMES`.
        step: optimizer step at which the alarm began; an alarm that continues is not repeated.
        tag: the series, with its modality and layer.
        value: the number that the rule compared: the value of the series, or a median of the series if the sentence
            names one.
        threshold: the limit that the value crossed.
        sentence: a description of the event.
    """

    name: str
    step: int
    tag: str
    value: float
    threshold: float
    sentence: str

    @property
    def where(self) -> str:
        """Return the modality and layer in words: ``image, layer 3``, ``text to image, layer 3``; an empty string for
        a series of the whole run."""
        parsed = parse_tag(self.tag)
        pair = parsed.pair
        modality = f"{pair[0]} to {pair[1]}" if pair else parsed.modality
        layer = None if parsed.layer is None else f"layer {parsed.layer}"
        head = None if parsed.head is None else f"head {parsed.head}"
        return ", ".join(part for part in (modality, layer, head) if part)

    def line(self) -> str:
        """Return the alarm as one line: ``step 120: growth: ...``."""
        return f"step {self.step}: {self.name}: {self.sentence}"


def append_alarms(folder: Path, alarms: Iterable[Alarm]) -> None:
    """Append alarms to ``alarms.jsonl`` and fsync; the first alarm creates the file.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [_encode(alarm) for alarm in alarms]
    if lines:
        with naming(folder / ALARMS_NAME), open(folder / ALARMS_NAME, "ab", buffering=0) as file:
            file.write(b"".join(lines))
            os.fsync(file.fileno())


def read_alarms(folder: str | os.PathLike[str]) -> list[Alarm]:
    """Return the alarms of a run folder; an empty list if its alarms.jsonl is missing or cannot be read. Unreadable
    lines are skipped."""
    try:
        return _read(Path(folder) / ALARMS_NAME)
    except OSError:
        return []


def truncate_alarms(folder: Path, step: int) -> None:
    """Remove alarms after ``step``, for a resume from the checkpoint of ``step``.

    Raises:
        OSError: the file cannot be read or written. It is then unchanged.
    """
    path = folder / ALARMS_NAME
    if path.exists():
        remaining = [alarm for alarm in _read(path) if alarm.step <= step]
        if remaining:
            write_atomic(path, b"".join(_encode(alarm) for alarm in remaining))
        else:
            path.unlink()


def _read(path: Path) -> list[Alarm]:
    return [alarm for line in read_regular(path).splitlines() if (alarm := alarm_of_line(line)) is not None]


def _encode(alarm: Alarm) -> bytes:
    return json.dumps(as_json(asdict(alarm)), separators=(",", ":")).encode() + b"\n"


def alarm_of_line(line: bytes) -> Alarm | None:
    """Return the alarm in a line; None if the line is damaged."""
    try:
        record = json.loads(line)
        return Alarm(
            str(record["name"]),
            int(record["step"]),
            str(record["tag"]),
            from_json(record["value"]),
            from_json(record["threshold"]),
            str(record["sentence"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


@dataclass(frozen=True)
class AlarmConfig:
    """What a run does when an alarm begins, besides reporting it.

    The alarms are spike, spike_median, stall, growth, collapse and non_finite (docs/alarms.md). Divergence has its
    own field and cannot be listed in the others.

    Args:
        checkpoint: alarms that write a permanent checkpoint ``alarm_<name>_step….ckpt`` when they first begin.
        probe: alarms after which every step is probed, for `probe_steps` steps.
        stop: alarms that end the run with the status interrupted; the same command resumes it.
        probe_steps: number of probed steps after an alarm of `probe`.
        stop_diverged: whether a divergence ends the run. If false, only a value that is not finite ends it.
    """

    checkpoint: list[str] = field(default_factory=list)
    probe: list[str] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    probe_steps: int = number(20, 1, MOST_STEPS)
    stop_diverged: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "alarm")
        for action in ("checkpoint", "probe", "stop"):
            for name in getattr(self, action):
                if name not in NAMES:
                    raise ValueError(f"alarm.{action} has '{name}': the alarms are {', '.join(NAMES)}.")
                if name == "divergence":
                    raise ValueError(
                        f"alarm.{action} has 'divergence', which ends a run without a checkpoint of the diverged"
                        " weights: leave it out, or set alarm.stop_diverged to false so that the run goes on."
                    )

    @property
    def acts(self) -> bool:
        """Whether this configuration can change a run. Only then is it part of the run's identity."""
        return bool(self.checkpoint or self.probe or self.stop or not self.stop_diverged)
