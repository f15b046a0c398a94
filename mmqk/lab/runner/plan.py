"""Decide from the grid and the run folders which runs can start now and which must wait.

The plan is made again whenever a run ends, because other runs may wait for this run: the runs at a selected learning
rate wait for the selection runs, and a fork waits for its parent. What a fork does next depends on its parent:

    the parent has a checkpoint of the step    the fork starts from it
    the parent diverged before the step        the fork never starts
    the parent is not finished                 the fork waits for the step
    the parent finished without the step       the parent is trained again in a second folder, and the fork waits
    the second parent finished without it too  the fork never starts: the user has removed a checkpoint
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmqk.lab.grid import Grid
from mmqk.lab.grid.arms import LR, Job, LrRule, parts_of
from mmqk.lab.runner.pool import Task, standing
from mmqk.store import UserError, identity_hash, read_run
from mmqk.store.checkpoint_files import checkpoints_in, step_of


@dataclass(frozen=True)
class Wait:
    """Why a run cannot start yet.

    Attributes:
        reason: what the run waits for, or why it can never start.
        on: folders of the runs that this run waits for.
        possible: whether the run can still start.
        mistake: whether a user error keeps the run from starting.
        at: run folder and step of the checkpoint that the run waits for; None if it does not wait for a checkpoint.
    """

    reason: str
    on: tuple[Path, ...] = ()
    possible: bool = True
    mistake: bool = False
    at: tuple[Path, int] | None = None


@dataclass(frozen=True, eq=False)
class Planned:
    """A job with its configuration.

    Attributes:
        args: command line, without the checkpoint that the run is forked from.
        run: the resolved configuration (`mmqk.config.RunConfig`).
        folder: the run folder, which may not exist yet.
        parent: the run that a fork starts from, at ``step``; otherwise None.
        wait: what the configuration waits for. Until then it has a provisional learning rate, its own or its
            parent's, which shows errors early; the folder is provisional too.
    """

    job: Job
    args: tuple[str, ...]
    run: Any
    folder: Path = Path()
    parent: Planned | None = None
    step: int = 0
    wait: Wait | None = None

    @property
    def first(self) -> int:
        """The first step: 0, or for a fork the step of the checkpoint that it starts from."""
        return (self.run.identity.get("fork") or {}).get("step", 0)


@dataclass(frozen=True)
class Plan:
    """All runs that are known so far.

    Attributes:
        tasks: runs that are finished, running or ready to start, one per folder.
        waiting: runs that cannot start yet. The folder of a task is provisional while its configuration is.
        entries: the entries of ablation.json, one per run name; two names may share a folder.
        choices: the entries of ablation.json about selected learning rates (`selected`).
    """

    tasks: tuple[Task, ...] = ()
    waiting: Mapping[Task, Wait] = field(default_factory=dict)
    entries: tuple[Mapping[str, Any], ...] = ()
    choices: tuple[Mapping[str, Any], ...] = ()


class Resolver:
    """`mmqk.config.resolve` with a cache, which also keeps the selected learning rates.

    Args:
        threads: CPU threads of a run whose configuration does not set them.
    """

    def __init__(self, threads: int = 1):
        self.threads = threads
        self.choices: dict[tuple[Path, ...], Mapping[str, Any]] = {}
        self._runs: dict[tuple[Any, ...], Any] = {}

    @property
    def modalities(self) -> set[str]:
        """The modalities of the runs so far."""
        return {name for run in self._runs.values() for name in run.model.vocab_sizes}

    def __call__(self, args: Sequence[str], job: Job, parent: Planned | None = None, step: int = 0) -> Any:
        """Return the resolved configuration of a command line; with ``parent``, that of a fork from ``parent`` at
        ``step``.

        Raises:
            UserError: an error of `mmqk.config.resolve`, with the arm.
        """
        # This import loads the parser and numpy, which --help and the analysis do not need.
        from mmqk import config

        key = (tuple(args), parent and parent.run.id, step)
        if key not in self._runs:
            fork = None if parent is None else config.Parent(parent.run.id, step, parent.run.nested())
            try:
                self._runs[key] = config.resolve(list(args), parent=fork)
            except UserError as error:
                raise UserError(f"{_where(job)}: {error}") from error
        return self._runs[key]


def plan(grid: Grid, out: Path, resolver: Resolver) -> Plan:
    """Return the plan of a grid whose runs are in ``out``.

    Raises:
        UserError: an arm sets an invalid field, two arms are the same run, or a fork begins after its parent's end.
    """
    return _Planner(grid, out, resolver).plan()


@dataclass
class _Planner:
    """The state of `plan`.

    Attributes:
        planned: the jobs with their configurations.
        owners: the first job of each run id.
        at: the steps whose checkpoints forks need, by run folder.
    """

    grid: Grid
    out: Path
    resolver: Resolver
    tasks: dict[Path, Task] = field(default_factory=dict)
    waiting: dict[Task, Wait] = field(default_factory=dict)
    entries: list[Mapping[str, Any]] = field(default_factory=list)
    choices: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    planned: dict[tuple[str, int | None, str], Planned] = field(default_factory=dict)
    owners: dict[str, Planned] = field(default_factory=dict)
    at: dict[Path, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jobs = {job.key: job for job in self.grid.jobs}
        self.parts = parts_of(self.jobs.values())

    def plan(self) -> Plan:
        for job in self.jobs.values():
            self._find(job)
        for key in self.jobs:
            self._enter(self.planned[key])
        for parent in self.planned.values():
            # A second folder of a parent stays in the plan after its forks have finished.
            if parent.folder in self.at and standing(again := self._again(parent)).finished:
                self._add_again(again)
        choices = tuple(self.choices.values())
        return Plan(tuple(self.tasks.values()), self.waiting, tuple(self.entries), choices)

    # Configurations ---------------------------------------------------------------------------------------

    def _find(self, job: Job) -> Planned:
        """Return the job with its configuration and folder."""
        if job.key not in self.planned:
            fork = job.family.fork
            self.planned[job.key] = self._fork(job, fork.step) if fork and fork.arm else self._own(job)
        return self.planned[job.key]

    def _own(self, job: Job) -> Planned:
        """Return a job that starts at step 0 or from a checkpoint of the user."""
        fork, args, wait = job.family.fork, job.args, None
        if fork:
            args = ("--fork", str(fork.checkpoint), *args)
        elif job.family.lr and job.role == "verdict":
            lr, wait = self._rate(job, job.family.lr)
            args = (*args, f"--{LR}={lr!r}")
        return self._placed(Planned(job, args, self.resolver(args, job), wait=wait))

    def _fork(self, job: Job, step: int) -> Planned:
        """Return a job that starts from another run of the grid."""
        parent = self._find(self.jobs[job.parent, job.seed, "verdict"])
        if step > (last := parent.run.identity["trainer"]["max_steps"]):
            raise UserError(f"{_where(job)}: {job.parent} has {last} steps, so it cannot be forked at step {step}")
        if step <= parent.first:
            raise UserError(
                f"{_where(job)}: {job.parent} is a fork from step {parent.first}, so it cannot be forked at step"
                f" {step}: fork at a later step, or from the parent of {job.parent}"
            )
        run, wait = self.resolver(job.args, job, parent, step), None
        if parent.wait:
            wait = Wait(f"waits for {self._task(parent).name}", parent.wait.on, parent.wait.possible)
        else:
            self.at.setdefault(parent.folder, set()).add(step)
        return self._placed(Planned(job, job.args, run, parent=parent, step=step, wait=wait))

    def _placed(self, planned: Planned) -> Planned:
        """Return the job with its folder; refuse two arms of one grid that are the same run.

        All seeds of an arm share a parent folder: the hash in its name does not include the seed.
        """
        job, run = planned.job, planned.run
        seed = f"seed{run.identity['seed']}"
        if planned.wait:
            return replace(planned, folder=self.out / job.arm / seed)
        if owner := self.owners.get(run.id):
            if owner.job.arm != job.arm and owner.job.family.grid == job.family.grid:
                raise UserError(
                    f"{job.family.path}: arms {owner.job.arm} and {job.arm} are the same run, because their different"
                    " fields have no effect: remove one of them."
                )
            return replace(planned, folder=owner.folder)
        variant = identity_hash({name: value for name, value in run.identity.items() if name != "seed"})
        folder = self.out / f"{job.arm}-{variant}" / seed
        others = [path / seed for path in sorted(self.out.glob(f"*-{variant}"))]  # an arm may have been renamed
        existing = (f for f in (folder, *others) if (read_run(f) or {}).get("id") == run.id)
        self.owners[run.id] = replace(planned, folder=next(existing, folder))
        return self.owners[run.id]

    def _rate(self, job: Job, rule: LrRule) -> tuple[float, Wait | None]:
        """Return the learning rate of a job, or a provisional one and what the job waits for."""
        if job.arm in self.choices:
            return self.choices[job.arm]["lr"], None
        tried: dict[Path, float] = {}
        unfinished = []
        for other in self.jobs.values():
            rest = {name: value for name, value in other.point.items() if name != LR}
            if other.role == "selection" and other.family is job.family and rest == job.point:
                planned = self._find(other)
                tried[planned.folder] = other.point[LR]
                if not standing(self._task(planned)).finished:
                    unfinished.append(planned.folder)
        if unfinished:
            reason = f"waits for {len(unfinished)} of the {len(tried)} runs that select its learning rate"
            return rule.grid[0], Wait(reason, tuple(unfinished))
        folders = tuple(tried)
        if folders not in self.resolver.choices:
            try:
                self.resolver.choices[folders] = selected(job.arm, rule.metric, tried)
            except UserError as error:  # only this arm is affected
                return rule.grid[0], Wait(str(error), possible=False, mistake=True)
        self.choices[job.arm] = self.resolver.choices[folders]
        return self.choices[job.arm]["lr"], None

    # Tasks ------------------------------------------------------------------------------------------------

    def _enter(self, planned: Planned) -> None:
        """Add a job to the tasks or to the runs that wait."""
        task, wait, start = self._task(planned), planned.wait, None
        if planned.parent and not wait and not standing(task).finished:
            found = self._start(planned.parent, planned.step)
            start, wait = (None, found) if isinstance(found, Wait) else (found, None)
        never = {"never": wait.reason} if wait and not wait.possible else {}
        self.entries.append(task.record(self.out) | never)
        if wait:
            self.waiting[task] = wait
        else:
            self.tasks.setdefault(task.folder, replace(task, args=self._args(planned, start)))

    def _start(self, parent: Planned, step: int) -> Path | Wait:
        """Return the checkpoint that a fork starts from, or why there is none."""
        if file := checkpoint_of(parent.folder, step):
            return file
        task = self._task(parent)
        now = standing(task)
        if now.status == "diverged" and now.step < step:
            return Wait(f"{task.name} diverged at step {now.step}, before step {step}", possible=False)
        reason = f"waits for step {step} of {task.name}"
        before = self._start(parent.parent, parent.step) if parent.parent else None
        if not now.finished:
            on, possible = (before.on, before.possible) if isinstance(before, Wait) else ((), True)
            return Wait(reason, (parent.folder, *on), possible, at=(parent.folder, step))
        if isinstance(before, Wait):
            return before
        again = self._again(parent, before)
        self._add_again(again)
        if file := checkpoint_of(again.folder, step):
            return file
        if standing(again).finished:
            reason = f"{again.name} kept no checkpoint of step {step}: remove {again.folder} to train it again"
            return Wait(reason, possible=False, mistake=True)
        return Wait(reason, (again.folder,), at=(again.folder, step))

    def _again(self, parent: Planned, start: Path | None = None) -> Task:
        """Return the task that trains a parent in a second folder, if it is a fork from the checkpoint ``start``."""
        task, args = self._task(parent), self._args(parent, start)
        folder, entry = parent.folder.with_name(f"{parent.folder.name}-again"), {"role": "parent", "fork": None}
        return replace(task, arm=f"{task.arm}-again", folder=folder, args=args, entry={**task.entry, **entry})

    def _add_again(self, task: Task) -> None:
        if task.folder not in self.tasks:
            self.tasks[task.folder] = task
            self.entries.append(task.record(self.out))

    def _task(self, planned: Planned) -> Task:
        """Return the task of a job, without its command line."""
        job, run, parent, fork = planned.job, planned.run, planned.parent, None
        if not planned.wait and parent:
            fork = {"parent": parent.folder.relative_to(self.out).as_posix(), "step": planned.step}
        elif (of := job.family.fork) and of.checkpoint:
            fork = {"parent": str(of.checkpoint), "step": planned.first}
        entry = {"family": job.family.name, "point": dict(job.point), "role": job.role, "fork": fork}
        id, steps = "" if planned.wait else run.id, run.identity["trainer"]["max_steps"]
        part, first = self.parts[job.key], planned.first
        return Task(job.arm, run.identity["seed"], (), planned.folder, id, steps, entry, part, first)

    def _args(self, planned: Planned, start: Path | None) -> tuple[str, ...]:
        """Return the command line of a job, with the checkpoint ``start`` that it is forked from, its CPU threads and
        the checkpoints that forks of it need.

        A resumed run keeps its number of threads, and a fork has that of its parent, because the number of threads
        changes the rounding of sums. Other runs get their share of the cores, unless their configuration sets it.
        """
        args = (*(("--fork", str(start)) if start else ()), *planned.args)
        if not planned.run.threads:
            folders = (planned.folder, *([planned.parent.folder] if planned.parent else []))
            details = ((read_run(folder) or {}).get("details") or {} for folder in folders)
            kept = (int((detail.get("config") or {}).get("threads") or 0) for detail in details)
            args = (*args, f"--threads={next(filter(None, kept), self.resolver.threads)}")
        if planned.folder in self.at:
            configured = planned.run.nested()["checkpoint"].get("at") or []
            at = {*configured, *self.at[planned.folder]} - {planned.step}
            args = (*args, f"--checkpoint.at={sorted(at)}")
        return args


def selected(arm: str, metric: str, tried: Mapping[Path, float]) -> dict[str, Any]:
    """Return the best learning rate (`mmqk.lab.verdicts.measure`), and the mean of the metric over seeds at
    each learning rate tried, null if it is not finite. If every run diverged, the smallest learning rate is best.

    Args:
        tried: the learning rate of each finished run, by run folder.

    Raises:
        UserError: the metric is unknown, or no run has a finite value.
    """
    from mmqk.lab.runs import read_runs
    from mmqk.lab.verdicts.measure import choose

    # The first run is that of the folder itself.
    runs = [replace(read_runs(path)[0], point={LR: lr}) for path, lr in tried.items()]
    best = choose(runs, metric)
    if best is None and not all(run.status.status == "diverged" for run in runs):
        raise UserError(
            f"no selection run of {arm} ended with a finite {metric}: name another lr.metric, such as final_loss, or"
            " lower learning rates"
        )
    means = best.means if best else dict.fromkeys(sorted(tried.values()), math.nan)
    values = {f"{lr:.12g}": mean if math.isfinite(mean) else None for lr, mean in means.items()}
    return {"arm": arm, "lr": best.rate if best else min(means), "metric": metric, "values": values}


def checkpoint_of(folder: Path, step: int) -> Path | None:
    """Return the checkpoint of a step; None if the folder does not have it."""
    return next((file for file in checkpoints_in(folder / "checkpoints") if step_of(file) == step), None)


def _where(job: Job) -> str:
    return f"{job.family.path}, arm {job.arm}"
