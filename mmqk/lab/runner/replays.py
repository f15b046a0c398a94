"""Plan replays of a diverged run in bf16 and fp32; `mmqk.lab.runs.replays` evaluates the replays.

First, the control repeats the diverged run without changes. The control must diverge at the step at which the run
diverged, and it keeps the checkpoints that the replays start from. Each replay is a fork of the control from a step
before the divergence, with slightly perturbed weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmqk.lab.grid.arms import Arm, Job
from mmqk.lab.grid.language import flags
from mmqk.lab.grid.rules import ReplayRule
from mmqk.lab.runner.resolver import (
    BlockedJob,
    ForkPoint,
    Plan,
    ResolvedJob,
    Resolver,
    checkpoint_of,
    checkpoints_of,
)
from mmqk.lab.runner.task import Task, standing
from mmqk.model.backend_check import check_backend
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
) -> tuple[list[Task], list[BlockedJob]]:
    """Return the control and the replays of a run.

    Args:
        resolved: the diverged run.
        original: the task of the diverged run, with its command line.
        diverged: the step of the divergence.
        out: the folder that the run folders in ablation.json are relative to.
        root: the folder of the replays, by default beside the run.

    Returns:
        The tasks that can start or have ended and, if the replays cannot start, one blocked job for all of them.
    """
    steps = steps_before(diverged, rule, resolved.first)
    if not steps:
        reason = f"diverged at step {diverged}: there is no earlier step to replay from"
        return [], [BlockedJob(_task(original), reason, possible=False)]
    of = Path(original.record(out)["folder"]).as_posix()
    root = root or resolved.folder.with_name(f"{resolved.folder.name}-replays")
    control = _control(resolved, original, steps, resolver, root)
    replay: dict[str, Any] = {
        "of": of,
        "depth": None,
        "step": control.first,
        "numerics": CONTROL,
        "number": 0,
    }
    first = _task(original, CONTROL, control.args, control.folder, control.run.id, control.max_steps, replay)
    ends = {s: min(s + math.ceil(rule.horizon * (diverged - s)), 10**9) for s in steps.values()}
    numerics = numerics_of(resolved.run.identity)
    each = len(numerics) * rule.replays
    rest = _task(
        original, folder=root / "replays", max_steps=each * sum(end - step for step, end in ends.items())
    )
    tasks, now = [first], standing(first)

    def blocked(reason: str, possible: bool = False) -> list[BlockedJob]:
        return [BlockedJob(rest, reason, tuple(task.folder for task in tasks), possible)]

    if not now.finished:
        return tasks, blocked(f"{each * len(steps)} replays wait for {first.name}", possible=True)
    if (now.status, now.step) != ("diverged", diverged):
        return tasks, blocked(
            f"the run diverged at step {diverged}, but its control replay {now.status} at step {now.step}: "
            "the run is not reproducible"
        )
    for depth, step in steps.items():
        file = checkpoint_of(control.folder, step)
        if file is None:
            return tasks, blocked(
                f"its control kept no checkpoint of step {step}: remove {control.folder} to train it again"
            )
        for number in range(1, rule.replays + 1):
            for kind, settings in numerics.items():
                fields = {
                    **settings,
                    "trainer.max_steps": ends[step],
                    "optim.schedule_steps": _schedule(resolved.run.identity),
                    "fork_noise": rule.noise,
                    "fork_seed": number,
                }
                args = flags(fields)
                run = resolver(args, f"replays of {original.name}", control, step)
                name = f"d{depth:g}-{kind}-{number}"
                replay = {"of": of, "depth": depth, "step": step, "numerics": kind, "number": number}
                args = ("--fork", str(file), *args, *resolver.threads_flag(run, resolved.folder))
                folder = root / f"{name}-{run.id}"
                tasks.append(_task(original, name, args, folder, run.id, ends[step], replay))
    return tasks, []


def plan_of_run(folder: Path, out: Path, resolver: Resolver, rule: ReplayRule) -> Plan:
    """Return the replays of one run without a grid.

    Raises:
        UserError: the folder has no diverged run, or its config.yaml now resolves to another run.
    """
    record, status = read_run(folder), read_status(folder)
    if record is None or status is None:
        raise UserError(f"{folder} has no run: give the folder of a run after --replay")
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
    tasks, waiting = replays_of(resolved, task, status.step, rule, resolver, out, out)
    return Plan(tuple(tasks), tuple(waiting), tuple(t.record(out) for t in (task, *tasks)))


def arm_of(folder: Path) -> str:
    """Return the name of a run's arm: the name of its folder, or of the folder above ``seed<k>``."""
    path = folder.resolve()
    return path.parent.name if path.name.startswith("seed") else path.name


