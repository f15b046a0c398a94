"""Run jobs in parallel, each in a process forked from a server that has already imported torch.

The server (multiprocessing's *forkserver*) uses no device and starts no thread, so it can be forked safely. A run
starts in a fraction of a second, because it does not import torch again. If a run fails or is killed, the pool
records the outcome, and the other runs continue. `concurrent.futures.ProcessPoolExecutor` ends all of its workers
when one is killed (a run that is out of memory would end the others) and cannot send a signal to one run.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from mmqk.lab.runner.state import Task, TaskOutcome, standing
from mmqk.store import DamagedFile, Status, cli_main, is_locked, last_metrics, mark_ended, read_status
from mmqk.store.errors import USER_ERROR_EXIT

TRAIN = "mmqk.train:main"
# Modules that the server imports once for all runs: `mmqk.train` and what it imports inside its functions.
# They start no thread and initialize no GPU, because threads and initialized GPUs do not work in a forked process.
PRELOAD = (
    "mmqk.train", "mmqk.config", "mmqk.data.datamodule", "mmqk.monitors.own.callback",
    "mmqk.training.checkpoint", "mmqk.training.fork.start", "mmqk.training.loggers", "mmqk.training.loop",
    "mmqk.training.module", "mmqk.training.ranks", "mmqk.training.tensorboard",
    "lightning.pytorch.utilities.exceptions", "tensorboard.compat.proto.summary_pb2",
    "tensorboard.plugins.hparams.api_pb2", "tensorboard.summary.writer.event_file_writer",
)  # fmt: skip
LOG_NAME = "train.log"
POLL_SECONDS = 0.2
# Seconds that an interrupted run has to write its checkpoint and status.
GRACE_SECONDS = 30.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INTERRUPTED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


@dataclass(frozen=True)
class Running:
    """The process of a run, and the content of its status.json before the process started."""

    process: BaseProcess
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
        more: returns tasks, of which the new ones enter the pool. Called with True when a run has ended, in this pool
            or in another process, and with False several times a second while fewer than ``jobs`` runs train.
        devices: values of CUDA_VISIBLE_DEVICES; each run gets the device with the fewest runs. If empty, the
            variable is not set.
        until: time of the monotonic clock at which the pool interrupts all runs, as it does after a signal.
    """

    tasks: Sequence[Task]
    jobs: int
    entry: str = TRAIN
    preload: Sequence[str] = PRELOAD
    tick: Callable[[Pool], None] = lambda pool: None
    grace: float = GRACE_SECONDS
    more: Callable[[bool], Sequence[Task]] = lambda ended: ()
    devices: Sequence[str] = ()
    until: float = math.inf
    signal_received: int | None = field(default=None, init=False)
    running: dict[Task, Running] = field(default_factory=dict, init=False)
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
            if self._pending:
                start_server(self.preload)
            try:
                while self.running or (self._pending and not self.stopping):
                    self._stop() if self.stopping else self._start_some()
                    wait([run.process.sentinel for run in self.running.values()], timeout=POLL_SECONDS)
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
        for task in list(self._pending):
            if len(self.running) >= self.jobs:
                return
            if is_locked(task.folder):
                continue
            self._pending.remove(task)
            if (now := standing(task)).finished:
                self.outcomes[task] = now
                self._ended = True
            else:
                self._start(task)

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
        used = [run.device for run in self.running.values()]
        device = min(self.devices, key=used.count) if self.devices else None
        # Not a daemon: a daemon may not have child processes, and runs have loader workers.
        process = multiprocessing.get_context("forkserver").Process(
            target=run_job, args=(self.entry, args, str(log), device), name=task.name, daemon=False
        )
        process.start()
        self.running[task] = Running(process, before, device)
        self.outcomes[task] = TaskOutcome("running")

    def _reap(self) -> None:
        """Record the outcomes of ended runs. A run whose folder another process locked first waits for it."""
        for task, run in list(self.running.items()):
            if (code := run.process.exitcode) is not None:
                run.process.close()
                del self.running[task]
                if code == USER_ERROR_EXIT and is_locked(task.folder):
                    self.outcomes[task] = replace(standing(task), status="waiting", reason="")
                    self._pending.append(task)
                else:
                    self.outcomes[task] = self._outcome(task, code, run.before)
                    self._ended = True

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
        """Interrupt the runs. Kill them at the next signal, or ``grace`` seconds after the interruption."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.grace
            self._send(signal.SIGINT)
        elif self._kills or time.monotonic() > self._deadline:
            self._kill()

    def _send(self, number: int, send: Callable[[int, int], None] = os.kill) -> None:
        for run in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                if run.process.exitcode is None and run.process.pid is not None:
                    send(run.process.pid, number)

    def _kill(self) -> None:
        # A process leads its process group, which has its loader workers too, unless it has just started.
        self._send(signal.SIGKILL, os.killpg)
        self._send(signal.SIGKILL)

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


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpus() -> tuple[str, ...]:
    """Return the GPUs that runs may use, each as a value for CUDA_VISIBLE_DEVICES. If this variable is set, these are
    the GPUs that it lists; otherwise they are all GPUs of the machine.

    The GPUs are counted without CUDA, because CUDA would create a context on each GPU.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(part.strip() for part in given.split(",") if part.strip() not in ("", "-1"))
    files = sorted(Path("/dev").glob("nvidia[0-9]*"), key=lambda path: (len(path.name), path.name))
    return tuple(str(i) for i in range(len(files)))


def start_server(preload: Sequence[str]) -> None:
    """Start the fork server, once per process; it imports ``preload`` while the caller continues."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["mmqk.lab.runner.server", *preload])
    forkserver.ensure_running()


def run_job(entry: str, args: list[str], log: str, device: str | None = None) -> None:
    """Train one run in a process of the fork server: call ``entry`` with the command line ``args``, and write its
    output to ``log``.

    ``entry`` is "module:function"; the function returns an exit code, and the process ends with this code.
    CUDA_VISIBLE_DEVICES is set to ``device``. The variable takes effect because the fork server has not initialized
    CUDA.
    """
    os.setsid()  # a group of its own, so that the pool can kill the run with its loader workers
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.close(descriptor)
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, name="mmqk-parent-watch", daemon=True).start()
    sys.exit(cli_main(lambda argv: pkgutil.resolve_name(entry)(argv))(args))


def _end_with_parent() -> None:
    """Interrupt this process when the mmqk ablate process ends, even if SIGKILL ended it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    print("mmqk: the process that started this run has ended", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


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
