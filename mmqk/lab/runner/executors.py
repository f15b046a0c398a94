"""Where runs train: on this machine, as jobs of SLURM (through submitit), or as tasks of Ray.

    mmqk ablate GRID --jobs 4
    mmqk ablate GRID --executor slurm --job partition=gpu --job time=60
    mmqk ablate GRID --executor ray --job num_gpus=1

On this machine a server (multiprocessing's *forkserver*), which uses no device and starts no thread, is forked for
each run. A run starts in a fraction of a second, because it does not import torch again.
`concurrent.futures.ProcessPoolExecutor` ends all of its workers when one is killed (a run that is out of memory would
end the others) and cannot send a signal to one run.

On a cluster, the folder of the grid must be on a file system that all nodes share. A job of SLURM that reaches its
time limit or is preempted writes a checkpoint, enters the queue again and goes on. If a node dies, Ray starts its runs
on another node, where they go on from their last checkpoints.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mmqk.lab.runner.pool import GRACE_SECONDS, Started
from mmqk.store import cli_main

TRAIN = "mmqk.train:main"
# Modules that the server imports once for all runs: `mmqk.train` and what it imports inside its functions.
# They start no thread and initialize no GPU, because threads and initialized GPUs do not work in a forked process.
PRELOAD = (
    "mmqk.train", "mmqk.config", "mmqk.data.datamodule", "mmqk.monitors.own.callback",
    "mmqk.training.saving", "mmqk.training.fork", "mmqk.training.loggers", "mmqk.training.callbacks",
    "mmqk.training.device", "mmqk.training.module", "mmqk.training.ranks",
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


# A run on a cluster -------------------------------------------------------------------------------------------------

REQUEUE_SECONDS = 120.0  # within which a cluster requeues a job that it preempts
CHILD_POLL_SECONDS = 0.5
PR_SET_PDEATHSIG = 1  # of prctl(2)
_PREEMPTED = (128 + signal.SIGTERM, -signal.SIGTERM)  # the second: before the run handles signals
TIME_LIMITS = 1000  # how often a job of SLURM may reach its time limit
MINUTES = 240
SLURM_SECONDS = 2.0
RETRIES = 10  # of a task of Ray


@dataclass
class Train:
    """Trains one run with ``mmqk train`` in a child process that can be interrupted, and returns its exit code; minus
    the number of the signal that killed it. It is pickled and called on a node.

    Args:
        args: command line of ``mmqk train``.
        log: file for its output.
        cwd: the folder that paths in ``args`` start from.
    """

    args: list[str]
    log: Path
    cwd: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def __call__(self) -> int:
        command = [sys.executable, "-m", "mmqk.train", *self.args]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(command, cwd=self.cwd, stdout=log, stderr=log, preexec_fn=_begin)
        while (code := self._process.poll()) is None:
            # A KeyboardInterrupt is a request to stop: the run writes a checkpoint and ends by itself.
            try:
                time.sleep(CHILD_POLL_SECONDS)
            except KeyboardInterrupt:
                self._process.send_signal(signal.SIGINT)
        if code in _PREEMPTED:  # a job that ended by itself would not enter the queue again
            time.sleep(REQUEUE_SECONDS)
        return code

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    def checkpoint(self) -> Any:
        """Let the run write a checkpoint and stop, and submit it again. Called by submitit on the signal of the time
        limit or of a preemption."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
        return DelayedSubmission(self)


def _begin() -> None:
    """Interrupt the run if its parent dies, and leave the signal of a time limit to the parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


# SLURM --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SlurmRun:
    """The job of a run."""

    job: Any

    @property
    def exitcode(self) -> int | None:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            return self.job.result() if self.job.done() else None
        except (FailedJobError, UncompletedJobError):
            return 1

    def interrupt(self) -> None:
        """Interrupt the run; a job that waits in the queue is cancelled."""
        subprocess.run(["scancel", "--state=PENDING", self.job.job_id], check=False)
        subprocess.run(["scancel", "--signal=INT", self.job.job_id], check=False)

    def kill(self) -> None:
        self.job.cancel(check=False)


class Slurm:
    """Submits runs to SLURM, as one array of jobs for the runs that start together.

    Args:
        folder: folder of the grid; submitit keeps its files in its folder ``slurm``.
        options: options of sbatch by their long names, such as partition, time (minutes), gpus-per-node.
    """

    def __init__(self, folder: Path, options: Mapping[str, str]) -> None:
        import submitit

        self._executor = submitit.SlurmExecutor(folder / "slurm", max_num_timeout=TIME_LIMITS)
        given = {name.replace("-", "_"): value for name, value in options.items()}
        minutes = int(given.pop("time", MINUTES))
        self._executor.update_parameters(job_name=folder.name, time=minutes, additional_parameters=given)

    def start(self, runs: Sequence[tuple[list[str], Path]]) -> list[SlurmRun]:
        with self._executor.batch():
            jobs = [self._executor.submit(Train([*args], log.resolve(), Path.cwd())) for args, log in runs]
        return [SlurmRun(job) for job in jobs]

    def wait(self, runs: Iterable[SlurmRun], seconds: float) -> None:
        time.sleep(max(seconds, SLURM_SECONDS))


# Ray ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RayRun:
    """The task of a run."""

    ray: Any
    task: Any

    @property
    def exitcode(self) -> int | None:
        if not self.ray.wait([self.task], timeout=0)[0]:
            return None
        try:
            return int(self.ray.get(self.task))
        except self.ray.exceptions.RayError:
            return 1

    def interrupt(self) -> None:
        self.ray.cancel(self.task)

    def kill(self) -> None:
        with contextlib.suppress(ValueError):
            self.ray.cancel(self.task, force=True)


class Ray:
    """Starts runs on the cluster of Ray that RAY_ADDRESS names, or else on a cluster of this machine alone.

    Args:
        options: options of a Ray task, such as num_cpus, num_gpus.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        import ray

        self._ray = ray
        ray.init(log_to_driver=False, ignore_reinit_error=True)
        self._options: dict[str, Any] = {name.replace("-", "_"): value for name, value in options.items()}
        for name, value in self._options.items():
            with contextlib.suppress(ValueError):  # a text, such as that of scheduling_strategy
                self._options[name] = float(value)

    def start(self, runs: Sequence[tuple[list[str], Path]]) -> list[RayRun]:
        call = self._ray.remote(max_retries=RETRIES, **self._options)(lambda train: train())
        return [RayRun(self._ray, call.remote(Train(args, log.resolve(), Path.cwd()))) for args, log in runs]

    def wait(self, runs: Iterable[RayRun], seconds: float) -> None:
        if tasks := [run.task for run in runs]:
            self._ray.wait(tasks, timeout=seconds)
