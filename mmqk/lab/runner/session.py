"""One call of ``mmqk ablate``: it plans the runs, writes ablation.json, and gives the pool new tasks when runs
end."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from filelock import FileLock

from mmqk.lab.grid import Grid
from mmqk.lab.grid.claims import claims_hash
from mmqk.lab.runner.plan import Plan, Resolver, Wait, checkpoint_of, plan
from mmqk.lab.runner.pool import Task, TaskOutcome, standing
from mmqk.store import DamagedFile, UserError, find_file, new_folder, read_run, read_status, write_json
from mmqk.store.files import writing
from mmqk.store.folder import ABLATION_NAME, read_ablation
from mmqk.store.formatting import clock, text_table
from mmqk.store.pack import unpacked

LOCK_NAME = "ablation.lock"


@dataclass
class Session:
    """The current plan of a grid.

    Args:
        part: (k, n): train part k of n parts of the grid; k is from 1 to n.
        only: names of the arms to train, with or without the values of their axes; if empty, all arms.

    Attributes:
        plan: the newest plan.
        error: the error that stopped the planning.
    """

    grid: Grid
    out: Path
    resolver: Resolver
    part: tuple[int, int] = (1, 1)
    only: frozenset[str] = frozenset()
    plan: Plan = field(default_factory=Plan)
    error: UserError | None = None

    def look(self) -> Plan:
        """Plan without writing files."""
        self.plan = plan(self.grid, self.out, self.resolver)
        return self.plan

    def begin(self) -> Sequence[Task]:
        """Plan, write ablation.json, and return the runs of this part and the runs of other parts that they
        wait for.

        Raises:
            UserError: an error in the grid, or a folder that cannot be written.
        """
        write_record(self.out, self.grid, self.look, self.resolver.threads)
        on = {folder for wait in self.waiting.values() for folder in wait.on}
        # Also train the runs of other parts that this part needs, because perhaps no other process trains them.
        return [*self.tasks, *(t for t in self.plan.tasks if not self._mine(t) and t.folder in on)]

    def more(self, ended: bool) -> Sequence[Task]:
        """Plan again if a run has ended, or if a running parent has written the checkpoint that a fork waits for. An
        error is stored and not raised, so that it does not stop the runs."""
        at = [wait.at for wait in self.waiting.values() if wait.at]
        if not ended and (self.error or not any(checkpoint_of(folder, step) for folder, step in at)):
            return []
        try:
            return self.begin()
        except UserError as error:
            self.error = error
            return []

    def to_come(self) -> int:
        """Return the number of runs of this session that wait for other runs and can still start."""
        return sum(wait.possible for wait in self.waiting.values())

    @property
    def tasks(self) -> list[Task]:
        """The known runs that this session trains: the runs of its arms in its part of the grid."""
        return [task for task in self.plan.tasks if self._mine(task)]

    @property
    def waiting(self) -> dict[Task, Wait]:
        """The runs of this session that cannot start yet."""
        return {task: wait for task, wait in self.plan.waiting.items() if self._mine(task)}

    def outcomes(self, trained: Mapping[Task, TaskOutcome] | None = None) -> dict[Task, TaskOutcome]:
        """Return the outcome of every run of this part; ``trained`` holds the outcomes from the pool."""
        outcomes = {task: standing(task) for task in self.tasks} | dict(trained or {})
        for task, wait in self.waiting.items():
            outcomes[task] = TaskOutcome("waiting" if wait.possible else "never", reason=wait.reason)
        return outcomes

    def remarks(self) -> Iterator[str]:
        """Yield a sentence for each selected learning rate that is the smallest or largest one tried."""
        mine = {task.arm for task in self.tasks}
        for choice in self.plan.choices:
            arm, best, tried = choice["arm"], choice["lr"], [float(rate) for rate in choice["values"]]
            if arm in mine and len(tried) > 1 and best in (min(tried), max(tried)):
                end = "smallest" if best == min(tried) else "largest"
                yield f"{arm}: its best learning rate, {best:g}, is the {end} of the grid: widen lr.grid"

    def _mine(self, task: Task) -> bool:
        k, n = self.part
        named = not self.only or bool({task.arm, task.family} & self.only)
        return named and task.part % n == k - 1


def check_out(out: Path, grid: Grid) -> None:
    """Check the output folder.

    Raises:
        UserError: ``out`` is a file, the folder of another grid, or has an unreadable ablation.json.
    """
    at = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not at.is_dir():
        raise UserError(f"{out} cannot be a folder, because {at} is a file: give another --out")
    record = _read_record(out)
    if record is not None and record.get("name") != grid.name:
        raise UserError(f"{out} has the runs of grid {record.get('name')!r}, not {grid.name!r}: give another --out")


def write_record(out: Path, grid: Grid, make: Callable[[], Plan], threads: int) -> None:
    """Write ablation.json for the plan that ``make`` returns, under a lock, so that no other process writes it at the
    same time.

    The record keeps the hash of the claims at their first registration and, for each run, the hash of the claims when
    the run was first planned. An unreadable record is not overwritten. If the record is missing but runs have begun,
    the claims are registered too late: the new record has the field "lost", and the analysis treats all claims as
    exploratory.

    Raises:
        UserError: the folder cannot be written, or its ablation.json cannot be read.
    """
    with _record_of(out) as first:
        plan, now = make(), claims_hash(grid.raw)
        registered = first["registered"] if first else now
        before = {(run["id"], run["arm"]): run["claims"] for run in first.get("runs", ()) if run["id"]}
        runs = [{**run, "claims": before.get((run["id"], run["arm"]), now)} for run in plan.entries]
        record: dict[str, Any] = {"name": grid.name, "registered": registered, "grid": grid.raw}
        begun = (read_run(task.folder) is not None for task in plan.tasks)
        if first.get("lost") or (not first and grid.raw.get("claims") and any(begun)):
            record["lost"] = True
        record |= {"runs": runs, "threads": threads}
        if plan.choices:
            record["lr"] = list(plan.choices)
        if record != first:
            write_json(out / ABLATION_NAME, record)


def take_runs(pack: Path, out: Path, grid: Grid) -> list[str]:
    """Copy the finished runs of a pack that ``out`` does not have, with their registration, and return their folders.

    Unfinished runs are not copied, because a pack has no checkpoints to resume them from. Each copied run keeps the
    hash of the claims under which it was planned, so its claims are not registered again.

    Raises:
        UserError: the file is not a pack of this grid, or ``out`` cannot be written.
    """
    pack = find_file(pack)
    if not pack.exists():
        raise UserError(f"{pack} does not exist: --from takes a pack of the grid's runs (mmqk pack)")
    source = unpacked(pack)
    packed = _read_record(source)
    if not pack.is_file() or packed is None or packed.get("name") != grid.name:
        raise UserError(f"{pack} is not a pack of the grid {grid.name!r}: pack the folder of its runs (mmqk pack)")
    new: list[str] = []
    names = dict.fromkeys(run["folder"] for run in packed["runs"])
    with _record_of(out) as first:
        begun = not first and any(out.glob("*/*/run.json"))
        for name in names:
            status = read_status(source / name)
            if status is not None and status.finished and not (out / name).exists():
                with new_folder(out / name) as folder:
                    shutil.copytree(source / name, folder, dirs_exist_ok=True)
                new.append(name)
        first = first or {**packed, "runs": []}
        # If the hash that the folder registered is not that of the grid, the claims have changed: keep it.
        if first["registered"] == claims_hash(grid.raw):
            first["registered"] = packed["registered"]
        first["runs"] = [run for run in first["runs"] if run["folder"] not in new]
        first["runs"] += [run for run in packed["runs"] if run["folder"] in new]
        if packed.get("lost") or begun:
            first["lost"] = True
        write_json(out / ABLATION_NAME, first)
    return new


@contextlib.contextmanager
def _record_of(out: Path) -> Iterator[dict[str, Any]]:
    """Make the folder, and yield the content of its ablation.json, under a lock; empty if there is none."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / LOCK_NAME):
            yield _read_record(out) or {}


def _read_record(folder: Path) -> dict[str, Any] | None:
    """Return the content of the ablation.json of a folder, which must have the registration of its claims; None if
    there is none."""
    record = read_ablation(folder)
    if record and not ("registered" in record and all({"id", "claims"} <= run.keys() for run in record["runs"])):
        advice = "restore it from a copy, as it holds the registration of the claims"
        raise DamagedFile(folder / ABLATION_NAME, "it has no registration", advice)
    return record


# Tables ---------------------------------------------------------------------------------------------------


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
    """Return a line with the estimated time to train the unfinished runs, if ``jobs`` runs train at the same
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
        return f"runs to train: {len(left)}; time unknown, because no run of this grid has finished"
    seconds = 0.0
    for task in left:
        of_arm = [pace for other, pace in paces if other.arm == task.arm]
        of_family = of_arm or [pace for other, pace in paces if other.family == task.family]
        of_step = median(of_family or [pace for _, pace in paces])
        seconds += of_step * max(0, task.max_steps - max(outcomes[task].step, task.first))
    about = clock(seconds / min(jobs, len(left)))
    return f"runs to train: {len(left)}, {jobs} at a time; about {about} (minutes:seconds)"
