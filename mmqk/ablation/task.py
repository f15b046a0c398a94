"""One run of an ablation, and how it stands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmqk.store import FINISHED, DamagedFile, last_metrics, read_run, read_status


@dataclass(frozen=True)
class Task:
    """One run: who it is, the command line that makes it, and where it goes.

    Attributes:
        args: command line of ``mmqk.train`` without ``--out``.
        id: identity hash of the run, as its run.json has it.
        max_steps: length of the run in optimizer steps, 0 if unknown.
        entry: what ablation.json says of it besides: family, point, role, fork, replay.
        part: number by which slices share runs out.
        first: step at which it begins: 0, or that of its fork.
    """

    arm: str
    seed: int
    # Not compared: where a fork begins is known only once its parent is there.
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
        """Its entry in the ablation.json of the folder ``out``."""
        folder = Path(os.path.relpath(self.folder, out)).as_posix()
        return {"arm": self.arm, "seed": self.seed, "folder": folder, "id": self.id, **self.entry}


@dataclass(frozen=True)
class Outcome:
    """How a task stands: status "waiting" before it ran, "never" if it cannot, "running", or as status.json says."""

    status: str
    step: int = 0
    loss: float | None = None
    seconds: float = 0.0
    reason: str = ""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.status in FINISHED

    @property
    def ended(self) -> bool:
        """Whether the run says that it is over, for now at least."""
        return self.finished or self.status in ("failed", "interrupted")


def standing(task: Task) -> Outcome:
    """What the folder of a task says about it; "waiting" when it holds no run of that identity, and "failed" with
    the reason when its records cannot be read."""
    try:
        record, status = read_run(task.folder), read_status(task.folder)
    except DamagedFile as damaged:
        return Outcome("failed", reason=str(damaged))
    if record is None or record.get("id") != task.id or status is None:
        return Outcome("waiting")
    last = last_metrics(task.folder / "metrics.jsonl", having="loss")
    return Outcome(status.status, status.step, last.get("loss"), status.seconds, status.reason)
