"""Arms of a grid: their fields, forks and runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmqk.lab.grid import language as read
from mmqk.lab.grid.axes import Axis, read_axes
from mmqk.lab.grid.rules import LrRule, ReplayRule
from mmqk.ranges import MOST_SEED, MOST_STEPS, check_fields, number, ranged
from mmqk.store import UserError

ARM_KEYS = ("label", "block", "seeds", "set", "axes", "fork")
LR = "optim.lr"
# Fields that an arm cannot set, because the grid sets them.
_NOT_SET = ("seed", "out", "config", "fork", "print_config")
_OF_A_FORK = ("fork_skip_batches", "fork_noise", "fork_seed", "fork_new_moments")


@dataclass(frozen=True)
class ArmFork:
    """Where the runs of an arm start: at a step of the runs of another arm, or from a checkpoint.

    Attributes:
        arm: name of the other arm, with or without the values of its axes.
    """

    arm: str = ""
    step: int = number(1, 1, MOST_STEPS)
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self, "")


@dataclass(frozen=True)
class Arm:
    """An arm: its name and label, its seeds, the fields that it sets in the base configuration, and its axes.

    Attributes:
        seeds: empty if the arm is a fork of a checkpoint and sets no seeds; its run then has the seed of the
            checkpoint.
        grid: name of the grid.
        path: file of the grid, for messages.
        base: base configuration files; empty for a fork, which has the configuration of its parent.
    """

    name: str
    label: str
    block: str
    seeds: tuple[int, ...] = field(metadata=ranged(0, MOST_SEED))
    fields: Mapping[str, Any]
    axes: tuple[Axis, ...] = ()
    fork: ArmFork | None = None
    base: tuple[Path, ...] = ()
    lr: LrRule | None = None
    replay: ReplayRule | None = None
    grid: str = ""
    path: Path = Path()

    def __post_init__(self) -> None:
        check_fields(self, "")

    @property
    def points(self) -> dict[str, dict[str, Any]]:
        """The field values of each combination of axis values. The keys are arm names with the values of the axes."""
        points: dict[str, dict[str, Any]] = {self.name: {}}
        for axis in self.axes:
            points = {
                f"{name}-{suffix}": {**point, **fields}
                for name, point in points.items()
                for suffix, fields in axis.values
            }
        return points


@dataclass(frozen=True)
class Job:
    """One planned run.

    Attributes:
        arm: name of the arm, with the values of its axes.
        seed: the seed; None if the run takes it from the checkpoint that it is forked from.
        args: command line for ``python -m mmqk.train``, without ``--fork``.
        family: the arm of the grid before it is crossed with axes.
        point: values of the axes by dotted field.
        role: "verdict" if the run counts in the verdicts, "selection" if it selects a learning rate.
        parent: name of the arm (with the values of its axes) that the run is forked from.
    """

    arm: str
    seed: int | None
    args: tuple[str, ...]
    family: Arm = field(repr=False, compare=False)
    point: Mapping[str, Any] = field(default_factory=dict, compare=False)
    role: str = "verdict"
    parent: str = ""

    @property
    def key(self) -> tuple[str, int | None, str]:
        """Unique key among the jobs of a grid."""
        return self.arm, self.seed, self.role

    @property
    def chosen(self) -> bool:
        """Whether the learning rate of the run is selected by other runs."""
        return self.role == "verdict" and self.family.lr is not None


def read_arm(name: Any, value: Any, common: Arm) -> Arm:
    """Read an arm; ``common`` has the defaults of the grid. `inherit` later sets the axes and seeds of a fork.

    Raises:
        UserError: an unknown key, a field that an arm cannot set, or a missing checkpoint.
    """
    where = f"{common.path}: arms.{name}"
    record = read.mapping({} if value is None else value, where)
    read.known(record, ARM_KEYS, where)
    if "fork" in record:
        fork = _fork(record["fork"], where, common.path)
        common = replace(common, fork=fork, seeds=(), axes=(), lr=None, base=())
    arm = replace(
        common,
        name=read.name(name, where),
        label=str(record.get("label", name)),
        block=str(record.get("block", "")),
        seeds=read.seeds(record["seeds"], f"{where}.seeds") if "seeds" in record else common.seeds,
        fields=read.mapping(record.get("set") or {}, f"{where}.set"),
        axes=read_axes(record["axes"] or {}, f"{where}.axes") if "axes" in record else common.axes,
    )
    check_settings(arm, where)
    return arm


def check_settings(arm: Arm, where: str) -> None:
    """Refuse a field that the grid sets itself, that is set twice, or that only a fork may set."""
    crossed = {key for point in arm.points.values() for key in point}
    for key in (*map(str, arm.fields), *sorted(crossed)):
        if key in _NOT_SET:
            raise UserError(f"{where}: {key!r} cannot be set by an arm: the grid sets it")
        if key in _OF_A_FORK and arm.fork is None:
            raise UserError(f"{where}: {key!r} is for forks only, and this arm is not a fork: remove it")
        group = next((other for other in arm.fields if f"{key}.".startswith(f"{other}.")), None)
        if key in crossed and group is not None:
            raise UserError(f"{where}: {key} is both set and an axis: remove it, or give the arm 'axes: {{}}'")
    if arm.lr and any(f"{LR}.".startswith(f"{key}.") for key in (*arm.fields, *crossed)):
        raise UserError(f"{where}: {LR} is set, but the rule own_best also selects it: remove one of the two")
    if arm.lr and (both := set(arm.lr.seeds) & set(arm.seeds)):
        raise UserError(
            f"{where}: seed {min(both)} selects the learning rate and is also in the verdicts: use other lr.seeds"
        )


def _fork(value: Any, where: str, path: Path) -> ArmFork:
    record = read.mapping(value, f"{where}.fork")
    fork = read.build(ArmFork, record, f"{where}.fork")
    if set(record) not in ({"checkpoint"}, {"arm", "step"}):
        raise UserError(f"{where}.fork must name an arm and a step, or a checkpoint")
    if fork.checkpoint is None:
        return fork
    file = Path(os.path.normpath(path.parent / fork.checkpoint))
    if not file.exists():
        raise UserError(f"{where}.fork: there is no {fork.checkpoint} (looked in {path.parent})")
    return ArmFork(checkpoint=file)


def parts_of(jobs: Iterable[Job]) -> dict[tuple[str, int | None, str], int]:
    """Return for each job the number that decides which ``--slice`` of the grid trains it. A fork has the number of
    its parent."""
    by_key = {job.key: job for job in jobs}
    roots = {}
    for key, job in by_key.items():
        while job.parent:
            job = by_key[job.parent, job.seed, "verdict"]
        roots[key] = job.key
    numbers = {root: number for number, root in enumerate(dict.fromkeys(roots.values()))}
    return {key: numbers[root] for key, root in roots.items()}
