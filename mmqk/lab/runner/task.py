"""One run of a grid, its outcome, where it may run, and how long the unfinished runs will take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from mmqk.store import DamagedFile, Status, clock, last_metrics, read_run, read_status
from mmqk.store.formatting import plural, text_table


@dataclass(frozen=True)
class Task:
    """One run: its name, command line and folder.

    Attributes:
        args: command line of ``mmqk.train`` without ``--out``.
        id: identity hash of the run, as in its run.json.
        max_steps: length of the run in optimizer steps, 0 if unknown.
        entry: further fields in ablation.json: family, point, role, fork.
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
    loss = last_metrics(task.folder / "metrics.jsonl", having="loss").get("loss")
    return TaskOutcome(**vars(status), loss=loss if isinstance(loss, int | float) else None)


def outcome_table(outcomes: Mapping[Task, TaskOutcome]) -> str:
    """Return a table with one line per run, followed by one line for each outcome that has a reason. The last loss is
    in nats per token."""
    rows = [("arm", "seed", "status", "step", "last loss", "seconds")]
    for task, out in outcomes.items():
        loss = "" if out.loss is None else f"{out.loss:.3f}"
        step = f"{out.step}/{task.max_steps}" if task.max_steps else str(out.step)
        rows.append((task.arm, str(task.seed), out.status, step, loss, f"{out.seconds:.0f}"))
    reasons = [f"{task.name} {out.status}: {out.reason}" for task, out in outcomes.items() if out.reason]
    return "\n".join(line.rstrip() for line in [*text_table(rows, {0, 2}), *reasons])


def time_left(outcomes: Mapping[Task, TaskOutcome], jobs: int) -> str:
    """Return a sentence with the estimated time to train the unfinished runs, if ``jobs`` runs train at the same
    time.

    The time per step is the median over the finished runs of the arm. If the arm has no finished run, it is the
    median over the finished runs of the family, or else over all finished runs of the grid. The time includes
    probes and validation, but not the startup. For a fork, only the steps after the fork count.
    """
    left = [task for task, out in outcomes.items() if not out.finished and out.status != "never"]
    paces = [
        (task, out.seconds / (out.step - task.first))
        for task, out in outcomes.items()
        if out.finished and out.step > task.first and out.seconds > 0
    ]
    if not left:
        return "nothing to train"
    if not paces:
        return f"time to train {plural(len(left), 'run')}: unknown, because no run of this grid has finished"
    seconds, borrowed = 0.0, 0
    for task in left:
        of_arm = [pace for other, pace in paces if other.arm == task.arm]
        of_family = of_arm or [pace for other, pace in paces if _family(other) == _family(task)]
        of_step = median(of_family or [pace for _, pace in paces])
        seconds += of_step * max(0, task.max_steps - max(outcomes[task].step, task.first))
        borrowed += not of_family
    from_others = f" ({plural(borrowed, 'run')} estimated from the speed of other arms)" if borrowed else ""
    at_once = f", {jobs} at a time" if jobs > 1 else ""
    about = clock(seconds / min(jobs, len(left)))
    return f"time to train {plural(len(left), 'run')}{at_once}: about {about} (minutes:seconds){from_others}"


def _family(task: Task) -> str:
    return task.entry.get("family", task.arm)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpus() -> tuple[str, ...]:
    """Return the GPUs that runs may use, each as a value for CUDA_VISIBLE_DEVICES. If this variable is set, these are
    the GPUs that it lists; otherwise they are all GPUs of the machine.

    The GPUs are counted without CUDA, because CUDA would create a context on each GPU.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(part.strip() for part in given.split(",") if part.strip() not in ("", "-1"))
    files = sorted(Path("/dev").glob("nvidia[0-9]*"), key=lambda path: (len(path.name), path.name))
    return tuple(str(i) for i in range(len(files)))
