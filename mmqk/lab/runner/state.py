"""Runs of a grid and the current state of runs, read from their folders while they train."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmqk.lab.ablation import read_ablation
from mmqk.store import (
    Alarm,
    DamagedFile,
    NoRun,
    Status,
    UserError,
    find_runs,
    is_locked,
    last_metrics,
    open_regular,
    parsed_tag,
    read_alarms,
    read_run,
    read_status,
)
from mmqk.store.folder import STATUS_NAME
from mmqk.store.metrics import METRICS_NAME, parse_line, with_floats

# The first read of a file reads at most this many bytes, from its end.
TAIL_BYTES = 8 * 2**20
# A run that wrote metrics within this time counts as running, even if its lock cannot be checked.
FRESH_SECONDS = 60.0
# The same for the folder of `attach`, which has no lock, no run.json, and metrics of probes only.
FRESH_ATTACHED_SECONDS = 3600.0

Extreme = tuple[float, int | None]  # a value and its layer


@dataclass(frozen=True)
class Task:
    """One run: its name, command line and folder.

    Attributes:
        args: command line of ``mmqk train`` without ``--out``.
        id: identity hash of the run, as in its run.json.
        max_steps: length of the run in optimizer steps, 0 if unknown.
        entry: further fields in ablation.json: family, point, role, fork.
        part: number that decides which part of the grid the run belongs to.
        first: the first step; 0, or for a fork the step of the checkpoint that it starts from.
    """

    arm: str
    seed: int
    # This field is not compared, because the arguments of a fork name a checkpoint that is known only after the
    # parent has written it.
    args: tuple[str, ...] = field(compare=False)
    folder: Path
    id: str
    max_steps: int = 0
    entry: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    part: int = field(default=0, compare=False)
    first: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}"

    @property
    def family(self) -> str:
        """The arm before it was crossed with axes."""
        return self.entry.get("family", self.arm)

    def record(self, out: Path) -> dict[str, Any]:
        """Return the entry of the run in the ablation.json of the folder ``out``."""
        folder = Path(os.path.relpath(self.folder, out)).as_posix()
        return {"arm": self.arm, "seed": self.seed, "folder": folder, "id": self.id, **self.entry}


@dataclass(frozen=True)
class TaskOutcome(Status):
    """The outcome of a task: the status of its run and its last training loss. The status is "waiting" before the
    start, and "never" if the run cannot start."""

    loss: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the run has stopped; a failed or interrupted run can be resumed."""
        return self.finished or self.status in ("failed", "interrupted")


def standing(task: Task) -> TaskOutcome:
    """Return the outcome of a task from its folder.

    The status is "waiting" if the folder has no run with this identity, and "failed" if its records cannot be read.
    """
    try:
        record, status = read_run(task.folder), read_status(task.folder)
    except DamagedFile as damaged:
        return TaskOutcome("failed", reason=str(damaged))
    if record is None or record.get("id") != task.id or status is None:
        return TaskOutcome("waiting")
    loss = last_metrics(task.folder / "metrics.jsonl", having="loss").get("loss")
    return TaskOutcome(**vars(status), loss=loss if isinstance(loss, int | float) else None)


@dataclass
class View:
    """The current state of one run.

    Attributes:
        status: the status of status.json, or "waiting" before the start, "never" if the run cannot start, "stopped"
            if the process ended without a final status, or "damaged" if run.json or status.json cannot be read.
        step: the newest recorded step.
        max_steps: 0 if unknown.
        left: seconds to the end of the run at its present speed; None if unknown.
        values: the newest value of each series.
        alarms: all alarms in the order of their steps.
    """

    name: str
    status: str = "waiting"
    step: int = 0
    max_steps: int = 0
    left: float | None = None
    reason: str = ""
    values: dict[str, float] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.status not in ("waiting", "running")

    @property
    def modalities(self) -> list[str]:
        """Modalities with a loss; for a monitored model without losses, modalities with a query norm."""
        losses = [name.partition("/")[2] for name in self.values if name.startswith("loss/")]
        norms = [name.split("/")[1] for name in self.values if name.startswith("q_norm/")]
        return losses or list(dict.fromkeys(norms))

    def extreme(self, statistic: str, modality: str, smallest: bool = False) -> Extreme | None:
        """Return the largest (or smallest) newest value of a statistic over all layers, and its layer. For a
        statistic of modality pairs, this is the value over all key modalities too."""
        values = [
            (value, parsed.layer)
            for name, value in self.values.items()
            if name.startswith(f"{statistic}/")
            and (parsed := parsed_tag(name)).head is None
            and modality == (parsed.pair[0] if parsed.pair else parsed.modality)
        ]
        return worst(values, smallest)


