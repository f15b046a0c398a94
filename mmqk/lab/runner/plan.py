"""Decide from the grid and the run folders which runs can start now and which must wait.

The plan is made again whenever a run ends, because other runs may wait for this run: the runs at a selected learning
rate wait for the selection runs, and a fork waits for its parent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mmqk.lab.grid.arms import LR, Job, LrRule, parts_of
from mmqk.lab.grid.grid import Grid
from mmqk.lab.runner.state import Task, standing
from mmqk.store import UserError, identity_hash, read_run
from mmqk.store.checkpoints import checkpoints_in, step_of


@dataclass(frozen=True, eq=False)
class ResolvedJob:
    """A job with its identity.

    Attributes:
        args: command line, without the checkpoint that the run is forked from.
        run: the resolved configuration (`mmqk.config.RunConfig`).
        folder: the run folder, which may not exist yet.
        parent: the run that a fork starts from, at ``step``; otherwise None.
    """

    job: Job
    args: tuple[str, ...]
    run: Any
    folder: Path
    parent: ResolvedJob | None = None
    step: int = 0

    @property
    def first(self) -> int:
        """The first step: 0, or for a fork the step of the checkpoint that it starts from."""
        return (self.run.identity.get("fork") or {}).get("step", 0)

    def task(self) -> Task:
        """Return the task without its command line."""
        identity, job = self.run.identity, self.job
        return Task(
            job.arm, identity["seed"], (), self.folder, self.run.id, identity["trainer"]["max_steps"],
            entry=_entry(job), first=self.first,
        )  # fmt: skip


@dataclass(frozen=True)
class BlockedJob:
    """A run that cannot start yet.

    Attributes:
        task: a provisional task whose folder does not exist.
        reason: what the run waits for, or why it can never start.
        on: folders of the runs that this run waits for.
        possible: whether the run can still start.
        mistake: whether a user error keeps the run from starting.
        at: run folder and step of the checkpoint that the run waits for; None if it does not wait for a checkpoint.
    """

    task: Task
    reason: str
    on: tuple[Path, ...] = ()
    possible: bool = True
    mistake: bool = False
    at: tuple[Path, int] | None = None


@dataclass(frozen=True)
class ChosenRate:
    """A selected learning rate, and the mean of the metric over seeds at each learning rate tried."""

    arm: str
    lr: float
    metric: str
    values: Mapping[float, float]

    @property
    def edge(self) -> str:
        """A warning if the best learning rate is the smallest or largest one tried, otherwise empty."""
        ends = {min(self.values): "smallest", max(self.values): "largest"}
        if len(self.values) < 2 or self.lr not in ends:
            return ""
        return f"{self.arm}: its best learning rate, {self.lr:g}, is the {ends[self.lr]} of the grid: widen lr.grid"

    def record(self) -> dict[str, Any]:
        """Return the entry in ablation.json; a value that is not finite is null."""
        values = {f"{lr:.12g}": v if math.isfinite(v) else None for lr, v in self.values.items()}
        return {**asdict(self), "values": values}


@dataclass(frozen=True)
class Plan:
    """All runs that are known so far.

    Attributes:
        tasks: runs that are finished, running or ready to start, one per folder.
        waiting: runs that cannot start yet.
        entries: the entries of ablation.json, one per run name; two names may share a folder.
        choices: selected learning rates.
    """

    tasks: tuple[Task, ...] = ()
    waiting: tuple[BlockedJob, ...] = ()
    entries: tuple[Mapping[str, Any], ...] = ()
    choices: tuple[ChosenRate, ...] = ()


class Resolver:
    """`mmqk.config.resolve` with a cache.

    Args:
        threads: CPU threads of a run whose configuration does not set them.
    """

    def __init__(self, threads: int = 1):
        self.threads = threads
        self.choices: dict[tuple[Path, ...], ChosenRate] = {}
        self._runs: dict[tuple[Any, ...], Any] = {}

    def __call__(self, args: Sequence[str], job: Job, parent: ResolvedJob | None = None, step: int = 0) -> Any:
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

    def threads_flag(self, run: Any, *folders: Path) -> tuple[str, ...]:
        """Return the flag for CPU threads, unless the configuration of the run sets them: the threads of the first of
        the folders that has a run, otherwise the run's share of the cores. The number of threads changes the rounding
        of sums."""
        if run.threads:
            return ()
        details = ((read_run(folder) or {}).get("details") or {} for folder in folders)
        kept = (int((detail.get("config") or {}).get("threads") or 0) for detail in details)
        return (f"--threads={next(filter(None, kept), self.threads)}",)


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
        resolved: each job with its identity, or blocked if the identity is not known yet.
        drafts: blocked jobs with a provisional learning rate, by arm and seed, to find errors early.
        owners: the first job of each run id.
        at: the steps whose checkpoints forks need, by run folder.
    """

    grid: Grid
    out: Path
    resolver: Resolver
    tasks: dict[Path, Task] = field(default_factory=dict)
    waiting: list[BlockedJob] = field(default_factory=list)
    entries: list[Mapping[str, Any]] = field(default_factory=list)
    choices: dict[str, ChosenRate] = field(default_factory=dict)
    resolved: dict[tuple[str, int | None, str], ResolvedJob | BlockedJob] = field(default_factory=dict)
    owners: dict[str, ResolvedJob] = field(default_factory=dict)
    drafts: dict[tuple[str, int | None], ResolvedJob] = field(default_factory=dict)
    at: dict[Path, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jobs = {job.key: job for job in self.grid.jobs}
        self.parts = parts_of(self.jobs.values())

    def plan(self) -> Plan:
        for job in self.jobs.values():
            self._find(job)
        for job in self.jobs.values():
            state = self.resolved[job.key]
            ready = self._ready(state) if isinstance(state, ResolvedJob) else state
            if isinstance(ready, BlockedJob):
                never = {} if ready.possible else {"never": ready.reason}
                self.entries.append(ready.task.record(self.out) | never)
                self.waiting.append(ready)
            else:
                self.entries.append(ready.record(self.out))
                self.tasks.setdefault(ready.folder, ready)
        for parent in self.resolved.values():
            if isinstance(parent, ResolvedJob) and parent.folder in self.at:
                again = self._beside(parent, None)
                if standing(again).finished:
                    self._note(again)
        choices = tuple(self.choices.values())
        return Plan(tuple(self.tasks.values()), tuple(self.waiting), tuple(self.entries), choices)

    # Identities -------------------------------------------------------------------------------------------

    def _find(self, job: Job) -> ResolvedJob | BlockedJob:
        """Return the job with its identity, or a blocked job with the reason why the identity is not known yet."""
        if job.key not in self.resolved:
            self.resolved[job.key] = self._look(job)
        return self.resolved[job.key]

    def _look(self, job: Job) -> ResolvedJob | BlockedJob:
        fork, args = job.family.fork, job.args
        if fork and fork.checkpoint:
            args = ("--fork", str(fork.checkpoint), *args)
        elif fork:
            return self._look_fork(job, fork.step)
        elif job.family.lr and job.role == "verdict":
            choice = self._choice(job, job.family.lr)
            if isinstance(choice, BlockedJob):
                return choice
            args = (*args, f"--{LR}={choice.lr!r}")
        return self._with_folder(ResolvedJob(job, args, self.resolver(args, job), self.out))

    def _look_fork(self, job: Job, step: int) -> ResolvedJob | BlockedJob:
        origin = self._find(self.jobs[job.parent, job.seed, "verdict"])
        parent = origin if isinstance(origin, ResolvedJob) else self.drafts[job.parent, job.seed]
        if step > (last := parent.task().max_steps):
            raise UserError(f"{_where(job)}: {job.parent} has {last} steps, so it cannot be forked at step {step}")
        if step <= parent.first:
            raise UserError(
                f"{_where(job)}: {job.parent} is a fork from step {parent.first}, so it cannot be forked at step"
                f" {step}: fork at a later step, or from the parent of {job.parent}"
            )
        run = self.resolver(job.args, job, parent, step)
        resolved = ResolvedJob(job, job.args, run, self.out, parent, step)
        if isinstance(origin, BlockedJob):
            return self._wait(resolved, f"waits for {origin.task.name}", origin.on, origin.possible)
        self.at.setdefault(parent.folder, set()).add(step)
        return self._with_folder(resolved)

    def _with_folder(self, resolved: ResolvedJob) -> ResolvedJob:
        """Return the job with its folder; refuse two arms of one grid that are the same run.

        All seeds of an arm share a parent folder: the hash in its name does not include the seed.
        """
        job, run = resolved.job, resolved.run
        if owner := self.owners.get(run.id):
            if owner.job.arm != job.arm and owner.job.family.grid == job.family.grid:
                raise UserError(
                    f"{job.family.path}: arms {owner.job.arm} and {job.arm} are the same run, because their different"
                    " fields have no effect: remove one of them."
                )
            return replace(resolved, folder=owner.folder)
        variant = identity_hash({name: value for name, value in run.identity.items() if name != "seed"})
        seed = f"seed{run.identity['seed']}"
        folder = self.out / f"{job.arm}-{variant}" / seed
        others = [path / seed for path in sorted(self.out.glob(f"*-{variant}"))]  # an arm may have been renamed
        existing = (f for f in (folder, *others) if (read_run(f) or {}).get("id") == run.id)
        self.owners[run.id] = replace(resolved, folder=next(existing, folder))
        return self.owners[run.id]

    def _choice(self, job: Job, rule: LrRule) -> ChosenRate | BlockedJob:
        if job.arm in self.choices:
            return self.choices[job.arm]
        tried: dict[Path, float] = {}
        open_ones = []
        for other in self.jobs.values():
            rest = {name: value for name, value in other.point.items() if name != LR}
            if other.role == "selection" and other.family is job.family and rest == job.point:
                resolved = self._find(other)
                assert isinstance(resolved, ResolvedJob)
                tried[resolved.folder] = other.point[LR]
                if not standing(resolved.task()).finished:
                    open_ones.append(resolved.folder)
        args = (*job.args, f"--{LR}={rule.grid[0]!r}")
        draft = ResolvedJob(job, args, self.resolver(args, job), self.out)
        if open_ones:
            reason = f"waits for {len(open_ones)} of the {len(tried)} runs that select its learning rate"
            return self._wait(draft, reason, tuple(open_ones))
        folders = tuple(tried)
        if folders not in self.resolver.choices:
            try:
                self.resolver.choices[folders] = choose(job.arm, rule.metric, tried)
            except UserError as error:  # only this arm is affected
                return replace(self._wait(draft, str(error), (), possible=False), mistake=True)
        self.choices[job.arm] = self.resolver.choices[folders]
        return self.choices[job.arm]

    def _wait(self, draft: ResolvedJob, reason: str, on: tuple[Path, ...], possible: bool = True) -> BlockedJob:
        """Return the blocked job of a run whose identity is not known yet; ``draft`` is the run with a provisional
        configuration."""
        job, task = draft.job, draft.task()
        self.drafts[job.arm, job.seed] = draft
        folder = self.out / job.arm / f"seed{task.seed}"
        return BlockedJob(replace(task, folder=folder, id="", part=self.parts[job.key]), reason, on, possible)

    # Tasks ------------------------------------------------------------------------------------------------

    def _ready(self, resolved: ResolvedJob) -> Task | BlockedJob:
        task = self._task(resolved)
        if resolved.parent is None or standing(task).finished:
            return task
        start = self._start_of(task, resolved.parent, resolved.step)
        return start if isinstance(start, BlockedJob) else self._task(resolved, start)

    def _start_of(self, task: Task, parent: ResolvedJob, step: int) -> Path | BlockedJob:
        """Return the checkpoint that a task starts from, or a blocked job with the reason why there is none."""
        if file := checkpoint_of(parent.folder, step):
            return file
        of = parent.task()
        now = standing(of)
        if now.status == "diverged" and now.step < step:
            return BlockedJob(task, f"{of.name} diverged at step {now.step}, before step {step}", possible=False)
        reason = f"waits for step {step} of {of.name}"
        before = self._start_of(task, parent.parent, parent.step) if parent.parent else None
        if not now.finished:
            on, possible = (before.on, before.possible) if isinstance(before, BlockedJob) else ((), True)
            return BlockedJob(task, reason, (parent.folder, *on), possible, at=(parent.folder, step))
        # The parent finished without this checkpoint: train the parent again in a second folder.
        if isinstance(before, BlockedJob):
            return before
        again = self._beside(parent, before)
        self._note(again)
        if file := checkpoint_of(again.folder, step):
            return file
        if standing(again).finished:
            reason = f"{again.name} kept no checkpoint of step {step}: remove {again.folder} to train it again"
            return BlockedJob(task, reason, possible=False, mistake=True)
        return BlockedJob(task, reason, (again.folder,), at=(again.folder, step))

    def _note(self, task: Task) -> None:
        if task.folder not in self.tasks:
            self.tasks[task.folder] = task
            self.entries.append(task.record(self.out))

    def _beside(self, parent: ResolvedJob, file: Path | None) -> Task:
        return replace(
            self._task(parent, file),
            arm=f"{parent.job.arm}-again",
            folder=parent.folder.with_name(f"{parent.folder.name}-again"),
            entry={**_entry(parent.job), "role": "parent"},
        )

    def _task(self, resolved: ResolvedJob, file: Path | None = None) -> Task:
        job, parent, fork = resolved.job, resolved.parent, None
        # A resumed run keeps its number of threads, and a fork has that of its parent.
        folders = [resolved.folder, *([parent.folder] if parent else [])]
        args = (*resolved.args, *self.resolver.threads_flag(resolved.run, *folders))
        if parent:
            fork = {"parent": parent.folder.relative_to(self.out).as_posix(), "step": resolved.step}
            args = ("--fork", str(file), *args) if file else args
        elif (of := job.family.fork) and of.checkpoint:
            fork = {"parent": str(of.checkpoint), "step": resolved.first}
        if resolved.folder in self.at:  # keep the checkpoints that forks start from, and those of the configuration
            configured = resolved.run.nested()["checkpoint"].get("at") or []
            at = {*configured, *self.at[resolved.folder]} - {resolved.step}
            args = (*args, f"--checkpoint.at={sorted(at)}")
        return replace(resolved.task(), args=args, entry=_entry(job, fork), part=self.parts[job.key])


def choose(arm: str, metric: str, tried: Mapping[Path, float]) -> ChosenRate:
    """Return the best learning rate by the rule of `mmqk.lab.verdicts.ranking`. If every run diverged,
    return the smallest learning rate.

    Args:
        tried: the learning rate of each finished run, by run folder.

    Raises:
        UserError: the metric is unknown, or no run has a finite value.
    """
    from mmqk.lab.runs import read_runs
    from mmqk.lab.verdicts.ranking import choose as best_of

    runs = [
        replace(run, point={LR: lr})
        for path, lr in tried.items()
        for run in read_runs(path)
        if run.path.resolve() == path.resolve()
    ]
    best = best_of(runs, metric)
    if best is None and all(run.status.status == "diverged" for run in runs):
        return ChosenRate(arm, min(tried.values()), metric, dict.fromkeys(sorted(tried.values()), math.nan))
    if best is None:
        raise UserError(
            f"no selection run of {arm} ended with a finite {metric}: name another lr.metric, such as final_loss, or"
            " lower learning rates"
        )
    return ChosenRate(arm, best.rate, metric, best.means)


def checkpoint_of(folder: Path, step: int) -> Path | None:
    """Return the checkpoint of a step; None if the folder does not have it."""
    return next((file for file in checkpoints_in(folder / "checkpoints") if step_of(file) == step), None)


def _where(job: Job) -> str:
    return f"{job.family.path}, arm {job.arm}"


def _entry(job: Job, fork: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"family": job.family.name, "point": dict(job.point), "role": job.role, "fork": fork}
