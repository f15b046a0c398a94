"""Times candidates that do the same work and take turns in one process. A failed candidate's row has the reason.

A row is plain data. `seconds` has one number per round, the seconds of a repetition; `work` has the tokens, samples,
steps and flops of a repetition. `benchmarks.tables` computes medians and ratios from these numbers.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.memory import CudaPeak, Peak
from mmqk.store import UserError

MEASURED, FAILED, ABSENT = "measured", "failed", "not installed"
Row = dict[str, Any]


class Absent(Exception):
    """Raised if a package that a candidate needs is not installed."""


@dataclass(frozen=True)
class Candidate:
    """One row of a table, and the function that is timed for it.

    Attributes:
        name: name of the row.
        build: returns the timed function. Called with n, the function does n repetitions and returns the seconds of
            one repetition. Its optional attributes `first_seconds` (of the first repetition) and `first_loss` are
            stored. If its attribute `warms_up` is true, it does its own warm-up.
        work: numbers of tokens, samples, steps and flops in one repetition.
        repeat: repetitions in a round; None for the comparison's default.
        against: name of the row to compare with; None for the comparison's base.
        memory: whether to measure peak memory; False if several candidates share memory.
        compiled: whether the candidate uses torch.compile. If so, its compile time is stored, and peak memory on a
            CPU is not measured.
        note: a note below the table.
    """

    name: str
    build: Callable[[], Callable[[int], float]]
    work: Mapping[str, float] = field(default_factory=dict)
    repeat: int | None = None
    against: str | None = None
    memory: bool = True
    compiled: bool = False
    note: str = ""


@dataclass(frozen=True)
class Context:
    """Settings for the measurement of a table.

    Attributes:
        device: cpu or cuda.
        full: whether to measure the GPU sizes.
        rounds: number of counted rounds; None for the table's default.
        repeat: repetitions in a round; None for the table's default.
        compiled: whether to measure compiled rows on a CPU too.
        threads: number of CPU threads.
        rows: regular expression for the names of the rows to measure; None for all rows.
        peers: whether the table of the data is that of `benchmarks.streams`.
        until: `time.monotonic()` value after which no candidate is built and no round is started.
        toy: command-line arguments of a run at toy size.
    """

    device: str = "cpu"
    full: bool = False
    rounds: int | None = None
    repeat: int | None = None
    compiled: bool = False
    threads: int = 2
    rows: str | None = None
    peers: bool = False
    until: float = math.inf
    toy: Sequence[str] = ("--config=configs/demo.yaml",)


@dataclass(frozen=True)
class Unit:
    """Rows that are measured in one process, so that their ratios are fair.

    Attributes:
        table: name of the table that the unit belongs to.
        name: name of the unit within this table.
        seconds: expected duration at full size on one H100, without the process start.
        measure: returns `title`, `facts`, `base` (the row with which the others are compared) and `rows`.
    """

    table: str
    name: str
    seconds: float
    measure: Callable[[Context], dict[str, Any]]

    @property
    def path(self) -> str:
        return f"{self.table}/{self.name}"


def compare(candidates: Sequence[Candidate], context: Context, *, repeat: int, rounds: int, warm: int = 2) -> list[Row]:
    """Measure each candidate and return one row per candidate.

    All candidates are built first. In each round every candidate has one turn, in an order that rotates. The first
    round is not counted. At least one counted round runs, even after `until`.

    Args:
        warm: repetitions before the rounds. Peak memory is measured from the start of the build to the end of these
            repetitions. The first repetition is timed separately.
    """
    rounds, repeat = context.rounds or rounds, context.repeat or repeat
    candidates = [candidate for candidate in candidates if re.search(context.rows or "", candidate.name)]
    rows: dict[str, Row] = {}
    takes: dict[str, Callable[[int], float]] = {}
    for candidate in candidates:
        rows[candidate.name] = row = _empty(candidate)
        if time.monotonic() > context.until:
            _failed(row, UserError("the time given by --minutes was over."))
            continue
        try:
            takes[candidate.name] = _built(candidate, row, context, warm)
        except Exception as error:
            _failed(row, error)
        _collect(context)
    turns = list(takes)
    by_name = {candidate.name: candidate for candidate in candidates}
    for i in range(rounds + 1):
        if i > 1 and time.monotonic() > context.until:
            break
        for name in rotated(turns, i):
            candidate, row = by_name[name], rows[name]
            if row["status"] != MEASURED:
                continue
            n = candidate.repeat or repeat if context.repeat is None else repeat
            try:
                seconds = takes[name](n)
            except Exception as error:
                _failed(row, error)
                del takes[name]
                _collect(context)
                continue
            if i:
                row["seconds"].append(seconds)
                row["repeat"] = n
    return list(rows.values())


def rotated(names: list[str], i: int) -> list[str]:
    """Return the names rotated by i places."""
    at = i % len(names) if names else 0
    return names[at:] + names[:at]


def _empty(candidate: Candidate) -> Row:
    return {
        "name": candidate.name, "status": MEASURED, "reason": "", "against": candidate.against,
        "note": candidate.note, "seconds": [], "repeat": None, "work": dict(candidate.work), "peak_bytes": None,
        "first_seconds": None, "first_loss": None,
    }  # fmt: skip


def _built(candidate: Candidate, row: Row, context: Context, warm: int) -> Callable[[int], float]:
    cuda = context.device == "cuda"
    if candidate.memory and (cuda or not candidate.compiled):
        with CudaPeak() if cuda else Peak() as peak:
            take = _warmed(candidate, warm)
        row["peak_bytes"] = peak.bytes
    else:
        take = _warmed(candidate, warm)
    if candidate.compiled:
        row["first_seconds"] = getattr(take, "first_seconds", None)
    row["first_loss"] = getattr(take, "first_loss", None)
    return take


def _warmed(candidate: Candidate, warm: int) -> Callable[[int], float]:
    take = candidate.build()
    take(1)
    if not getattr(take, "warms_up", False):
        take(warm - 1)
    return take


def failed_row(name: str, error: Exception) -> Row:
    """Return a row with the reason why it has no numbers."""
    row = _empty(Candidate(name, lambda: lambda n: 0.0))
    _failed(row, error)
    return row


def _failed(row: Row, error: Exception) -> None:
    """Store the reason in the row, and drop the row's times."""
    row["status"], row["seconds"] = ABSENT if isinstance(error, Absent) else FAILED, []
    message = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        row["reason"] = "out of memory"
    elif isinstance(error, UserError | Absent | ValueError):
        row["reason"] = message[:300]
    else:
        row["reason"] = f"{type(error).__name__}: {message[:200]}"


def _collect(context: Context) -> None:
    gc.collect()
    if context.device == "cuda":
        torch.cuda.empty_cache()


def seconds_of(do: Callable[[], object], n: int, device: str) -> float:
    """Return the mean seconds of n repetitions, measured between two synchronizations with the device."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(n):
        do()
    synchronize(device)
    return (time.perf_counter() - start) / n


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