def worst(values: Sequence[Extreme], smallest: bool) -> Extreme | None:
    """Return the largest (or smallest) value, or a NaN if there is one; None if there are no values."""
    nans = [pair for pair in values if math.isnan(pair[0])]
    return nans[0] if nans else (min if smallest else max)(values, key=lambda pair: pair[0], default=None)


class Follow:
    """Follows one run folder; each `look` reads only the new lines of metrics.jsonl. ``never`` is the reason why the
    run cannot start."""

    def __init__(self, name: str, folder: Path, never: str = ""):
        self.name, self.folder, self.never = name, folder, never
        self._values: dict[str, float] = {}
        self._step = 0
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._damaged = False

    def look(self) -> View:
        """Return the current view of the run."""
        self._read()
        view = View(self.name, step=self._step, values=dict(self._values), alarms=read_alarms(self.folder))
        try:
            run = read_run(self.folder)
            view.max_steps = (((run or {}).get("identity") or {}).get("trainer") or {}).get("max_steps", 0)
            status = read_status(self.folder)
        except DamagedFile as damaged:
            view.status, view.reason = "running" if is_locked(self.folder) else "damaged", str(damaged)
            return view
        if status is None:
            other = "never" if self.never else "waiting"
            view.status, view.reason = "running" if is_locked(self.folder) else other, self.never
            return view
        view.status, view.reason = status.status, status.reason
        view.step = max(self._step, status.step)
        if self._damaged or (status.finished and not self._values):
            what = "a line of {} cannot be read" if self._values else "{} has no readable line"
            view.reason = f"{view.reason}; {what.format(METRICS_NAME)}".removeprefix("; ")
        if status.status == "running":
            self._judge_speed(view, status.step, FRESH_SECONDS if run else FRESH_ATTACHED_SECONDS)
        return view

    def _judge_speed(self, view: View, first: int, fresh: float) -> None:
        """Set the time left of a running run that started at step ``first``; without a lock and new files for
        ``fresh`` seconds it has stopped."""
        written, started = (_mtime(self.folder / name) for name in (METRICS_NAME, STATUS_NAME))
        done, took = self._step - first, written - started
        if not is_locked(self.folder) and time.time() - max(written, started) > fresh:
            view.status = "stopped"
        elif done > 0 and took > 0 and view.max_steps:
            view.left = took / done * (view.max_steps - self._step)

    def _read(self) -> None:
        try:
            with open_regular(self.folder / METRICS_NAME) as file:
                stat = os.fstat(file.fileno())
                same = self._file == (stat.st_dev, stat.st_ino) and stat.st_size >= self._offset
                if not same:  # the first read, or a resumed run replaced the file
                    self._file, self._values, self._step = (stat.st_dev, stat.st_ino), {}, 0
                    self._damaged = False
                    self._offset = max(0, stat.st_size - TAIL_BYTES)
                file.seek(self._offset)
                new = file.read()
        except OSError:
            self._file, self._damaged = None, os.path.lexists(self.folder / METRICS_NAME)
            return
        whole = new[: new.rfind(b"\n") + 1]
        cut = not same and self._offset > 0  # the first line may be incomplete
        self._damaged |= not whole and len(new) >= TAIL_BYTES
        self._offset += len(whole)
        for number, line in enumerate(whole.splitlines()):
            if (record := parse_line(line)) is None:
                self._damaged |= number > 0 or not cut
            else:
                self._step = max(self._step, record.pop("step"))
                self._values.update({k: v for k, v in with_floats(record).items() if isinstance(v, int | float)})


def follow(folders: Iterable[Path]) -> list[Follow]:
    """Return a `Follow` for each run of these folders. Each is the folder of a run, of an arm with its seeds, or of
    a grid. The runs of a grid that have not started are included.

    Raises:
        NoRun: a folder does not exist or has no run.
        UserError: a path is not a folder, or an ablation.json cannot be read.
    """
    follows: list[Follow] = []
    for folder in folders:
        if not folder.is_dir():
            kind = UserError if folder.exists() else NoRun
            raise kind(f"{folder} is not a folder: give one that mmqk train or mmqk ablate writes to")
        if entries := (read_ablation(folder) or {}).get("runs"):
            follows += [
                Follow(f"{e['arm']} seed {e['seed']}", folder / e["folder"], e.get("never", "")) for e in entries
            ]
        else:
            for path in find_runs(folder):
                name = path.resolve().name if path == folder else path.relative_to(folder).as_posix()
                follows.append(Follow(name, path))
    return follows


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
