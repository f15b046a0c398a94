"""Plan replays from shortly before a divergence, in three numerics; `mmqk.analysis.runs.replays` evaluates them.

The control comes first: the same run without a change, which must diverge at the same step and keeps the checkpoints
for the replays. Each replay is a fork of the control with weights changed by a millionth.
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
    resolved: ResolvedJob,
    original: Task,
    diverged: int,
    rule: ReplayRule,
    resolver: Resolver,
    out: Path,
    root: Path | None = None,
) -> tuple[list[Task], tuple[Task, str, bool] | None]:
    """The control and the replays of a run.

    Args:
        resolved: the diverged run.
        original: its task, with its command line.
        diverged: the step of the divergence.
        out: the folder that the names of runs are relative to.
        root: the folder of the replays, by default beside the run.

    Returns:
        The tasks that can start or have ended; for the other replays (placeholder task, reason, whether they can
        still start), or None.
    """
    steps = steps_before(diverged, rule, resolved.first)
    if not steps:
        reason = f"diverged at step {diverged}: there is no earlier step to replay from"
        return [], (_task(original, "", (), Path(), "", 0, {}), reason, False)
    of = Path(original.record(out)["folder"]).as_posix()
    root = root or resolved.folder.with_name(f"{resolved.folder.name}-replays")
    control, start = _control(resolved, original, steps, resolver, root)
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
        reason = (
            f"its control {now.status} at step {now.step} and not at {diverged}: the run is not reproducible"
        )
        return [first], (rest, reason, False)
    tasks = [first]
    for depth, step in steps.items():
        file = checkpoint_of(control.folder, step)
        if file is None:
            reason = (
                f"its control kept no checkpoint of step {step}: remove {control.folder} to train it again"
            )
            return tasks, (rest, reason, False)
        for number in range(1, rule.replays + 1):
            for numerics, settings in numerics_of(resolved.run.identity).items():
                fields = {
                    **settings,
                    "trainer.max_steps": ends[step],
                    "optim.schedule_steps": _schedule(resolved.run.identity),
                    "fork_noise": rule.noise,
                    "fork_seed": number,
                }
                args = tuple(flags(fields))
                run = resolver(args, f"replays of {original.name}", control, step)
                name = f"d{depth:g}-{numerics}-{number}"
                entry = {"of": of, "depth": depth, "step": step, "numerics": numerics, "number": number}
                args = ("--fork", str(file), *args, *_threads(run, resolved, resolver))
                folder = root / f"{name}-{run.id}"
                tasks.append(_task(original, name, args, folder, run.id, ends[step], entry))
    return tasks, None


def plan_of_run(folder: Path, out: Path, resolver: Resolver, rule: ReplayRule) -> Plan:
    """The replays of one run without a grid.

    Raises:
        UserError: the folder has no diverged run, or its config.yaml now gives another run.
    """
    record, status = read_run(folder), read_status(folder)
    if record is None or status is None:
        raise UserError(f"{folder} holds no run: give the folder of a run after --replay")
    if status.status != "diverged":
        raise UserError(f"{folder} is {status.status}: give a run that diverged")
    args = ("--config", str(folder / "config.yaml"))
    run = resolver(args, str(folder))
    if run.id != record.get("id"):
        fields = ", ".join(differing_fields(record["identity"], run.identity)[:5])
        raise UserError(f"{folder} cannot be replayed, because its config.yaml now gives another {fields}")
    name = arm_of(folder)
    entry: dict[str, Any] = {"family": name, "point": {}, "role": "verdict", "fork": None, "replay": None}
    resolved = ResolvedJob(Job(name, None, args, Arm(name, name, "", (), {})), args, run, folder)
    task = Task(name, resolved.seed, args, folder, run.id, resolved.max_steps, entry)
    tasks, left = replays_of(resolved, task, status.step, rule, resolver, out, out)
    waiting = () if left is None else (BlockedJob(left[0], left[1], tuple(t.folder for t in tasks), left[2]),)
    entries = tuple(t.record(out) for t in (task, *tasks))
    return Plan(tuple(tasks), waiting, entries)


def arm_of(folder: Path) -> str:
    """The name of a run's arm: the name of its folder, or of the folder above ``seed<k>``."""
    path = folder.resolve()
    return path.parent.name if path.name.startswith("seed") else path.name


def steps_before(diverged: int, rule: ReplayRule, first: int = 0) -> dict[float, int]:
    """The start step of the replays by depth, all after ``first``; depths with the same step are merged."""
    steps: dict[float, int] = {}
    for depth in rule.depths:
        step = diverged - max(1, round(depth * diverged))
        if step > first and step not in steps.values():
            steps[depth] = step
    return steps


def numerics_of(identity: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields of each numerics.

    bf16-fused has the fused backend of the run, or sdpa if that supports this attention. bf16-math and fp32 have the
    dense backend, without compiled blocks.
    """
    model, backend = identity.get("model", {}), identity.get("backend", "math")
    dense_only = model.get("attn_softcap") is not None or model.get("attention", "softmax") != "softmax"
    fused = None if dense_only else "sdpa"
    if backend != "math":
        fused = backend
    eager = {"compile": False} if identity.get("compile") else {}
    numerics = {} if fused is None else {"bf16-fused": {"trainer.precision": "bf16-mixed", "backend": fused}}
    return numerics | {
        "bf16-math": {"trainer.precision": "bf16-mixed", "backend": "math", **eager},
        "fp32": {"trainer.precision": "32-true", "backend": "math", **eager},
    }


def _control(
    resolved: ResolvedJob, original: Task, steps: Mapping[float, int], resolver: Resolver, root: Path
) -> tuple[ResolvedJob, int]:
    """The same run from its nearest earlier checkpoint, or from its start; and the step at which it starts."""
    at = f"--checkpoint.at={sorted(steps.values())}"
    first = resolved.first
    kept = {s: f for s, f in checkpoints_of(resolved.folder).items() if first < s < min(steps.values())}
    # A control that has begun keeps its start.
    for folder in sorted(root.glob(f"{CONTROL}-*")):
        record = read_run(folder) or {}
        begun = ((record.get("identity") or {}).get("fork") or {}).get("step", 0)
        if record.get("id") == resolved.run.id:
            kept = {}
        elif begun in kept:
            kept = {begun: kept[begun]}
    if not kept:
        args = (*(arg for arg in original.args if not arg.startswith("--checkpoint.at=")), at)
        return ResolvedJob(
            resolved.job, args, resolved.run, root / f"{CONTROL}-{resolved.run.id}", resolved.start
        ), first
    start, file = list(kept.items())[-1]
    run = resolver((), f"replays of {original.name}", resolved, start)
    args = ("--fork", str(file), at, *_threads(run, resolved, resolver))
    return ResolvedJob(
        resolved.job, args, run, root / f"{CONTROL}-{run.id}", ForkPoint(resolved, start)
    ), start


def _schedule(identity: Mapping[str, Any]) -> int:
    """The length of the learning rate schedule, in steps."""
    return identity.get("optim", {}).get("schedule_steps") or identity["trainer"]["max_steps"]


def _threads(run: Any, of: ResolvedJob, resolver: Resolver) -> tuple[str, ...]:
    """The flag for the number of threads of the replayed run: sums depend on it."""
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
