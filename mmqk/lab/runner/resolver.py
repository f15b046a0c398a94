"""Resolve the configuration and identity of a run from its command line, with a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmqk.lab.grid.arms import Job
from mmqk.lab.runner.choose import ChosenRate
from mmqk.lab.runner.task import Task
from mmqk.store import UserError, read_run
from mmqk.store.checkpoints import checkpoints_in, step_of


@dataclass(frozen=True, eq=False)
class ResolvedJob:
    """A job with its identity.

    Attributes:
        args: command line, without the checkpoint that the run is forked from.
        run: the resolved configuration (`mmqk.config.RunConfig`).
        folder: the run folder, which may not exist yet.
        start: for a fork, its parent and the step; otherwise None.
    """

    job: Job
    args: tuple[str, ...]
    run: Any
    folder: Path
    start: ForkPoint | None = None

    @property
    def seed(self) -> int:
        return self.run.identity["seed"]

    @property
    def max_steps(self) -> int:
        return self.run.identity["trainer"]["max_steps"]

    @property
    def first(self) -> int:
        """The first step: 0, or for a fork the step of the checkpoint that it starts from."""
        return (self.run.identity.get("fork") or {}).get("step", 0)

    def task(self) -> Task:
        """Return a task to query the status of the run."""
        return Task(self.job.arm, self.seed, (), self.folder, self.run.id, self.max_steps)


@dataclass(frozen=True)
class ForkPoint:
    """The parent of a fork and the step that the fork starts from."""

    parent: ResolvedJob
    step: int


@dataclass(frozen=True)
class BlockedJob:
    """A run that cannot start yet.

    Attributes:
        task: a provisional task whose folder does not exist.
        reason: what the run waits for, or why it can never start.
        on: folders of the runs that this run waits for.
        possible: whether the run can still start.
        mistake: whether a user error keeps the run from starting.
        at: run folder and step of the checkpoint that the run waits for; None if it does not wait for a checkpoint.
    """

    task: Task
    reason: str
    on: tuple[Path, ...] = ()
    possible: bool = True
    mistake: bool = False
    at: tuple[Path, int] | None = None


@dataclass(frozen=True)
class Plan:
    """All runs that are known so far.

    Attributes:
        tasks: runs that are finished, running or ready to start, one per folder.
        waiting: runs that cannot start yet.
        entries: the entries of ablation.json, one per run name; two names may share a folder.
        choices: selected learning rates.
    """

    tasks: tuple[Task, ...] = ()
    waiting: tuple[BlockedJob, ...] = ()
    entries: tuple[Mapping[str, Any], ...] = ()
    choices: tuple[ChosenRate, ...] = ()


class Resolver:
    """`mmqk.config.resolve` with a cache.

    Args:
        threads: CPU threads of a run whose configuration does not set them.
    """

    def __init__(self, threads: int = 1):
        self.threads = threads
        self.choices: dict[tuple[Path, ...], ChosenRate] = {}
        self._runs: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, args: Sequence[str], where: str, parent: ResolvedJob | None = None, step: int = 0
    ) -> Any:
        """Return the resolved configuration of a command line; with ``parent``, that of a fork from ``parent`` at
        ``step``.

        Raises:
            UserError: an error of `mmqk.config.resolve`, with the prefix ``where``.
        """
        key = (tuple(args), parent and parent.run.id, step)
        if key not in self._runs:
            try:
                self._runs[key] = _resolve(list(args), parent, step)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        return self._runs[key]

    def threads_flag(self, run: Any, *folders: Path) -> tuple[str, ...]:
        """Return the flag for CPU threads, unless the configuration of the run sets them: the threads of the first of
        the folders that has a run, otherwise the run's share of the cores. The number of threads changes the rounding
        of sums."""
        if run.threads:
            return ()
        return (f"--threads={next(filter(None, map(threads_of, folders)), self.threads)}",)


def _resolve(args: list[str], parent: ResolvedJob | None, step: int) -> Any:
    # This import loads pydantic and numpy, which --help and the analysis do not need.
    from mmqk import config

    if parent is None:
        return config.resolve(args)
    return config.resolve(args, parent=config.Parent(parent.run.id, step, parent.run.nested()))


def threads_of(folder: Path) -> int:
    """Return the number of CPU threads with which the run of a folder began; 0 if it is not recorded."""
    details = (read_run(folder) or {}).get("details") or {}
    return int((details.get("config") or {}).get("threads") or 0)


def checkpoint_of(folder: Path, step: int) -> Path | None:
    """Return the checkpoint of a step; None if the folder does not have it."""
    return checkpoints_of(folder).get(step)


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, ascending."""
    return {step_of(path): path for path in checkpoints_in(folder / "checkpoints")}
