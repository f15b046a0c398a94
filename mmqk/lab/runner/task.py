"""One run of a grid and its outcome."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmqk.store import DamagedFile, Status, last_metrics, read_run, read_status


@dataclass(frozen=True)
class Task:
    """One run: its name, command line and folder.

    Attributes:
        args: command line of ``mmqk.train`` without ``--out``.
        id: identity hash of the run, as in its run.json.
        max_steps: length of the run in optimizer steps, 0 if unknown.
        entry: further fields in ablation.json: family, point, role, fork, replay.
        part: number that decides which part of the grid the run belongs to.
        first: the first step; 0, or for a fork the step of the checkpoint that it starts from.
    """

    arm: str
    seed: int
    # This field is not compared, because the arguments of a fork name a checkpoint that is known only after the
    # parent has written it.
    args: tuple[str, ...] = field(compare=False)
    folder: Path
    id: str
    max_steps: int = 0
    entry: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    part: int = field(default=0, compare=False)
    first: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}"

    def record(self, out: Path) -> dict[str, Any]:
        """Return the entry of the run in the ablation.json of the folder ``out``."""
        folder = Path(os.path.relpath(self.folder, out)).as_posix()
        return {"arm": self.arm, "seed": self.seed, "folder": folder, "id": self.id, **self.entry}


@dataclass(frozen=True)
class TaskOutcome(Status):
    """The outcome of a task: the status of its run and its last training loss. The status is "waiting" before the
    start, and "never" if the run cannot start."""

    loss: float | None = None

    @property
    def ended(self) -> bool:
        """Whether the run has stopped; a failed or interrupted run can be resumed."""
        return self.finished or self.status in ("failed", "interrupted")


def standing(task: Task) -> TaskOutcome:
    """Return the outcome of a task from its folder.

    The status is "waiting" if the folder has no run with this identity, and "failed" if its records cannot be read.
    """
    try:
        record, status = read_run(task.folder), read_status(task.folder)
    except DamagedFile as damaged:
        return TaskOutcome("failed", reason=str(damaged))
    if record is None or record.get("id") != task.id or status is None:
        return TaskOutcome("waiting")
    last = last_metrics(task.folder / "metrics.jsonl", having="loss")
    loss = last.get("loss")
    return TaskOutcome(**vars(status), loss=loss if isinstance(loss, int | float) else None)
