"""Decide from the grid and the run folders which runs can start now and which must wait.

The plan is made again whenever a run ends, because other runs may wait for this run: the runs at a selected learning
rate wait for the selection runs, a fork waits for its parent, and replays wait for their control.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmqk.lab.grid.arms import LR, Job, parts_of
from mmqk.lab.grid.grid import Grid
from mmqk.lab.grid.rules import LrRule
from mmqk.lab.runner.choose import ChosenRate, choose
from mmqk.lab.runner.replays import replays_of
from mmqk.lab.runner.resolver import (
    BlockedJob,
    ForkPoint,
    Plan,
    ResolvedJob,
    Resolver,
    checkpoint_of,
)
from mmqk.lab.runner.task import Task, standing
from mmqk.store import UserError, identity_hash, read_run

PARENT, SELECTION = "parent", "selection"


def plan(grid: Grid, out: Path, resolver: Resolver) -> Plan:
    """Return the plan of a grid whose runs are in ``out``.

    Raises:
        UserError: an arm sets an invalid field, two arms are the same run, or a fork begins after its parent's end.
    """
    return _Planner(grid, out, resolver).plan()


@dataclass
class _Planner:
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
            self._add(job)
        replayed: set[Path] = set()
        for resolved in list(self.resolved.values()):
            if not isinstance(resolved, ResolvedJob):
                continue
            # A run that several arms share is replayed if one of them has a replay rule.
            if resolved.job.family.replay and resolved.folder not in replayed:
                replayed.add(resolved.folder)
                self._replay(resolved)
            if resolved.folder in self.at and standing(again := self._beside(resolved, None)).finished:
                self._note(again)
        choices = tuple(self.choices.values())
        return Plan(tuple(self.tasks.values()), tuple(self.waiting), tuple(self.entries), choices)

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
        elif job.family.lr and job.chosen:
            choice = self._choice(job, job.family.lr)
            if isinstance(choice, BlockedJob):
                return choice
            args = (*args, f"--{LR}={choice.lr!r}")
        return self._with_folder(ResolvedJob(job, args, self.resolver(args, _where(job)), self.out))

    def _look_fork(self, job: Job, step: int) -> ResolvedJob | BlockedJob:
        origin = self._find(self.jobs[job.parent, job.seed, "verdict"])
        # Until the parent's learning rate is selected, use a draft of the parent with a provisional learning rate, to
        # find errors early.
        parent = origin if isinstance(origin, ResolvedJob) else self.drafts[job.parent, job.seed]
        if step > parent.max_steps:
            raise UserError(
                f"{_where(job)}: {job.parent} has {parent.max_steps} steps, so it cannot be forked at step"
                f" {step}"
            )
        if step <= (begun := parent.first):
            raise UserError(
                f"{_where(job)}: {job.parent} is a fork from step {begun}, so it cannot be forked at step {step}:"
                f" fork at a later step, or from the parent of {job.parent}"
            )
        run = self.resolver(job.args, _where(job), parent, step)
        resolved = ResolvedJob(job, job.args, run, self.out, ForkPoint(parent, step))
        if isinstance(origin, BlockedJob):
            return self._wait(resolved, f"waits for {origin.task.name}", origin.on, origin.possible)
        self.at.setdefault(parent.folder, set()).add(step)
        return self._with_folder(resolved)

    def _with_folder(self, resolved: ResolvedJob) -> ResolvedJob:
        """Return the job with its folder; refuse two arms of one grid that are the same run."""
        resolved = replace(resolved, folder=self._folder(resolved.job, resolved.run))
        owner, job = self.owners.setdefault(resolved.run.id, resolved), resolved.job
        if owner.job.arm != job.arm and owner.job.family.grid == job.family.grid:
            raise UserError(
                f"{job.family.path}: arms {owner.job.arm} and {job.arm} are the same run, because their different"
                " fields have no effect: remove one of them."
            )
        return resolved

    def _folder(self, job: Job, run: Any) -> Path:
        """Return the folder of a run. All seeds of an arm share a parent folder: the hash in its name does not
        include the seed."""
        if run.id in self.owners:
            return self.owners[run.id].folder
        variant = identity_hash({name: value for name, value in run.identity.items() if name != "seed"})
        seed = f"seed{run.identity['seed']}"
        folder = self.out / f"{job.arm}-{variant}" / seed
        others = [path / seed for path in sorted(self.out.glob(f"*-{variant}"))]
        existing = (f for f in (folder, *others) if (read_run(f) or {}).get("id") == run.id)
        return next(existing, folder)

    def _choice(self, job: Job, rule: LrRule) -> ChosenRate | BlockedJob:
        if job.arm in self.choices:
            return self.choices[job.arm]
        tried: dict[Path, float] = {}
        open_ones = []
        for other in self.jobs.values():
            rest = {name: value for name, value in other.point.items() if name != LR}
            if other.role == SELECTION and other.family is job.family and rest == job.point:
                resolved = self._find(other)
                assert isinstance(resolved, ResolvedJob)
                tried[resolved.folder] = other.point[LR]
                if not standing(resolved.task()).finished:
                    open_ones.append(resolved.folder)
        args = (*job.args, f"--{LR}={rule.grid[0]!r}")
        draft = ResolvedJob(job, args, self.resolver(args, _where(job)), self.out)
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

    def _wait(
        self, draft: ResolvedJob, reason: str, on: tuple[Path, ...], possible: bool = True
    ) -> BlockedJob:
        """Return the blocked job of a run whose identity is not known yet; ``draft`` is the run with a provisional
        configuration."""
        job = draft.job
        self.drafts[job.arm, job.seed] = draft
        folder = self.out / job.arm / f"seed{draft.seed}"
        entry, part = _entry(job), self.parts[job.key]
        task = Task(job.arm, draft.seed, (), folder, "", draft.max_steps, entry, part, draft.first)
        return BlockedJob(task, reason, on, possible)

    def _add(self, job: Job) -> None:
        state = self.resolved[job.key]
        ready = self._ready(state) if isinstance(state, ResolvedJob) else state
        entry = ready.task if isinstance(ready, BlockedJob) else ready
        never = {"never": ready.reason} if isinstance(ready, BlockedJob) and not ready.possible else {}
        self.entries.append(entry.record(self.out) | never)
        if isinstance(ready, BlockedJob):
            self.waiting.append(ready)
        else:
            self.tasks.setdefault(ready.folder, ready)

    def _ready(self, resolved: ResolvedJob) -> Task | BlockedJob:
        task = self._task(resolved)
        if resolved.start is None or standing(task).finished:
            return task
        start = self._start_of(task, resolved.start)
        return start if isinstance(start, BlockedJob) else self._task(resolved, start)

    def _start_of(self, task: Task, start: ForkPoint) -> Path | BlockedJob:
        """Return the checkpoint that a task starts from, or a blocked job with the reason why there is none."""
        parent, step = start.parent, start.step
        if file := checkpoint_of(parent.folder, step):
            return file
        now = standing(parent.task())
        if now.status == "diverged" and now.step < step:
            reason = f"{parent.job.arm} seed {parent.seed} diverged at step {now.step}, before step {step}"
            return BlockedJob(task, reason, possible=False)
        reason = f"waits for step {step} of {parent.job.arm} seed {parent.seed}"
        before = self._start_of(task, parent.start) if parent.start else None
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
            reason = (
                f"{again.name} kept no checkpoint of step {step}: remove {again.folder} to train it again"
            )
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
            entry={**_entry(parent.job), "role": PARENT},
        )

    def _task(self, resolved: ResolvedJob, file: Path | None = None) -> Task:
        fork: dict[str, Any] | None = None
        # A resumed run keeps its number of threads, and a fork has that of its parent.
        folders = [resolved.folder, *([resolved.start.parent.folder] if resolved.start else [])]
        args: tuple[str, ...] = (*resolved.args, *self.resolver.threads_flag(resolved.run, *folders))
        if resolved.start:
            parent = resolved.start.parent.folder.relative_to(self.out).as_posix()
            fork = {"parent": parent, "step": resolved.start.step}
            args = ("--fork", str(file), *args) if file else args
        elif (of := resolved.job.family.fork) and of.checkpoint:
            fork = {"parent": str(of.checkpoint), "step": resolved.run.identity["fork"]["step"]}
        if resolved.folder in self.at:
            args = (*args, self._at(resolved))
        entry = _entry(resolved.job, fork)
        part = self.parts[resolved.job.key]
        task = resolved.task()
        return replace(task, args=args, entry=entry, part=part, first=resolved.first)

    def _at(self, resolved: ResolvedJob) -> str:
        """Return the flag that lists the steps whose checkpoints are kept: the steps at which forks start, and the
        steps in the configuration."""
        configured = resolved.run.nested()["checkpoint"].get("at") or []
        first = resolved.start.step if resolved.start else 0
        return f"--checkpoint.at={sorted({*configured, *self.at[resolved.folder]} - {first})}"

    def _replay(self, resolved: ResolvedJob) -> None:
        rule = resolved.job.family.replay
        now = standing(resolved.task())
        if rule is None or resolved.job.role != "verdict" or now.status != "diverged":
            return
        original = self.tasks.get(resolved.folder)
        if original is None:
            return
        if resolved.start:
            start = self._start_of(original, resolved.start)
            if isinstance(start, BlockedJob):
                reason = f"its replay {start.reason}"
                self.waiting.append(BlockedJob(original, reason, start.on, start.possible))
                return
            original = self._task(resolved, start)
        tasks, waiting = replays_of(resolved, original, now.step, rule, self.resolver, self.out)
        for task in tasks:
            self.tasks.setdefault(task.folder, task)
            self.entries.append(task.record(self.out))
        self.waiting += waiting


def _where(job: Job) -> str:
    return f"{job.family.path}, arm {job.arm}"


def _entry(job: Job, fork: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "family": job.family.name,
        "point": dict(job.point),
        "role": job.role,
        "fork": fork,
        "replay": None,
    }
