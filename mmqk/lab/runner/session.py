"""One call of ``mmqk.ablate``: it plans the runs, writes ablation.json, and gives the pool new tasks when runs
end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmqk.lab.grid.grid import Grid
from mmqk.lab.runner.record import write_record
from mmqk.lab.runner.resolver import BlockedJob, Plan, checkpoint_of
from mmqk.lab.runner.task import Task, TaskOutcome, standing
from mmqk.store import UserError


@dataclass
class Session:
    """The current plan of a grid.

    Args:
        make: returns the plan, computed from the run folders.
        threads: CPU threads per run, written to ablation.json.
        part: (k, n): train part k of n parts of the grid; k is from 1 to n.
        only: names of the arms to train, with or without the values of their axes; if empty, all arms.

    Attributes:
        plan: the newest plan.
        error: the error that stopped the planning.
    """

    grid: Grid
    out: Path
    make: Callable[[], Plan]
    threads: int = 1
    part: tuple[int, int] = (1, 1)
    only: frozenset[str] = frozenset()
    plan: Plan = field(default_factory=Plan)
    error: UserError | None = None

    def look(self) -> None:
        """Plan without writing files."""
        self.plan = self.make()

    def begin(self) -> Sequence[Task]:
        """Plan, write ablation.json, and return the runs of this part and the runs of other parts that they
        wait for.

        Raises:
            UserError: an error in the grid, or a folder that cannot be written.
        """
        self.plan = write_record(self.out, self.grid, self.make, self.threads)
        on = {folder for wait in self.waiting for folder in wait.on}
        # Also train the runs of other parts that this part needs, because perhaps no other process trains them.
        return [*self.tasks, *(t for t in self.plan.tasks if not self._mine(t) and t.folder in on)]

    def more(self) -> Sequence[Task]:
        """Call `begin` while runs train. An error is stored and not raised, so that it does not stop the runs."""
        try:
            return self.begin()
        except UserError as error:
            self.error = error
            return []

    def to_come(self) -> int:
        """Return the number of runs of this session that wait for other runs and can still start."""
        return sum(wait.possible for wait in self.waiting)

    def ready(self) -> bool:
        """Return whether a running parent has written the checkpoint that a fork waits for."""
        at = [wait.at for wait in self.waiting if wait.at]
        return self.error is None and any(checkpoint_of(folder, step) for folder, step in at)

    @property
    def tasks(self) -> list[Task]:
        """The known runs that this session trains: the runs of its arms in its part of the grid."""
        return [task for task in self.plan.tasks if self._mine(task)]

    @property
    def waiting(self) -> list[BlockedJob]:
        """The runs of this session that cannot start yet."""
        return [wait for wait in self.plan.waiting if self._mine(wait.task)]

    def outcomes(self, trained: dict[Task, TaskOutcome] | None = None) -> dict[Task, TaskOutcome]:
        """Return the outcome of every run of this part; ``trained`` holds the outcomes from the pool."""
        trained = trained or {}
        outcomes = {task: trained.get(task) or standing(task) for task in self.tasks}
        outcomes |= {task: outcome for task, outcome in trained.items() if task not in outcomes}
        status = {True: "waiting", False: "never"}
        return outcomes | {w.task: TaskOutcome(status[w.possible], reason=w.reason) for w in self.waiting}

    def remarks(self) -> list[str]:
        """Return a sentence for each selected learning rate that is the smallest or largest one tried."""
        mine = {task.arm for task in self.tasks}
        return [choice.edge for choice in self.plan.choices if choice.edge and choice.arm in mine]

    def _mine(self, task: Task) -> bool:
        k, n = self.part
        named = not self.only or bool({task.arm, task.entry.get("family")} & self.only)
        return named and task.part % n == k - 1
