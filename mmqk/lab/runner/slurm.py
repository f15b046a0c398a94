"""Runs as jobs of SLURM, through submitit: ``mmqk ablate GRID --executor slurm --job partition=gpu --job time=60``.

The folder of the grid must be on a file system that all nodes share. A job that reaches its time limit or is
preempted writes a checkpoint, enters the queue again and goes on.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from mmqk.lab.runner.local import Child

TIME_LIMITS = 1000  # how often a job may reach its time limit
MINUTES = 240
POLL_SECONDS = 2.0


class Train(Child):
    """The child process of a job; submitit pickles it and calls it on a node."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Stop the run and submit it again. Called by submitit on the signal of the time limit or of a preemption."""
        self.stop()
        return submitit.helpers.DelayedSubmission(self)


@dataclass(frozen=True, eq=False)
class SlurmRun:
    """The job of a run."""

    job: submitit.Job[int]

    @property
    def exitcode(self) -> int | None:
        if not self.job.done():
            return None
        try:
            return self.job.result()
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
        self._executor = submitit.SlurmExecutor(folder / "slurm", max_num_timeout=TIME_LIMITS)
        given = {name.replace("-", "_"): value for name, value in options.items()}
        minutes = int(given.pop("time", MINUTES))
        self._executor.update_parameters(job_name=folder.name, time=minutes, additional_parameters=given)

    def start(self, runs: Sequence[tuple[list[str], Path]]) -> list[SlurmRun]:
        with self._executor.batch():
            jobs = [self._executor.submit(Train([*args], log.resolve(), Path.cwd())) for args, log in runs]
        return [SlurmRun(job) for job in jobs]

    def wait(self, runs: Iterable[SlurmRun], seconds: float) -> None:
        time.sleep(max(seconds, POLL_SECONDS))