def steps_before(diverged: int, rule: ReplayRule, first: int = 0) -> dict[float, int]:
    """Return the step at which the replays of each depth start. A depth is left out if its step is not after
    ``first`` or is the step of another depth."""
    steps: dict[float, int] = {}
    for depth in rule.depths:
        step = diverged - max(1, round(depth * diverged))
        if step > first and step not in steps.values():
            steps[depth] = step
    return steps


def numerics_of(identity: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the configuration fields of each kind of replay: bf16-fused, bf16-math and fp32.

    bf16-fused uses the fused backend of the run. If the run uses the dense backend, bf16-fused uses sdpa, or is left
    out if sdpa does not support the attention of the run. bf16-math and fp32 use the dense backend, without compiled
    blocks.
    """
    model, backend = identity.get("model", {}), identity.get("backend", "math")
    fused = "sdpa" if backend == "math" else backend
    softcap, kind = model.get("attn_softcap"), model.get("attention", "softmax")
    try:
        check_backend(fused, softcap, kind, sink=model.get("attn_sink", False))
        numerics = {"bf16-fused": {"trainer.precision": "bf16-mixed", "backend": fused}}
    except ValueError:
        numerics = {}
    eager = {"compile": False} if identity.get("compile") else {}
    return numerics | {
        "bf16-math": {"trainer.precision": "bf16-mixed", "backend": "math", **eager},
        "fp32": {"trainer.precision": "32-true", "backend": "math", **eager},
    }


def _control(
    resolved: ResolvedJob, original: Task, steps: Mapping[float, int], resolver: Resolver, root: Path
) -> ResolvedJob:
    """Return the control: the diverged run again, from its newest checkpoint before the first replay or, without such
    a checkpoint, from the beginning."""
    at = f"--checkpoint.at={sorted(steps.values())}"
    earliest = min(steps.values())
    checkpoints = {s: f for s, f in checkpoints_of(resolved.folder).items() if resolved.first < s < earliest}
    # A control that has already begun keeps the checkpoint that it started from.
    for folder in sorted(root.glob(f"{CONTROL}-*")):
        record = read_run(folder) or {}
        begun = ((record.get("identity") or {}).get("fork") or {}).get("step", 0)
        if record.get("id") == resolved.run.id:
            checkpoints = {}
        elif begun in checkpoints:
            checkpoints = {begun: checkpoints[begun]}
    if not checkpoints:
        args = (*(arg for arg in original.args if not arg.startswith("--checkpoint.at=")), at)
        return replace(resolved, args=args, folder=root / f"{CONTROL}-{resolved.run.id}")
    start, file = list(checkpoints.items())[-1]
    run = resolver((), f"replays of {original.name}", resolved, start)
    args = ("--fork", str(file), at, *resolver.threads_flag(run, resolved.folder))
    return ResolvedJob(resolved.job, args, run, root / f"{CONTROL}-{run.id}", ForkPoint(resolved, start))


def _schedule(identity: Mapping[str, Any]) -> int:
    """Return the length of the learning rate schedule, in steps."""
    return identity.get("optim", {}).get("schedule_steps") or identity["trainer"]["max_steps"]


def _task(
    original: Task,
    name: str = "",
    args: tuple[str, ...] = (),
    folder: Path = Path(),
    id: str = "",
    max_steps: int = 0,
    replay: Mapping[str, Any] | None = None,
) -> Task:
    """Return a replay of a run, or by default a placeholder for replays that are not known yet."""
    arm = f"{original.arm}-replay" + (f"-{name}" if name else "")
    entry = {**original.entry, "role": "replay", "replay": dict(replay or {}), "fork": None}
    first = entry["replay"].get("step", 0)
    return Task(arm, original.seed, args, folder, id, max_steps, entry, original.part, first)
