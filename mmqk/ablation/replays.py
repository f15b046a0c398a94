"""Runs again from shortly before a divergence, in three numerics: `mmqk.analysis.runs.replays` says what they tell.

First the control, the run again without a change, which has to diverge at the same step and keeps the checkpoints
that the replays begin in. Each replay is a fork of it with weights changed by a millionth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqk.ablation.resolver import (
    BlockedJob,
    ForkPoint,
    Plan,
    ResolvedJob,
    Resolver,
    checkpoint_of,
    checkpoints_of,
    threads_of,
)
from mmqk.ablation.task import Task, standing
from mmqk.grid.arms import Arm, Job, flags
from mmqk.grid.rules import ReplayRule
from mmqk.store import UserError, differing_fields, read_run, read_status

CONTROL = "control"


def replays_of(
    known: ResolvedJob,
    original: Task,
    diverged: int,
    rule: ReplayRule,
    resolver: Resolver,
    out: Path,
    root: Path | None = None,
) -> tuple[list[Task], tuple[Task, str, bool] | None]:
    """The control and the replays of a run, and what is left to say of those that cannot begin.

    Args:
        known: the run, which has diverged.
        original: its task, with the command line that makes it.
        diverged: the step at which it did.
        out: the folder that names of runs are relative to.
        root: where they go, by default beside the run.

    Returns:
        the tasks that can begin (or have ended); then (a stand-in, why, whether they can still begin) for the rest.
    """
    steps = steps_before(diverged, rule, known.first)
    if not steps:
        said = f"diverged at step {diverged}: there is nothing before it to replay from"
        return [], (_task(original, "", (), Path(), "", 0, {}), said, False)
    of = Path(original.record(out)["folder"]).as_posix()
    root = root or known.folder.with_name(f"{known.folder.name}-replays")
    control, start = _control(known, original, steps, resolver, root)
    entry: dict[str, Any] = {"of": of, "depth": None, "step": start, "numerics": CONTROL, "number": 0}
    first = _task(original, CONTROL, control.args, control.folder, control.run.id, control.max_steps, entry)
    ends = {s: min(s + math.ceil(rule.horizon * (diverged - s)), 10**9) for s in steps.values()}
    count = len(steps) * 3 * rule.replays
    rest = _task(
        original, "", (), root / "replays", "", 3 * rule.replays * sum(e - s for s, e in ends.items()), {}
    )
    now = standing(first)
    if not now.finished:
        return [first], (rest, f"{count} replays wait for {first.name}", True)
    if (now.status, now.step) != ("diverged", diverged):
        said = f"its control {now.status} at step {now.step} and not at {diverged}: the run does not repeat itself"
        return [first], (rest, said, False)
    tasks = [first]
    for depth, step in steps.items():
        file = checkpoint_of(control.folder, step)
        if file is None:
            said = f"its control kept no checkpoint of step {step}: remove {control.folder} to make it again"
            return tasks, (rest, said, False)
        for number in range(1, rule.replays + 1):
            for numerics, own in numerics_of(known.run.identity).items():
                fields = {
                    **own,
                    "trainer.max_steps": ends[step],
                    "optim.schedule_steps": _schedule(known.run.identity),
                    "fork_perturb": rule.perturb,
                    "fork_draw": number,
                }
                args = tuple(flags(fields))
                run = resolver(args, f"replays of {original.name}", control, step)
                name = f"d{depth:g}-{numerics}-{number}"
                entry = {"of": of, "depth": depth, "step": step, "numerics": numerics, "number": number}
                args = ("--fork", str(file), *args, *_threads(run, known, resolver))
                folder = root / f"{name}-{run.id}"
                tasks.append(_task(original, name, args, folder, run.id, ends[step], entry))
    return tasks, None


def plan_of_run(folder: Path, out: Path, resolver: Resolver, rule: ReplayRule) -> Plan:
    """The replays of one run that no grid has made.

    Raises:
        UserError: the folder holds no run that diverged, or its configuration gives another run by now.
    """
    record, status = read_run(folder), read_status(folder)
    if record is None or status is None:
        raise UserError(f"{folder} holds no run: give the folder of a run after --replay")
    if status.status != "diverged":
        raise UserError(f"{folder} is {status.status}: only a run that diverged is replayed")
    args = ("--config", str(folder / "config.yaml"))
    run = resolver(args, str(folder))
    if run.id != record.get("id"):
        fields = ", ".join(differing_fields(record["identity"], run.identity)[:5])
        raise UserError(f"{folder} cannot be made again, as its config.yaml gives another {fields} by now")
    name = arm_of(folder)
    said: dict[str, Any] = {"family": name, "point": {}, "role": "verdict", "fork": None, "replay": None}
    known = ResolvedJob(Job(name, None, args, Arm(name, name, "", (), {})), args, run, folder)
    task = Task(name, known.seed, args, folder, run.id, known.max_steps, said)
    tasks, left = replays_of(known, task, status.step, rule, resolver, out, out)
    waiting = () if left is None else (BlockedJob(left[0], left[1], tuple(t.folder for t in tasks), left[2]),)
    entries = tuple(t.record(out) for t in (task, *tasks))
    return Plan(tuple(tasks), waiting, entries)


def arm_of(folder: Path) -> str:
    """A name for the arm of a run: of its folder, or of the one above ``seed<k>``."""
    path = folder.resolve()
    return path.parent.name if path.name.startswith("seed") else path.name


def steps_before(diverged: int, rule: ReplayRule, first: int = 0) -> dict[float, int]:
    """The step after ``first`` at which the replays of each depth begin; depths that come to the same one are one."""
    steps: dict[float, int] = {}
    for depth in rule.depths:
        step = diverged - max(1, round(depth * diverged))
        if step > first and step not in steps.values():
            steps[depth] = step
    return steps


def numerics_of(identity: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields of each numerics: bf16 by the run's own fused backend, or sdpa where it can compute this attention;
    bf16 by the dense one, and fp32, both without compiled blocks."""
    model, backend = identity.get("model", {}), identity.get("backend", "math")
    dense_only = model.get("attn_softcap") is not None or model.get("attention", "softmax") != "softmax"
    fused = None if dense_only else "sdpa"
    if backend != "math":
        fused = backend
    eager = {"compile": False} if identity.get("compile") else {}
    found = {} if fused is None else {"bf16-fused": {"trainer.precision": "bf16-mixed", "backend": fused}}
    return found | {
        "bf16-math": {"trainer.precision": "bf16-mixed", "backend": "math", **eager},
        "fp32": {"trainer.precision": "32-true", "backend": "math", **eager},
    }


