"""Runs as tasks of Ray: ``mmqk ablate GRID --executor ray --job num_gpus=1``.

The folder of the grid must be on a file system that all nodes share. If a node dies, Ray starts its runs on another
node, where they go on from their last checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError

from mmqk.lab.runner.local import Child

RETRIES = 10


@dataclass(frozen=True, eq=False)
class RayRun:
    """The task of a run."""

    task: ray.ObjectRef

    @property
    def exitcode(self) -> int | None:
        if not ray.wait([self.task], timeout=0)[0]:
            return None
        try:
            code: int = ray.get(self.task)
            return code
        except RayError:
            return 1

    def interrupt(self) -> None:
        ray.cancel(self.task)

    def kill(self) -> None:
        with contextlib.suppress(ValueError):
            ray.cancel(self.task, force=True)


class Ray:
    """Starts runs on the cluster of Ray that RAY_ADDRESS names, or else on a cluster of this machine alone.

    Args:
        options: options of a Ray task, such as num_cpus, num_gpus.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        ray.init(log_to_driver=False, ignore_reinit_error=True)
        self._options = {name.replace("-", "_"): float(value) for name, value in options.items()}

    def start(self, runs: Sequence[tuple[list[str], Path]]) -> list[RayRun]:
        train = ray.remote(max_retries=RETRIES, **self._options)(_train)
        return [RayRun(train.remote(args, log.resolve(), Path.cwd())) for args, log in runs]

    def wait(self, runs: Iterable[RayRun], seconds: float) -> None:
        if tasks := [run.task for run in runs]:
            ray.wait(tasks, timeout=seconds)


def _train(args: list[str], log: Path, cwd: Path) -> int:
    return Child(args, log, cwd)()
