"""Show the progress of a grid while its runs train, and print the final table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from mmqk.lab.runner.pool import Pool
from mmqk.lab.runner.task import Task, TaskOutcome
from mmqk.lab.runner.views import Follow
from mmqk.progress import Progress
from mmqk.store import is_locked, last_metrics
from mmqk.store.formatting import text_table

if TYPE_CHECKING:
    from rich.console import RenderableType


class PoolProgress:
    """Shows the progress of a pool: one line, and on a terminal also a table of the running runs.

    ``run 3 of 9 · mixed-qk seed 0 · step 210/500 · loss 3.21 · 2 running · about 1:45 left``

    The time left is estimated from the steps of all runs together, counted from the first logged loss of any run.
    """

    def __init__(self, stream: TextIO | None = None):
        self.progress = Progress(stream)
        self._follows: dict[Task, Follow] = {}

    def __call__(self, pool: Pool) -> None:
        """Show the progress if the display interval has passed."""
        if self.progress.due():
            self.progress.show(*self.state(pool), above=lambda width: self._table(pool, width))

    def close(self) -> None:
        """Clear the display."""
        self.progress.close()

    def state(self, pool: Pool) -> tuple[str, float | None, float | None]:
        """Return the progress line, the number of steps done and the total number of steps. The numbers are None if
        unknown."""
        last = {task: last_metrics(task.folder / "metrics.jsonl", having="loss") for task in pool.running}
        steps = {
            task: max(task.first, last[task].get("step", 0) if task in last else out.step)
            for task, out in pool.outcomes.items()
        }
        unfinished = [task for task, out in pool.outcomes.items() if not out.ended]
        if not pool.running:
            locked = [
                f"another process trains {t.name} in {t.folder}" for t in unfinished if is_locked(t.folder)
            ]
            starting = f"about to start {unfinished[0].name}" if unfinished else "all runs have ended"
            return f"waiting: {locked[0]}" if locked else starting, None, None
        task = next(iter(pool.running))
        number = list(pool.outcomes).index(task) + 1
        parts = [f"run {number} of {len(pool.outcomes) + pool.to_come()}", task.name]
        if record := last[task]:
            length = f"/{task.max_steps}" if task.max_steps else ""
            parts += [f"step {record['step']}{length}", f"loss {record['loss']:.2f}"]
        else:
            parts.append("starting")
        parts.append(f"{len(pool.running)} running")
        if pool.stopping:
            parts.append("stopping (press Ctrl-C again to kill the runs)")
        if pool.stopping or not any(last.values()):
            return " · ".join(parts), None, None
        done = sum(steps.values())
        return " · ".join(parts), done, done + sum(t.max_steps - steps[t] for t in unfinished)

    def _table(self, pool: Pool, width: int) -> RenderableType:
        from mmqk.lab.runner.table import runs_table

        views = []
        for task in pool.running:
            view = self._follows.setdefault(task, Follow(task.name, task.folder)).look()
            # The status file may still be from an earlier start of the run.
            view.status, view.max_steps = "running", task.max_steps
            views.append(view)
        return runs_table(views, width)


def table(outcomes: Mapping[Task, TaskOutcome]) -> str:
    """Return a table with one line per run, followed by one line for each outcome that has a reason. The last loss is
    in nats per token."""
    rows = [("arm", "seed", "status", "step", "last loss", "seconds")]
    for task, out in outcomes.items():
        loss = "" if out.loss is None else f"{out.loss:.3f}"
        step = f"{out.step}/{task.max_steps}" if task.max_steps else str(out.step)
        rows.append((task.arm, str(task.seed), out.status, step, loss, f"{out.seconds:.0f}"))
    reasons = [f"{task.name} {out.status}: {out.reason}" for task, out in outcomes.items() if out.reason]
    return "\n".join(line.rstrip() for line in [*text_table(rows, {0, 2}), *reasons])
