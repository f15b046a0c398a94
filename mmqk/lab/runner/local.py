"""Runs on this machine.

The server (multiprocessing's *forkserver*) uses no device and starts no thread, so it can be forked safely. A run
starts in a fraction of a second, because it does not import torch again. `concurrent.futures.ProcessPoolExecutor`
ends all of its workers when one is killed (a run that is out of memory would end the others) and cannot send a signal
to one run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from mmqk.lab.runner.pool import GRACE_SECONDS, Started
from mmqk.store import cli_main

TRAIN = "mmqk.train:main"
# Modules that the server imports once for all runs: `mmqk.train` and what it imports inside its functions.
# They start no thread and initialize no GPU, because threads and initialized GPUs do not work in a forked process.
PRELOAD = (
    "mmqk.train", "mmqk.config", "mmqk.data.datamodule", "mmqk.monitors.own.callback",
    "mmqk.training.checkpoint", "mmqk.training.fork.start", "mmqk.training.loggers", "mmqk.training.loop",
    "mmqk.training.module", "mmqk.training.ranks",
    "lightning.pytorch.utilities.exceptions", "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.event_file_writer",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class LocalRun:
    """The process of a run."""

    process: BaseProcess
    device: str | None

    @property
    def exitcode(self) -> int | None:
        return self.process.exitcode

    def interrupt(self) -> None:
        self._send(signal.SIGINT)

    def kill(self) -> None:
        # A process leads its process group, which has its loader workers too, unless it has just started.
        self._send(signal.SIGKILL, os.killpg)
        self._send(signal.SIGKILL)

    def _send(self, number: int, send: Callable[[int, int], None] = os.kill) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.process.exitcode is None and self.process.pid is not None:
                send(self.process.pid, number)


@dataclass
class Local:
    """Starts runs on this machine.

    Args:
        entry: "module:function"; the function trains from a command line and returns the exit code.
        preload: modules that the server imports once for all runs.
        devices: values of CUDA_VISIBLE_DEVICES; each run gets the device with the fewest runs. If empty, the
            variable is not set.
    """

    entry: str = TRAIN
    preload: Sequence[str] = PRELOAD
    devices: Sequence[str] = ()
    _runs: list[LocalRun] = field(default_factory=list, init=False)

    def start(self, runs: Sequence[tuple[list[str], Path]]) -> list[LocalRun]:
        start_server(self.preload)
        return [self._start(args, log) for args, log in runs]

    def _start(self, args: list[str], log: Path) -> LocalRun:
        self._runs = [run for run in self._runs if run.exitcode is None]
        used = [run.device for run in self._runs]
        device = min(self.devices, key=used.count) if self.devices else None
        # Not a daemon: a daemon may not have child processes, and runs have loader workers.
        process = multiprocessing.get_context("forkserver").Process(
            target=run_job, args=(self.entry, args, str(log), device), name=log.parent.name, daemon=False
        )
        process.start()
        self._runs.append(LocalRun(process, device))
        return self._runs[-1]

    def wait(self, runs: Iterable[Started], seconds: float) -> None:
        wait([run.process.sentinel for run in runs if isinstance(run, LocalRun)], timeout=seconds)


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
