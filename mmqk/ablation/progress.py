"""Progress of an ablation: a live table in a terminal, otherwise a line every ten seconds, and the final table."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from mmqk.ablation.pool import Pool
from mmqk.ablation.task import Outcome, Task
from mmqk.ablation.views import Follow
from mmqk.store import clock, is_locked, last_metrics

if TYPE_CHECKING:
    from rich.live import Live

LIVE_EVERY_SECONDS = 0.5
PLAIN_EVERY_SECONDS = 10.0


class Progress:
    """Shows the progress of a pool: in a terminal a live table of the running runs and a line, otherwise the line.

    ``run 3 of 9 · mixed-qk seed 0 · step 210/500 · loss 3.21 · 2 running · about 1:45 left``

    The time left is estimated from the steps of all runs since the start of this object.
    """

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream if stream is not None else sys.stderr
        self.live = self.stream.isatty()
        self._began: float | None = None
        self._done_before = 0
        self._shown = 0.0
        self._display: Live | None = None
        self._follows: dict[Task, Follow] = {}

    def __call__(self, pool: Pool) -> None:
        """Show the line if the interval has passed."""
        now = time.monotonic()
        if now - self._shown >= (LIVE_EVERY_SECONDS if self.live else PLAIN_EVERY_SECONDS):
            self._shown = now
            line = self.line(pool, now)
            if self.live:
                self._draw(pool, line)
            else:
                self.stream.write(f"{line}\n")
                self.stream.flush()

    def close(self) -> None:
        """Clear the live display."""
        if self._display is not None:
            self._display.stop()
            self._display = None

    def line(self, pool: Pool, now: float) -> str:
        """The line at time ``now`` (seconds of a monotonic clock)."""
        last = {task: last_metrics(task.folder / "metrics.jsonl", having="loss") for task in pool.running}
        steps = {
            task: max(task.first, last[task].get("step", 0) if task in last else out.step)
            for task, out in pool.outcomes.items()
        }
        open_ended = [task for task, out in pool.outcomes.items() if not out.ended]
        left = self._left(
            sum(steps.values()), sum(t.max_steps - steps[t] for t in open_ended), any(last.values()), now
        )
        if not pool.running:
            held = [
                f"another process trains {t.name} in {t.folder}" for t in open_ended if is_locked(t.folder)
            ]
            starting = f"about to start {open_ended[0].name}" if open_ended else "all runs have ended"
            return f"waiting: {held[0]}" if held else starting
        task = next(iter(pool.running))
        number = list(pool.outcomes).index(task) + 1
        parts = [f"run {number} of {len(pool.outcomes) + pool.to_come}", task.name]
        if record := last[task]:
            length = f"/{task.max_steps}" if task.max_steps else ""
            parts += [f"step {record['step']}{length}", f"loss {record['loss']:.2f}"]
        else:
            parts.append("starting")
        parts.append(f"{len(pool.running)} running")
        if pool.signal_received is not None or pool.stopping:
            parts.append("stopping (again to end at once)")
        elif left is not None:
            parts.append(f"about {clock(left)} left")
        return " · ".join(parts)

    def _left(self, done: int, remaining: int, training: bool, now: float) -> float | None:
        if self._began is None:
            if training:
                self._began, self._done_before = now, done
            return None
        here = done - self._done_before
        return (now - self._began) / here * remaining if here > 0 else None

    def _draw(self, pool: Pool, line: str) -> None:
        from rich.console import Console
        from rich.live import Live

        from mmqk.ablation.table import runs_table

        if self._display is None:
            console = Console(file=self.stream)
            # Do not redirect other output; remove the display before the final table.
            self._display = Live(
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._display.start()
        views = []
        for task in pool.running:
            view = self._follows.setdefault(task, Follow(task.name, task.folder)).look()
            # The status file may be from before this start.
            view.status, view.max_steps = "running", task.max_steps
            views.append(view)
        self._display.update(runs_table(views, self._display.console.width, line), refresh=True)


def table(outcomes: Mapping[Task, Outcome]) -> str:
    """The runs as text, one per line (last loss in nats per token), then the reasons of failed runs."""
    rows = [("arm", "seed", "status", "step", "last loss", "seconds")]
    for task, out in outcomes.items():
        loss = "" if out.loss is None else f"{out.loss:.3f}"
        step = f"{out.step}/{task.max_steps}" if task.max_steps else str(out.step)
        rows.append((task.arm, str(task.seed), out.status, step, loss, f"{out.seconds:.0f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (0, 2)
    lines = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    reasons = [f"{task.name} {out.status}: {out.reason}" for task, out in outcomes.items() if out.reason]
    return "\n".join(line.rstrip() for line in [*lines, *reasons])
