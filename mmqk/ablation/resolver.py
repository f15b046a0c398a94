"""Command lines of runs, resolved once each, and the runs that they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmqk.ablation.choose import ChosenRate
from mmqk.ablation.task import Task
from mmqk.grid.arms import Job
from mmqk.store import UserError, read_run
from mmqk.store.checkpoints import checkpoints_in, step_of


@dataclass(frozen=True, eq=False)
class ResolvedJob:
    """A job with its identity.

    Attributes:
        args: its command line, without the checkpoint that it is forked from.
        run: the resolved configuration (`mmqk.config.RunConfig`).
        folder: where it is or goes.
        start: the run and the step that it is forked from.
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
        """The step at which it begins: that of its checkpoint, of a fork."""
        return (self.run.identity.get("fork") or {}).get("step", 0)

    def task(self) -> Task:
        """What says how it stands."""
        return Task(self.job.arm, self.seed, (), self.folder, self.run.id, self.max_steps)


@dataclass(frozen=True)
class ForkPoint:
    """A run at one of its steps."""

    known: ResolvedJob
    step: int


@dataclass(frozen=True)
class StartCheckpoint:
    """The checkpoint that a fork begins in, or why there is none yet."""

    file: Path | None = None
    reason: str = ""
    on: tuple[Path, ...] = ()
    possible: bool = True
    at: tuple[Path, int] | None = None
    mistake: bool = False


@dataclass(frozen=True)
class BlockedJob:
    """A run that cannot begin yet.

    Attributes:
        task: the run as far as it is known, with a folder that does not exist.
        reason: what it waits for, or why it never begins.
        on: folders of the runs it waits for.
        possible: whether it can still begin.
        mistake: whether that it cannot is for the grid's author to mend.
        at: run folder and step of the checkpoint that it begins in, if that is all it waits for.
    """

    task: Task
    reason: str
    on: tuple[Path, ...] = ()
    possible: bool = True
    mistake: bool = False
    at: tuple[Path, int] | None = None


@dataclass(frozen=True)
class Plan:
    """Every run that is known now.

    Attributes:
        tasks: finished, running or ready to begin, each folder once.
        waiting: the others.
        entries: what ablation.json says of each, by name: two names may share a folder.
        choices: learning rates that were chosen.
    """

    tasks: tuple[Task, ...] = ()
    waiting: tuple[BlockedJob, ...] = ()
    entries: tuple[Mapping[str, Any], ...] = ()
    choices: tuple[ChosenRate, ...] = ()


class Resolver:
    """`mmqk.config.resolve` that answers a question it had before at once.

    Args:
        threads: CPU threads of a run whose configuration does not say.
    """

    def __init__(self, threads: int = 1):
        self.threads = threads
        self.choices: dict[tuple[Path, ...], ChosenRate] = {}
        self._runs: dict[tuple[Any, ...], Any] = {}

    def __call__(self, args: Sequence[str], where: str, parent: ResolvedJob | None = None, step: int = 0) -> Any:
        """The run of a command line, or of one that is forked from ``parent`` at ``step``.

        Raises:
            UserError: as `mmqk.config.resolve`, with ``where`` before it.
        """
        key = (tuple(args), parent and parent.run.id, step)
        if key not in self._runs:
            try:
                self._runs[key] = _resolve(list(args), parent, step)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        return self._runs[key]


def _resolve(args: list[str], parent: ResolvedJob | None, step: int) -> Any:
    # Imports jsonargparse and numpy, which --help and the analysis do without.
    from mmqk import config

    if parent is None:
        return config.resolve(args)
    return config.resolve(args, parent=config.Parent(parent.run.id, step, parent.run.nested()))


def threads_of(folder: Path) -> int:
    """CPU threads that the run of a folder was begun with, 0 if nothing says so."""
    details = (read_run(folder) or {}).get("details") or {}
    return int((details.get("config") or {}).get("threads") or 0)


def checkpoint_of(folder: Path, step: int) -> Path | None:
    """The checkpoint of a step, if the run has kept it."""
    return checkpoints_of(folder).get(step)


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """Checkpoints of a run by step, in their order."""
    return {step_of(path): path for path in checkpoints_in(folder / "checkpoints")}


def by_variant(out: Path) -> dict[str, Sequence[Path]]:
    """Folders of arms by the hash at the end of their names."""
    found: dict[str, list[Path]] = {}
    for path in sorted(out.glob("*-*")):
        found.setdefault(path.name.rpartition("-")[2], []).append(path)
    return dict(found)
