"""The alarms of a run: the rules of divergence and rise, all rules over all series with a state that checkpoints store,
and ``alarms.jsonl``.

The training callback applies the rules during the run, and the report applies them afterwards; both get the same
alarms. The file has one line per alarm, in the order in which alarms begin.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mmqk.store import rules
from mmqk.store.files import json_line, naming, write_atomic
from mmqk.store.metrics import parse_tag, tag, with_floats
from mmqk.store.rules import Alarm, Rule, RuleOfEach

ALARMS_NAME = "alarms.jsonl"
NAMES = ("spike", "spike_median", "rise", "stall", "growth", "collapse", "divergence", "non_finite")

# Thresholds without a published source.
DIVERGENCE_WINDOW = 50
ABOVE_INITIAL_NATS = 0.1
ABOVE_BEST_NATS = 0.5

# Of the rules tried on the bench of failures (docs/bench.md), this one has no false alarm there. The bench alone
# would allow 2.1 standard errors; with 6, 7 of 150 series of 1,500 steps of noise around a constant have an alarm.
RISE_MEDIAN = 50
RISE_NOISE = 100
RISE_BACK = 200
RISE_ERRORS = 6.0


class Divergence(Rule):
    """Rule: the loss of a modality has diverged (`DivergenceRule` lists the conditions)."""

    STATE = ("initial", "above", "best", "window", "on")

    def __init__(self, warmup_steps: int):
        self.warmup_steps = warmup_steps
        self.initial: float | None = None
        self.best: float | None = None
        self.above = 0
        self.window: list[float] = []

    def update(self, step: int, tag: str, value: float, *more: Any) -> Alarm | None:
        """Add a loss; return an alarm if the divergence begins."""
        alarm = self.diverged(step, tag, value)
        return alarm if self.begins(alarm is not None) else None

    def diverged(self, step: int, tag: str, loss: float) -> Alarm | None:
        """Add a loss; return an alarm if the loss has diverged, now or earlier."""
        modality = parse_tag(tag).modality

        def alarm(value: float, threshold: float, sentence: str) -> Alarm:
            return Alarm("divergence", step, tag, value, threshold, sentence)

        if not math.isfinite(loss):
            return alarm(loss, math.inf, f"{modality} loss became {loss}")
        if self.initial is None:
            self.initial = loss
        limit = self.initial + ABOVE_INITIAL_NATS
        if step > self.warmup_steps:
            self.above = self.above + 1 if loss > limit else 0
        if self.above >= DIVERGENCE_WINDOW:
            return alarm(
                loss,
                limit,
                f"{modality} loss {loss:.2f} was more than {ABOVE_INITIAL_NATS} nat above its initial"
                f" {self.initial:.2f} for {DIVERGENCE_WINDOW} steps",
            )
        self.window = [*self.window, loss][-DIVERGENCE_WINDOW:]
        if len(self.window) < DIVERGENCE_WINDOW:
            return None
        median = statistics.median(self.window)
        self.best = median if self.best is None else min(self.best, median)
        if median <= self.best + ABOVE_BEST_NATS:
            return None
        return alarm(
            median,
            self.best + ABOVE_BEST_NATS,
            f"{DIVERGENCE_WINDOW}-step median {median:.2f} of the {modality} loss was more than {ABOVE_BEST_NATS} nat"
            f" above its best {self.best:.2f}",
        )


class DivergenceRule(RuleOfEach[Divergence]):
    """Decides from the loss of each modality (nats per token, one value per step) whether a run has diverged.

    A run has diverged if one of these conditions holds for any modality:

    - The loss is not finite.
    - The loss is more than 0.1 nat above its first value for 50 consecutive steps after warm-up.
    - The median loss of the last 50 steps is more than 0.5 nat above the lowest such median of the run.

    A step that has no loss of a modality does not change the modality's state. Pass only trained modalities,
    because an untrained loss may rise in a healthy run.

    Args:
        warmup_steps: steps of learning-rate warm-up, which the second condition skips.
    """

    def __init__(self, warmup_steps: int):
        super().__init__(lambda: Divergence(warmup_steps))

    def reason(self, step: int, losses: Mapping[str, float]) -> str | None:
        """Add the losses of ``step``; return the reason as a sentence if the run has diverged, else None."""
        alarms = [self[name].diverged(step, tag("loss", name), float(loss)) for name, loss in losses.items()]
        return next((alarm.sentence for alarm in alarms if alarm is not None), None)


class Rise(Rule):
    """Rule: the median of the last 50 losses is more than 6 standard errors above the lowest of the last 200 medians.

    The standard error is that of a mean of 50 losses. It comes from the quartiles of the last 100 differences between
    successive losses, because a trend of the loss hardly changes these. Losses of the warm-up do not count.
    """

    STATE = ("window", "medians", "on")

    def __init__(self, warmup_steps: int):
        self.warmup_steps = warmup_steps
        self.window: list[float] = []
        self.medians: list[float] = []

    def add(self, step: int, tag: str, value: float, *more: Any) -> Alarm | None:
        if step <= self.warmup_steps:
            return None
        self.window = [*self.window, value][-RISE_NOISE - 1 :]
        if len(self.window) < RISE_MEDIAN:
            return None
        median = statistics.median(self.window[-RISE_MEDIAN:])
        self.medians = [*self.medians, median][-RISE_BACK:]
        lowest = min(self.medians)
        differences = sorted(b - a for a, b in itertools.pairwise(self.window))
        quarter = len(differences) // 4
        noise = (differences[-1 - quarter] - differences[quarter]) / rules.QUARTILES_TO_STD
        threshold = lowest + RISE_ERRORS * noise / math.sqrt(RISE_MEDIAN)
        if not self.begins(median > threshold):
            return None
        sentence = (
            f"{RISE_MEDIAN}-step median {median:.3f} of {tag} is {median - lowest:.3f} nat above its lowest"
            f" {lowest:.3f}, more than the noise of the loss explains"
        )
        return Alarm("rise", step, tag, median, threshold, sentence)


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
        self._rules: dict[str, RuleOfEach[Any]] = {
            "spike": RuleOfEach(rules.Spike),
            "spike_median": RuleOfEach(rules.SpikeOfMedian),
            "rise": RuleOfEach(lambda: Rise(self.warmup_steps)),
            "stall": RuleOfEach(lambda: rules.Stall(self.warmup_steps, self.max_steps)),
            "logits": RuleOfEach(lambda: rules.Growth(self.warmup_steps, self.max_steps, rules.GROWTH_LOGIT)),
            "norms": RuleOfEach(lambda: rules.Growth(self.warmup_steps, self.max_steps)),
            "collapse": RuleOfEach(rules.Collapse),
        }

    def update(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Add the numbers of ``step`` by tag; return the alarms that begin at this step."""
        alarms: list[Alarm | None] = [self._finite(step, values)]
        diverged: list[Alarm | None] = []
        for name, value in values.items():
            for kind, series, *given in self._rules_of(name, values):
                alarms.append(self._rules[kind][series].update(step, series, *given))
            statistic, modality, *_ = parse_tag(name)
            if modality is not None and statistic == "val_unigram":
                self._unigram[modality] = value
            elif modality is not None and statistic == "loss" and self._is_trained(modality):
                diverged.append(self._divergence[modality].update(step, name, value))
        return [alarm for alarm in [*alarms, *diverged] if alarm is not None]

    def _rules_of(self, name: str, values: Mapping[str, float]) -> Iterator[tuple[Any, ...]]:
        """Yield the kind of each rule that reads a series, the series, its value, and what else the rule reads."""
        statistic, modality, layer, head = parse_tag(name)
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
                yield "stall", excess, values[excess], rules.STALL_ABOVE_NATS
            elif modality in self._unigram:
                yield "stall", name, value, self._unigram[modality] - rules.STALL_ABOVE_NATS
        if head is None and (statistic == rules.LOGITS or statistic in rules.NORMS):
            yield "logits" if statistic == rules.LOGITS else "norms", name, value
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
        layers = {name: layer for name in bad if (layer := parse_tag(name).layer) is not None}
        first = min(layers, key=layers.__getitem__) if layers else bad[0]
        more = f"; other series of this step that are not finite: {len(bad) - 1}" if len(bad) > 1 else ""
        return Alarm("non_finite", step, first, values[first], math.inf, f"{first} became {values[first]}{more}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, as plain data."""
        return {
            "divergence": self._divergence.state_dict(),
            "unigram": dict(self._unigram),
            "not_finite": self._not_finite,
            "rules": {kind: of_kind.state_dict() for kind, of_kind in self._rules.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._divergence.load_state_dict(state["divergence"])
        self._unigram, self._not_finite = dict(state["unigram"]), state["not_finite"]
        for kind, saved in state["rules"].items():
            self._rules[kind].load_state_dict(saved)


def alarms_of(
    lines: Iterable[Mapping[str, Any]], warmup_steps: int = 0, max_steps: int = 0, trained: Iterable[str] | None = None
) -> list[Alarm]:
    """Return the alarms of a whole run from the result of `read_metrics`. They equal the alarms that training
    raised."""
    of_run = AlarmRules(warmup_steps, max_steps, trained)
    return [
        alarm for line in lines for alarm in of_run.update(line["step"], {k: v for k, v in line.items() if k != "step"})
    ]


def append_alarms(folder: Path, alarms: Iterable[Alarm]) -> None:
    """Append alarms to ``alarms.jsonl`` and fsync; the first alarm creates the file.

    Raises:
        OSError: the file cannot be written.
    """
    if lines := [json_line(asdict(alarm)) for alarm in alarms]:
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
            write_atomic(path, b"".join(json_line(asdict(alarm)) for alarm in remaining))
        else:
            path.unlink()


def _read(path: Path) -> list[Alarm]:
    alarms = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # a damaged line
            record = with_floats(json.loads(line))
            alarms.append(Alarm(**{f.name: record[f.name] for f in fields(Alarm)}))
    return alarms