def _control(
    known: ResolvedJob, original: Task, steps: Mapping[float, int], resolver: Resolver, root: Path
) -> tuple[ResolvedJob, int]:
    """The run again from its nearest earlier checkpoint, or from its own beginning, and the step it begins at."""
    at = f"--checkpoint.at={sorted(steps.values())}"
    first = known.first
    kept = {s: f for s, f in checkpoints_of(known.folder).items() if first < s < min(steps.values())}
    # One that was begun goes on as it began.
    for folder in sorted(root.glob(f"{CONTROL}-*")):
        record = read_run(folder) or {}
        begun = ((record.get("identity") or {}).get("fork") or {}).get("step", 0)
        if record.get("id") == known.run.id:
            kept = {}
        elif begun in kept:
            kept = {begun: kept[begun]}
    if not kept:
        args = (*(arg for arg in original.args if not arg.startswith("--checkpoint.at=")), at)
        return ResolvedJob(known.job, args, known.run, root / f"{CONTROL}-{known.run.id}", known.start), first
    start, file = list(kept.items())[-1]
    run = resolver((), f"replays of {original.name}", known, start)
    args = ("--fork", str(file), at, *_threads(run, known, resolver))
    return ResolvedJob(known.job, args, run, root / f"{CONTROL}-{run.id}", ForkPoint(known, start)), start


def _schedule(identity: Mapping[str, Any]) -> int:
    """The length on which the learning rate's schedule of the run is laid."""
    return identity.get("optim", {}).get("schedule_steps") or identity["trainer"]["max_steps"]


def _threads(run: Any, of: ResolvedJob, resolver: Resolver) -> tuple[str, ...]:
    """As the run that is replayed had: sums depend on how many there are."""
    return () if run.threads else (f"--threads={threads_of(of.folder) or resolver.threads}",)


def _task(
    original: Task,
    name: str,
    args: tuple[str, ...],
    folder: Path,
    id: str,
    max_steps: int,
    replay: Mapping[str, Any],
) -> Task:
    arm = f"{original.arm}-replay" + (f"-{name}" if name else "")
    entry = {**original.entry, "role": "replay", "replay": dict(replay), "fork": None}
    first = replay.get("step", 0)
    return Task(arm, original.seed, args, folder, id, max_steps, entry, original.part, first)
