"""One call of ``mmqk.ablate``: what it plans, records, and hands to the pool as runs end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmqk.ablation.pool import Pool
from mmqk.ablation.record import code_of, set_aside, write_record
from mmqk.ablation.resolver import BlockedJob, Plan, checkpoint_of
from mmqk.ablation.task import Outcome, Task, standing
from mmqk.grid.grid import Grid
from mmqk.store import UserError, code_hash, is_locked, same_code

NAMED = 6


@dataclass
class Session:
    """The plan of a grid as it grows.

    Args:
        make: the plan as it stands on disk now.
        threads: CPU threads of a run, for the record.
        part: (k, n): the k-th of n parts of the runs, from 1 on.
        rerun_stale: make finished runs of other code again.

    Attributes:
        plan: the newest one.
        moved: sentences about runs that were put aside.
        error: why nothing more could be planned.
    """

    grid: Grid
    out: Path
    make: Callable[[], Plan]
    threads: int = 1
    part: tuple[int, int] = (1, 1)
    rerun_stale: bool = False
    plan: Plan = field(default_factory=Plan)
    moved: list[str] = field(default_factory=list)
    pool: Pool | None = None
    error: UserError | None = None
    _seen: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.code = code_hash()

    def look(self) -> None:
        """Plan, and write nothing."""
        self.plan = self.make()

    def begin(self) -> Sequence[Task]:
        """Plan and record; the runs of this part, then those of others that these wait for.

        Raises:
            UserError: a mistake in the grid, or a folder that cannot be written.
        """
        self.plan = write_record(self.out, self.grid, self.make, self.threads)
        while self.rerun_stale and self._set_aside():
            self.plan = write_record(self.out, self.grid, self.make, self.threads)
        self._tell()
        on = {folder for wait in self.waiting for folder in wait.on}
        # Nobody may be about to train them: this part must not wait for ever.
        return [*self.tasks, *(t for t in self.plan.tasks if not self._mine(t) and t.folder in on)]

    def more(self) -> Sequence[Task]:
        """As `begin`, while runs are training: an error is kept for later, as it must not end them."""
        try:
            return self.begin()
        except UserError as error:
            self.error = error
            return []

    def follow(self, pool: Pool) -> None:
        """Keep the pool informed of how many runs are to come."""
        self.pool = pool
        pool.ready = self.ready
        self._tell()

    def ready(self) -> bool:
        """Whether a running parent has written what a fork waits for."""
        at = [wait.at for wait in self.waiting if wait.at]
        return self.error is None and any(checkpoint_of(folder, step) for folder, step in at)

    @property
    def tasks(self) -> list[Task]:
        """Known runs of this part."""
        return [task for task in self.plan.tasks if self._mine(task)]

    @property
    def waiting(self) -> list[BlockedJob]:
        """Runs of this part that cannot begin yet."""
        return [wait for wait in self.plan.waiting if self._mine(wait.task)]

    def outcomes(self, here: dict[Task, Outcome] | None = None) -> dict[Task, Outcome]:
        """How every run of this part stands; ``here`` is what the pool says of those that it saw."""
        here = here or {}
        found = {task: here.get(task) or standing(task) for task in self.tasks}
        found |= {task: outcome for task, outcome in here.items() if task not in found}
        how = {True: "waiting", False: "never"}
        return found | {w.task: Outcome(how[w.possible], reason=w.reason) for w in self.waiting}

    def remarks(self) -> list[str]:
        """Sentences about runs of other code, those put aside, and learning rates at an end of their grid."""
        stale = [task.name for task in self.tasks if self._stale(task)]
        said = []
        if stale:
            runs = "1 finished run was" if len(stale) == 1 else f"{len(stale)} finished runs were"
            more = f" and {len(stale) - NAMED} more" if len(stale) > NAMED else ""
            said = [
                f"{runs} made by other code than the present one (--rerun-stale makes such again):"
                f" {', '.join(stale[:NAMED])}{more}"
            ]
        edges = [choice.edge for choice in self.plan.choices if choice.edge]
        return [*said, *self.moved, *edges]

    def _tell(self) -> None:
        if self.pool is not None:
            self.pool.to_come = sum(wait.possible for wait in self.waiting)

    def _mine(self, task: Task) -> bool:
        k, n = self.part
        return task.part % n == k - 1

    def _stale(self, task: Task) -> bool:
        return standing(task).finished and not same_code(code_of(task.folder), self.code)

    def _set_aside(self) -> bool:
        """Put runs of other code aside that were there before this session; whether there were any."""
        found = False
        for task in self.tasks:
            # Sources may change while runs go on: what this session made is never put aside by it.
            new = task.folder not in self._seen
            self._seen.add(task.folder)
            if new and self._stale(task) and not is_locked(task.folder):
                place = set_aside(task.folder, self.out)
                if place is not None:
                    self.moved.append(f"{task.name}: made by other code, kept in {place}")
                    found = True
        return found
