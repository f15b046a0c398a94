"""Run jobs in parallel, each in a process forked from a server that has already imported torch.

The server (multiprocessing's *forkserver*) uses no device and starts no thread, so it can be forked safely. A run
starts in a fraction of a second, because it does not import torch again. If a run fails or is killed, the pool
records the outcome, and the other runs continue. `concurrent.futures.ProcessPoolExecutor` is not used, because it
stops all workers when one is killed, hides exit codes, and cannot send a signal to one run.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType

from mmqk.lab.runner.child import BLOCKED, GRACE_SECONDS, run_job
from mmqk.lab.runner.task import Task, TaskOutcome, standing
from mmqk.store import DamagedFile, Status, is_locked, last_metrics, mark_ended, read_status
from mmqk.store.errors import USER_ERROR_EXIT

TRAIN = "mmqk.train:process"
# Modules that the server imports once for all runs.
PRELOAD = ("mmqk.lab.runner.preload",)
LOG_NAME = "train.log"
POLL_SECONDS = 0.2
_INTERRUPTED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


@dataclass(frozen=True)
class Running:
    """The process of a run, and the content of its status.json before the process started."""

    process: ForkServerProcess
    before: Status | None
    device: str | None = None


@dataclass
class Pool:
    """Trains every task that is not finished.

    Args:
        tasks: the tasks, in the order in which they start.
        jobs: number of runs at a time.
        entry: "module:function"; the function trains from a command line and returns the exit code.
        preload: modules that the server imports once for all runs.
        tick: called several times a second with this pool.
        grace: seconds that interrupted runs have for their shutdown.
        more: returns all tasks known so far; called whenever a run has ended, in this pool or in another process.
        ready: returns whether `more` would return new tasks although no run has ended; called while fewer than
            ``jobs`` runs train.
        devices: values of CUDA_VISIBLE_DEVICES; each run gets the device with the fewest runs. If empty, the
            variable is not set.
        until: time of the monotonic clock at which the pool interrupts all runs, as it does after a signal.
        to_come: returns the number of runs that can start later, for the display.
    """

    tasks: Sequence[Task]
    jobs: int
    entry: str = TRAIN
    preload: Sequence[str] = PRELOAD
    tick: Callable[[Pool], None] = lambda pool: None
    grace: float = GRACE_SECONDS
    more: Callable[[], Sequence[Task]] = lambda: ()
    ready: Callable[[], bool] = lambda: False
    devices: Sequence[str] = ()
    until: float = math.inf
    to_come: Callable[[], int] = lambda: 0
    signal_received: int | None = field(default=None, init=False)
    running: dict[Task, Running] = field(default_factory=dict, init=False)
    outcomes: dict[Task, TaskOutcome] = field(default_factory=dict, init=False)
    _signals: int = field(default=0, init=False)
    _deadline: float | None = field(default=None, init=False)
    _asked: int = field(default=0, init=False)
    _news: bool = field(default=False, init=False)

    @property
    def stopping(self) -> bool:
        """Whether the pool no longer starts runs."""
        return self._signals > 0 or self._deadline is not None or time.monotonic() > self.until

    def run(self) -> dict[Task, TaskOutcome]:
        """Train until all tasks have ended, or until the runs have stopped after SIGINT or SIGTERM."""
        self.outcomes = {task: standing(task) for task in self.tasks}
        pending = [task for task in self.tasks if not self.outcomes[task].finished]
        for task in pending:
            self.outcomes[task] = replace(self.outcomes[task], status="waiting", reason="")
        with self._handlers():
            if pending:
                start_server(self.preload)
            try:
                while self.running or (pending and not self.stopping):
                    if self.stopping:
                        self._stop()
                    else:
                        pending = self._start_some(pending)
                    wait([run.process.sentinel for run in self.running.values()], timeout=POLL_SECONDS)
                    pending += self._reap()
                    pending += self._new()
                    self.tick(self)
            finally:
                # A run is alive here only after an unexpected exception.
                self._kill()
        self.outcomes.update({task: standing(task) for task in pending})
        return self.outcomes

    def _start_some(self, pending: list[Task]) -> list[Task]:
        """Start tasks until ``jobs`` runs train, and return the tasks that were not started. Skip locked folders."""
        left = []
        for task in pending:
            if len(self.running) >= self.jobs or is_locked(task.folder):
                left.append(task)
            elif (now := standing(task)).finished:
                self.outcomes[task] = now
                self._news = True
            else:
                self._start(task)
        return left

    def _new(self) -> list[Task]:
        """Plan again after a run has ended or has written the checkpoint that a fork needs; return the new tasks."""
        room = len(self.running) < self.jobs
        if self.stopping or not (self._news or (room and self.ready())):
            return []
        self._news = False
        new = [task for task in self.more() if task not in self.outcomes]
        for task in new:
            now = standing(task)
            self.outcomes[task] = now if now.finished else replace(now, status="waiting", reason="")
        return [task for task in new if not self.outcomes[task].finished]

    def _start(self, task: Task) -> None:
        log = task.folder / LOG_NAME
        try:
            task.folder.mkdir(parents=True, exist_ok=True)
            log.touch()
        except OSError as error:
            self.outcomes[task] = TaskOutcome("failed", reason=f"{log} cannot be written ({error.strerror})")
            return
        before = _status(task.folder)
        args = [*task.args, "--out", str(task.folder), "--quiet"]
        device = None
        if self.devices:
            used = [run.device for run in self.running.values()]
            device = min(self.devices, key=used.count)
        # Not a daemon: a daemon may not have child processes, and runs have loader workers.
        process = get_context("forkserver").Process(
            target=run_job, args=(self.entry, args, str(log), device), name=task.name, daemon=False
        )
        process.start()
        self.running[task] = Running(process, before, device)
        self.outcomes[task] = TaskOutcome("running")

    def _reap(self) -> list[Task]:
        """Record the outcomes of ended runs; return the tasks to try again because another process locked their
        folder."""
        again = []
        for task, run in list(self.running.items()):
            if (code := run.process.exitcode) is not None:
                run.process.join()
                run.process.close()
                del self.running[task]
                if code == USER_ERROR_EXIT and is_locked(task.folder):
                    self.outcomes[task] = replace(standing(task), status="waiting", reason="")
                    again.append(task)
                else:
                    self.outcomes[task] = self._outcome(task, code, run.before)
                    self._news = True
        return again

    def _outcome(self, task: Task, code: int, before: Status | None) -> TaskOutcome:
        """Return the outcome that the run wrote; if it wrote none, derive one from the exit code and record it."""
        now = standing(task)
        if now.finished if code in (0, 3) else now.ended and _status(task.folder) != before:
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
        """Interrupt the runs at the first signal. Kill them at the second signal, or ``grace`` seconds after the
        interruption."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.grace
            # If the pool stops because of ``until``, this is 0, and the first signal kills the runs.
            self._asked = min(self._signals, 1)
            for run in self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    if run.process.exitcode is None and run.process.pid is not None:
                        os.kill(run.process.pid, signal.SIGINT)
        elif self._signals > self._asked or time.monotonic() > self._deadline:
            self._kill()

    def _kill(self) -> None:
        for run in self.running.values():
            pid = run.process.pid
            with contextlib.suppress(ProcessLookupError):
                if run.process.exitcode is None and pid is not None:
                    # If the process leads its process group, kill its loader workers too.
                    os.killpg(pid, signal.SIGKILL) if os.getpgid(pid) == pid else run.process.kill()

    @contextlib.contextmanager
    def _handlers(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can set handlers
            return
        before = {number: signal.signal(number, self._on_signal) for number in BLOCKED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Only count the signal here, because the handler may interrupt the loop while it reads an exit code.
        self._signals += 1
        self.signal_received = self.signal_received or number


def start_server(preload: Sequence[str]) -> None:
    """Start the fork server, once per process; it imports ``preload`` while the caller continues."""
    get_context("forkserver").set_forkserver_preload(list(preload))
    resource_tracker.ensure_running()
    # The server inherits the signal mask, so that neither Ctrl-C nor a SIGTERM to the process group ends the server
    # before its runs. A signal to a run that is being forked stays pending until the run unblocks it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _status(folder: Path) -> Status | None:
    """Return the status of a run; None if it is missing or cannot be read."""
    with contextlib.suppress(DamagedFile):
        return read_status(folder)
    return None


def _reason(code: int, log: Path) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        memory = " (possibly out of memory)" if -code == signal.SIGKILL else ""
        return f"killed by {name}{memory}"
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    last = lines[-1].removeprefix("mmqk: ")[:300] if lines else "its log is empty"
    return f"exit code {code}: {last}"
