"""Run tasks, several at a time, wherever an executor (executors.py) starts them.

If a run fails or is killed, the pool records the outcome, and the other runs continue.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from mmqk.store import EXIT_CODES, DamagedFile, Status, is_locked, last_metrics, mark_ended, read_run, read_status
from mmqk.store.errors import USER_ERROR_EXIT

LOG_NAME = "train.log"
POLL_SECONDS = 0.2
# Seconds that an interrupted run has to write its checkpoint and status.
GRACE_SECONDS = 30.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
FINISHED_CODES = (EXIT_CODES["completed"], EXIT_CODES["diverged"])
_INTERRUPTED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


class Started(Protocol):
    """A run that an executor has started."""

    @property
    def exitcode(self) -> int | None:
        """The exit code of ``mmqk train``, minus the signal that killed it, or None while it waits or trains."""

    def interrupt(self) -> None:
        """Let the run write a checkpoint and stop."""

    def kill(self) -> None:
        """End the run at once."""


class Executor(Protocol):
    """Where runs train."""

    def start(self, runs: Sequence[tuple[list[str], Path]]) -> Sequence[Started]:
        """Start ``mmqk train`` with these arguments, its output in a log file, for each run."""

    def wait(self, runs: Iterable[Any], seconds: float) -> None:
        """Return when a run has ended, at the latest after ``seconds``."""


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
    return TaskOutcome(**vars(status), loss=last_metrics(task.folder / "metrics.jsonl", having="loss").get("loss"))


@dataclass
class Pool:
    """Trains every task that is not finished.

    Args:
        tasks: the tasks, in the order in which they start.
        jobs: number of runs at a time.
        executor: starts the runs.
        tick: called several times a second with this pool.
        grace: seconds that interrupted runs have for their shutdown.
        more: returns tasks, of which the new ones enter the pool. Called with True when a run has ended, in this pool
            or in another process, and with False several times a second while fewer than ``jobs`` runs train.
        until: time of the monotonic clock at which the pool interrupts all runs, as it does after a signal.

    Attributes:
        running: the started runs, and the content of each status.json before the start.
    """

    tasks: Sequence[Task]
    jobs: int
    executor: Executor
    tick: Callable[[Pool], None] = lambda pool: None
    grace: float = GRACE_SECONDS
    more: Callable[[bool], Sequence[Task]] = lambda ended: ()
    until: float = math.inf
    signal_received: int | None = field(default=None, init=False)
    running: dict[Task, tuple[Started, Status | None]] = field(default_factory=dict, init=False)
    outcomes: dict[Task, TaskOutcome] = field(default_factory=dict, init=False)
    _pending: list[Task] = field(default_factory=list, init=False)
    _deadline: float | None = field(default=None, init=False)
    _kills: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)

    @property
    def stopping(self) -> bool:
        """Whether the pool no longer starts runs."""
        return self.signal_received is not None or time.monotonic() > self.until

    def run(self) -> dict[Task, TaskOutcome]:
        """Train until all tasks have ended, or until the runs have stopped after SIGINT or SIGTERM."""
        self._add(self.tasks)
        with self._handlers():
            try:
                while self.running or (self._pending and not self.stopping):
                    self._stop() if self.stopping else self._start_some()
                    self.executor.wait([run for run, _ in self.running.values()], POLL_SECONDS)
                    self._reap()
                    if not self.stopping and (self._ended or len(self.running) < self.jobs):
                        ended, self._ended = self._ended, False
                        self._add(self.more(ended))
                    self.tick(self)
            finally:
                self._kill()  # a run is alive here only after an unexpected exception
        self.outcomes.update({task: standing(task) for task in self._pending})
        return self.outcomes

    def _add(self, tasks: Sequence[Task]) -> None:
        """Enter tasks that are new; those that are not finished wait for their start."""
        for task in (task for task in tasks if task not in self.outcomes):
            now = standing(task)
            self.outcomes[task] = now if now.finished else replace(now, status="waiting", reason="")
            if not now.finished:
                self._pending.append(task)

    def _start_some(self) -> None:
        """Start tasks until ``jobs`` runs train. Skip locked folders."""
        starting: list[Task] = []
        for task in list(self._pending):
            if len(self.running) + len(starting) >= self.jobs:
                break
            if is_locked(task.folder):
                continue
            self._pending.remove(task)
            log = task.folder / LOG_NAME
            if (now := standing(task)).finished:
                self.outcomes[task] = now
                self._ended = True
                continue
            try:
                task.folder.mkdir(parents=True, exist_ok=True)
                log.touch()
                starting.append(task)
            except OSError as error:
                self.outcomes[task] = TaskOutcome("failed", reason=f"{log} cannot be written ({error.strerror})")
        if starting:
            before = [_status(task.folder) for task in starting]
            calls = [([*t.args, "--out", str(t.folder), "--quiet"], t.folder / LOG_NAME) for t in starting]
            for task, was, run in zip(starting, before, self.executor.start(calls), strict=True):
                self.running[task] = run, was
                self.outcomes[task] = TaskOutcome("running")

    def _reap(self) -> None:
        """Record the outcomes of ended runs. A run whose folder another process locked first waits for it."""
        for task, (run, before) in list(self.running.items()):
            if (code := run.exitcode) is not None:
                del self.running[task]
                if code == USER_ERROR_EXIT and is_locked(task.folder):
                    self.outcomes[task] = replace(standing(task), status="waiting", reason="")
                    self._pending.append(task)
                else:
                    self.outcomes[task] = self._outcome(task, code, before)
                    self._ended = True

    def _outcome(self, task: Task, code: int, before: Status | None) -> TaskOutcome:
        """Return the outcome that the run wrote; if it wrote none, derive one from the exit code and record it."""
        now = standing(task)
        if now.finished if code in FINISHED_CODES else now.ended and _status(task.folder) != before:
            return now
        step = max(now.step, last_metrics(task.folder / "metrics.jsonl").get("step", 0))
        if self.stopping or code in _INTERRUPTED_CODES:
            status, reason = "interrupted", "the run was stopped before it wrote its status"
        else:
            status, reason = "failed", _reason(code, task.folder / LOG_NAME)
        with contextlib.suppress(OSError):
            mark_ended(task.folder, status, step, reason, before)
        return TaskOutcome(status, step, reason, now.seconds, loss=now.loss)

    def _stop(self) -> None:
        """Interrupt the runs. Kill them at the next signal, or ``grace`` seconds after the interruption."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.grace
            for run, _ in self.running.values():
                run.interrupt()
        elif self._kills or time.monotonic() > self._deadline:
            self._kill()

    def _kill(self) -> None:
        for run, _ in self.running.values():
            run.kill()

    @contextlib.contextmanager
    def _handlers(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Only note the signal here, because the handler may interrupt the loop while it reads an exit code.
        self._kills = self.stopping
        self.signal_received = self.signal_received or number


def _status(folder: Path) -> Status | None:
    """Return the status of a run; None if it is missing or cannot be read."""
    with contextlib.suppress(DamagedFile):
        return read_status(folder)
    return None


def _reason(code: int, log: Path) -> str:
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        memory = " (possibly out of memory)" if -code == signal.SIGKILL else ""
        return f"killed by {names.get(-code, f'signal {-code}')}{memory}"
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    last = lines[-1].removeprefix("mmqk: ")[:300] if lines else "its log is empty"
    return f"exit code {code}: {last}"
