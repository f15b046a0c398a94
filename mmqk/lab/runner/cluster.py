"""Runs on a cluster: as jobs of SLURM, through submitit, or as tasks of Ray.

    mmqk ablate GRID --executor slurm --job partition=gpu --job time=60
    mmqk ablate GRID --executor ray --job num_gpus=1

The folder of the grid must be on a file system that all nodes share. A job of SLURM that reaches its time limit or is
preempted writes a checkpoint, enters the queue again and goes on. If a node dies, Ray starts its runs on another node,
where they go on from their last checkpoints.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REQUEUE_SECONDS = 120.0  # within which a cluster requeues a job that it preempts
POLL_SECONDS = 0.5
PR_SET_PDEATHSIG = 1  # of prctl(2)
_PREEMPTED = (128 + signal.SIGTERM, -signal.SIGTERM)  # the second: before the run handles signals
TIME_LIMITS = 1000  # how often a job of SLURM may reach its time limit
MINUTES = 240
SLURM_SECONDS = 2.0
RETRIES = 10  # of a task of Ray


@dataclass
class Child:
    """Trains one run with ``mmqk train`` in a child process that can be interrupted, and returns its exit code; minus
    the number of the signal that killed it.

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
                time.sleep(POLL_SECONDS)
            except KeyboardInterrupt:
                self._process.send_signal(signal.SIGINT)
        if code in _PREEMPTED:  # a job that ended by itself would not enter the queue again
            time.sleep(REQUEUE_SECONDS)
        return code

    def stop(self) -> None:
        """Let the run write a checkpoint and stop; return when it has ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)
            self._process.wait()


def _begin() -> None:
    """Interrupt the run if its parent dies, and leave the signal of a time limit to the parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


# SLURM --------------------------------------------------------------------------------------------------------------


class Train(Child):
    """The child process of a job; submitit pickles it and calls it on a node."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    def checkpoint(self) -> Any:
        """Stop the run and submit it again. Called by submitit on the signal of the time limit or of a preemption."""
        from submitit.helpers import DelayedSubmission

        self.stop()
        return DelayedSubmission(self)


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
            code: int = self.ray.get(self.task)
            return code
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
        self._options = {name.replace("-", "_"): float(value) for name, value in options.items()}

    def start(self, runs: Sequence[tuple[list[str], Path]]) -> list[RayRun]:
        train = self._ray.remote(max_retries=RETRIES, **self._options)(_train)
        return [RayRun(self._ray, train.remote(args, log.resolve(), Path.cwd())) for args, log in runs]

    def wait(self, runs: Iterable[RayRun], seconds: float) -> None:
        if tasks := [run.task for run in runs]:
            self._ray.wait(tasks, timeout=seconds)


def _train(args: list[str], log: Path, cwd: Path) -> int:
    return Child(args, log, cwd)()
