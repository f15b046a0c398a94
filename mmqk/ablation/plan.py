"""What can be trained now, and what has to wait for what: a function of the grid and of what is on disk.

Called again whenever a run has ended, until nothing is new: the runs that choose a learning rate come before those
that are judged at it, a parent before its forks, a diverged run before its control and that before its replays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmqk.ablation.choose import ChosenRate, choose
from mmqk.ablation.replays import replays_of
from mmqk.ablation.resolver import (
    BlockedJob,
    ForkPoint,
    Plan,
    ResolvedJob,
    Resolver,
    StartCheckpoint,
    by_variant,
    checkpoint_of,
    threads_of,
)
from mmqk.ablation.task import Task, standing
from mmqk.grid.arms import LR, Job, parts_of
from mmqk.grid.grid import Grid
from mmqk.grid.rules import LrRule
from mmqk.store import UserError, identity_hash, read_run

PARENT, SELECTION = "parent", "selection"


def plan(grid: Grid, out: Path, resolver: Resolver) -> Plan:
    """The plan of a grid whose runs are in ``out``.

    Raises:
        UserError: a field that an arm sets is wrong, two arms are the same run, a fork begins after its parent's end.
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
    known: dict[tuple[str, int | None, str], ResolvedJob | BlockedJob] = field(default_factory=dict)
    owners: dict[str, ResolvedJob] = field(default_factory=dict)
    drafts: dict[tuple[str, int | None], ResolvedJob] = field(default_factory=dict)
    at: dict[Path, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jobs = {job.key: job for job in self.grid.jobs}
        self.parts = parts_of(self.jobs.values())
        self.folders = by_variant(self.out)

    def plan(self) -> Plan:
        for job in self.jobs.values():
            self._find(job)
        for job in self.jobs.values():
            self._add(job)
        replayed: set[Path] = set()
        for found in list(self.known.values()):
            if not isinstance(found, ResolvedJob):
                continue
            # Of names that share a run, any may ask for replays.
            if found.job.family.replay and found.folder not in replayed:
                replayed.add(found.folder)
                self._replay(found)
            if found.folder in self.at and standing(again := self._beside(found, None)).finished:
                self._note(again)
        choices = tuple(self.choices.values())
        return Plan(tuple(self.tasks.values()), tuple(self.waiting), tuple(self.entries), choices)

    def _find(self, job: Job) -> ResolvedJob | BlockedJob:
        """The job with its identity, or what that waits for."""
        if job.key not in self.known:
            self.known[job.key] = self._look(job)
        return self.known[job.key]

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
        return self._own(ResolvedJob(job, args, self.resolver(args, _where(job)), self.out))

    def _look_fork(self, job: Job, step: int) -> ResolvedJob | BlockedJob:
        found = self._find(self.jobs[job.parent, job.seed, "verdict"])
        # A parent whose learning rate is open stands in at any: what is wrong with the fork is said at once.
        parent = found if isinstance(found, ResolvedJob) else self.drafts[job.parent, job.seed]
        if step > parent.max_steps:
            raise UserError(
                f"{_where(job)}: {job.parent} has {parent.max_steps} steps, so nothing begins at its step {step}"
            )
        if step <= (begun := parent.first):
            raise UserError(
                f"{_where(job)}: {job.parent} is a fork from step {begun}, so nothing begins at its step {step}: fork"
                f" at a later step, or from what {job.parent} is forked from"
            )
        run = self.resolver(job.args, _where(job), parent, step)
        known = ResolvedJob(job, job.args, run, self.out, ForkPoint(parent, step))
        if isinstance(found, BlockedJob):
            return self._wait(known, f"waits for {found.task.name}", found.on, found.possible)
        self.at.setdefault(parent.folder, set()).add(step)
        return self._own(known)

    def _own(self, known: ResolvedJob) -> ResolvedJob:
        """The run with its folder; two arms of one grid may not be the same run."""
        known = replace(known, folder=self._folder(known.job, known.run))
        owner, job = self.owners.setdefault(known.run.id, known), known.job
        if owner.job.arm != job.arm and owner.job.family.grid == job.family.grid:
            raise UserError(
                f"{job.family.path}: arms {owner.job.arm} and {job.arm} are the same run, as what sets them apart has"
                " no effect there: remove one of them."
            )
        return known

    def _folder(self, job: Job, run: Any) -> Path:
        """Where a run is or goes: seeds of an arm share a folder, so its name leaves the seed out."""
        if run.id in self.owners:
            return self.owners[run.id].folder
        variant = identity_hash({name: value for name, value in run.identity.items() if name != "seed"})
        seed = f"seed{run.identity['seed']}"
        folder = self.out / f"{job.arm}-{variant}" / seed
        others = [path / seed for path in self.folders.get(variant, ())]
        there = (f for f in (folder, *others) if (read_run(f) or {}).get("id") == run.id)
        return next(there, folder)

    def _choice(self, job: Job, rule: LrRule) -> ChosenRate | BlockedJob:
        if job.arm in self.choices:
            return self.choices[job.arm]
        tried: dict[Path, float] = {}
        open_ones = []
        for other in self.jobs.values():
            rest = {name: value for name, value in other.point.items() if name != LR}
            if other.role == SELECTION and other.family is job.family and rest == job.point:
                known = self._find(other)
                assert isinstance(known, ResolvedJob)
                tried[known.folder] = other.point[LR]
                if not standing(known.task()).finished:
                    open_ones.append(known.folder)
        args = (*job.args, f"--{LR}={rule.grid[0]!r}")
        draft = ResolvedJob(job, args, self.resolver(args, _where(job)), self.out)
        if open_ones:
            said = f"waits for {len(open_ones)} of the {len(tried)} runs that choose its learning rate"
            return self._wait(draft, said, tuple(open_ones))
        folders = tuple(tried)
        if folders not in self.resolver.choices:
            try:
                self.resolver.choices[folders] = choose(job.arm, rule.metric, tried)
            except UserError as error:  # of this arm alone: the others go on
                return replace(self._wait(draft, str(error), (), possible=False), mistake=True)
        self.choices[job.arm] = self.resolver.choices[folders]
        return self.choices[job.arm]

    def _wait(self, draft: ResolvedJob, reason: str, on: tuple[Path, ...], possible: bool = True) -> BlockedJob:
        """A run whose identity is open; ``draft`` is what it would be otherwise."""
        job = draft.job
        self.drafts[job.arm, job.seed] = draft
        folder = self.out / job.arm / f"seed{draft.seed}"
        entry, part = _entry(job), self.parts[job.key]
        task = Task(job.arm, draft.seed, (), folder, "", draft.max_steps, entry, part, draft.first)
        return BlockedJob(task, reason, on, possible)

    def _add(self, job: Job) -> None:
        found = self.known[job.key]
        ready = self._ready(found) if isinstance(found, ResolvedJob) else found
        entry = ready.task if isinstance(ready, BlockedJob) else ready
        self.entries.append(entry.record(self.out))
        if isinstance(ready, BlockedJob):
            self.waiting.append(ready)
        else:
            self.tasks.setdefault(ready.folder, ready)

    def _ready(self, known: ResolvedJob) -> Task | BlockedJob:
        task = self._task(known)
        if known.start is None or standing(task).finished:
            return task
        begin = self._beginning(known.start)
        if begin.file is None:
            return BlockedJob(task, begin.reason, begin.on, begin.possible, begin.mistake, begin.at)
        return self._task(known, begin.file)

    def _beginning(self, start: ForkPoint) -> StartCheckpoint:
        """The checkpoint of a run at a step, or what it waits for."""
        parent, step = start.known, start.step
        if file := checkpoint_of(parent.folder, step):
            return StartCheckpoint(file)
        now = standing(parent.task())
        if now.status == "diverged" and now.step < step:
            said = f"{parent.job.arm} seed {parent.seed} diverged at step {now.step}, before step {step}"
            return StartCheckpoint(reason=said, possible=False)
        said = f"waits for step {step} of {parent.job.arm} seed {parent.seed}"
        if not now.finished:
            before = self._beginning(parent.start) if parent.start else StartCheckpoint()
            on = (parent.folder, *before.on)
            return StartCheckpoint(reason=said, on=on, possible=before.possible, at=(parent.folder, step))
        # It finished without this checkpoint: it is made again beside itself.
        before = self._beginning(parent.start) if parent.start else StartCheckpoint()
        if parent.start and before.file is None:
            return before
        again = self._again(parent, before.file)
        file = checkpoint_of(again.folder, step)
        if file is None and standing(again).finished:
            said = f"{again.name} kept no checkpoint of step {step}: remove {again.folder} to make it again"
            return StartCheckpoint(reason=said, possible=False, mistake=True)
        return StartCheckpoint(file, said, (again.folder,), at=(again.folder, step))

    def _again(self, parent: ResolvedJob, file: Path | None) -> Task:
        task = self._beside(parent, file)
        self._note(task)
        return task

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

    def _task(self, known: ResolvedJob, file: Path | None = None) -> Task:
        fork: dict[str, Any] | None = None
        args: tuple[str, ...] = (*known.args, *self._threads(known))
        if known.start:
            parent = known.start.known.folder.relative_to(self.out).as_posix()
            fork = {"parent": parent, "step": known.start.step}
            args = ("--fork", str(file), *args) if file else args
        elif (of := known.job.family.fork) and of.checkpoint:
            fork = {"parent": str(of.checkpoint), "step": known.run.identity["fork"]["step"]}
        if known.folder in self.at:
            args = (*args, self._at(known))
        entry = _entry(known.job, fork)
        part = self.parts[known.job.key]
        task = known.task()
        return replace(task, args=args, entry=entry, part=part, first=known.first)

    def _at(self, known: ResolvedJob) -> str:
        """The checkpoints that its forks begin in, beside those that its configuration names."""
        first = known.start.step if known.start else 0
        own = known.run.nested()["checkpoint"].get("at") or [] if self.at.get(known.folder) else []
        steps = sorted({*own, *self.at.get(known.folder, set())} - {first})
        return f"--checkpoint.at={steps}"

    def _threads(self, known: ResolvedJob) -> tuple[str, ...]:
        """Without a word of the configuration, each run gets its share of the cores.

        One that was begun keeps what it had, and a fork has what its parent had, as sums depend on it.
        """
        if known.run.threads:
            return ()
        had = threads_of(known.folder) or (threads_of(known.start.known.folder) if known.start else 0)
        return (f"--threads={had or self.resolver.threads}",)

    def _replay(self, known: ResolvedJob) -> None:
        rule = known.job.family.replay
        now = standing(known.task())
        if rule is None or known.job.role != "verdict" or now.status != "diverged":
            return
        original = self.tasks.get(known.folder)
        if original is None:
            return
        if known.start:
            begin = self._beginning(known.start)
            if begin.file is None:
                self.waiting.append(BlockedJob(original, f"its replay {begin.reason}", begin.on, begin.possible))
                return
            original = self._task(known, begin.file)
        tasks, left = replays_of(known, original, now.step, rule, self.resolver, self.out)
        for task in tasks:
            self.tasks.setdefault(task.folder, task)
            self.entries.append(task.record(self.out))
        if left is not None:
            task, said, possible = left
            self.waiting.append(BlockedJob(task, said, tuple(t.folder for t in tasks), possible))


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
