"""The alarms of a run: all rules over all series, with a state that checkpoints store, and ``alarms.jsonl``.

The training callback applies the rules during the run, and the report applies them afterwards; both get the same
alarms. The file has one line per alarm, in the order in which alarms begin.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmqk.store.divergence import DivergenceRule, Rise
from mmqk.store.files import as_json, naming, read_regular, write_atomic
from mmqk.store.metrics import from_json, parsed_tag, tag
from mmqk.store.rules import (
    GROWTH_LOGIT,
    LOGITS,
    NORMS,
    STALL_ABOVE_NATS,
    Alarm,
    Collapse,
    Growth,
    Rule,
    RuleOfEach,
    Spike,
    SpikeOfMedian,
    Stall,
)

ALARMS_NAME = "alarms.jsonl"
NAMES = ("spike", "spike_median", "rise", "stall", "growth", "collapse", "divergence", "non_finite")


class AlarmRules:
    """Applies all rules to the series of a run. Call `update` once for each step, in order, with all numbers of the
    step.

    An alarm is returned when it begins. It is returned again for the same series only after it has ended.

    Args:
        warmup_steps: warm-up steps of the learning rate.
        max_steps: length of the run in optimizer steps; 0 for a run without a set length.
        trained: modalities whose loss is trained, None for all; the losses of other modalities raise no alarm.
    """

    def __init__(self, warmup_steps: int = 0, max_steps: int = 0, trained: Iterable[str] | None = None):
        self.warmup_steps, self.max_steps = warmup_steps, max_steps
        self.trained = None if trained is None else frozenset(trained)
        self._unigram: dict[str, float] = {}
        self._not_finite = False
        self._divergence = DivergenceRule(warmup_steps)
        makers: dict[str, Callable[[], Rule]] = {
            "spike": Spike,
            "spike_median": SpikeOfMedian,
            "rise": lambda: Rise(self.warmup_steps),
            "stall": lambda: Stall(self.warmup_steps, self.max_steps),
            "logits": lambda: Growth(self.warmup_steps, self.max_steps, GROWTH_LOGIT),
            "norms": lambda: Growth(self.warmup_steps, self.max_steps),
            "collapse": Collapse,
        }
        self._rules = {kind: RuleOfEach(make) for kind, make in makers.items()}

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Add the numbers of ``step`` by tag; return the alarms that begin at this step."""
        alarms: list[Alarm | None] = [self._finite(step, values)]
        diverged: list[Alarm | None] = []
        for name, value in values.items():
            for kind, series, *given in self._rules_of(name, values):
                alarms.append(self._rules[kind][series].update(step, series, *given))
            statistic, modality, *_ = parsed_tag(name)
            if modality is not None and statistic == "val_unigram":
                self._unigram[modality] = value
            elif modality is not None and statistic == "loss" and self._is_trained(modality):
                diverged.append(self._divergence[modality].update(step, name, value))
        return [alarm for alarm in [*alarms, *diverged] if alarm is not None]

    def _rules_of(self, name: str, values: Mapping[str, float]) -> Iterator[tuple[Any, ...]]:
        """Yield the kind of each rule that reads a series, the series, its value, and what else the rule reads."""
        statistic, modality, layer, head = parsed_tag(name)
        value = values[name]
        loss = statistic == "loss" and self._is_trained(modality)
        # Use only the global gradient norm: norms by parameter are measured at probes, not at each step.
        if loss or name == "grad_norm":
            yield "spike", name, value
        if loss:
            yield "spike_median", name, value
            yield "rise", name, value
        if loss and modality is not None:
            excess = tag("excess", modality)
            if excess in values:
                yield "stall", excess, values[excess], STALL_ABOVE_NATS
            elif modality in self._unigram:
                yield "stall", name, value, self._unigram[modality] - STALL_ABOVE_NATS
        if head is None and (statistic == LOGITS or statistic in NORMS):
            yield "logits" if statistic == LOGITS else "norms", name, value
        if head is None and statistic == "attn_entropy" and layer is not None:
            yield "collapse", name, value, values.get(tag("attn_rank", layer=layer))

    def _is_trained(self, modality: str | None) -> bool:
        return self.trained is None or modality is None or modality in self.trained

    def _finite(self, step: int, values: Mapping[str, float]) -> Alarm | None:
        """Return an alarm that names the non-finite series of the lowest layer or, if none has a layer, the first
        non-finite series."""
        # The series logit_... are logarithms. The value -inf is valid for them, because the logits may all be 0.
        bad = [
            name
            for name, value in values.items()
            if not math.isfinite(value) and not (value == -math.inf and name.startswith("logit_"))
        ]
        began, self._not_finite = bool(bad) and not self._not_finite, bool(bad)
        if not began:
            return None
        layers = {name: layer for name in bad if (layer := parsed_tag(name).layer) is not None}
        first = min(layers, key=layers.__getitem__) if layers else bad[0]
        more = f"; other series of this step that are not finite: {len(bad) - 1}" if len(bad) > 1 else ""
        return Alarm(
            "non_finite", step, first, values[first], math.inf, f"{first} became {values[first]}{more}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, as plain data."""
        return {
            "divergence": self._divergence.state_dict(),
            "unigram": dict(self._unigram),
            "not_finite": self._not_finite,
            "rules": {kind: rules.state_dict() for kind, rules in self._rules.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._divergence.load_state_dict(state["divergence"])
        self._unigram, self._not_finite = dict(state["unigram"]), state["not_finite"]
        for kind, rules in state["rules"].items():
            self._rules[kind].load_state_dict(rules)


def alarms_of(
    lines: Iterable[Mapping[str, Any]],
    warmup_steps: int = 0,
    max_steps: int = 0,
    trained: Iterable[str] | None = None,
) -> list[Alarm]:
    """Return the alarms of a whole run from the result of `read_metrics`. They equal the alarms that training
    raised."""
    rules = AlarmRules(warmup_steps, max_steps, trained)
    return [
        alarm
        for line in lines
        for alarm in rules.update(line["step"], {k: v for k, v in line.items() if k != "step"})
    ]


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
