"""Arms of a grid: what each sets, where it begins, and the runs that it stands for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmqk.grid import language as read
from mmqk.grid.axes import Axis, read_axes
from mmqk.grid.rules import LrRule, ReplayRule
from mmqk.ranges import MOST_SEED, MOST_STEPS, check_numbers, number, ranged
from mmqk.store import UserError

ARM_KEYS = ("label", "block", "seeds", "set", "axes", "fork")
LR = "optim.lr"
# These come from the grid itself.
_NOT_SET = ("seed", "out", "config", "fork", "print_config")
_OF_A_FORK = ("fork_skip", "fork_perturb", "fork_draw")


@dataclass(frozen=True)
class ArmFork:
    """Where the runs of an arm begin: in those of another arm (or one point of it) at a step, or in a checkpoint."""

    arm: str = ""
    step: int = number(0, 0, MOST_STEPS)
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "fork")


@dataclass(frozen=True)
class Arm:
    """One variant: a name, the words for it, its seeds, the fields it sets over the base, and its axes.

    Attributes:
        seeds: empty for a fork of a checkpoint that names none: its run has the seed of the checkpoint.
        grid: name of the grid that it is from.
        path: file of that grid, for sentences.
        base: files of the configuration that it starts from; none of a fork, which starts from its parent's.
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
        check_numbers(self, "")

    @property
    def points(self) -> dict[str, dict[str, Any]]:
        """The point {field: value} of every crossed arm, by its name."""
        found: dict[str, dict[str, Any]] = {self.name: {}}
        for axis in self.axes:
            found = {
                f"{name}-{suffix}": {**point, **fields}
                for name, point in found.items()
                for suffix, fields in axis.values
            }
        return found


@dataclass(frozen=True)
class Job:
    """One run to be made: ``args`` is its command line for ``python -m mmqk.train``, without its fork.

    Attributes:
        arm: with the values of its axes.
        seed: None where a checkpoint decides it.
        family: the arm that the grid names.
        point: values of the axes by dotted field.
        role: "verdict", or "selection" of a learning rate.
        parent: name of the arm (with its values) that it is forked from.
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
        """What it is called among the jobs of a grid."""
        return self.arm, self.seed, self.role

    @property
    def chosen(self) -> bool:
        """Whether its learning rate is what the selection runs say."""
        return self.role == "verdict" and self.family.lr is not None


def flags(fields: Mapping[str, Any]) -> Iterable[str]:
    """Fields as arguments of ``mmqk.train``."""
    return (f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in fields.items())


def read_arm(name: Any, value: Any, common: Arm) -> Arm:
    """An arm as the grid has it, over what all arms have in common; of a fork, without what its parent gives it.

    Raises:
        UserError: an unknown key, a field that is not for an arm to set, a checkpoint that is not there.
    """
    where = f"{common.path}: arms.{name}"
    record = read.mapping({} if value is None else value, where)
    read.known(record, ARM_KEYS, where)
    fork = _fork(record["fork"], where, common.path) if "fork" in record else None
    fields = read.mapping(record.get("set") or {}, f"{where}.set")
    axes = read_axes(record["axes"] or {}, f"{where}.axes") if "axes" in record else common.axes
    if fork and "axes" not in record:
        axes = ()  # those of its parent, once all arms are read
    seeds = read.seeds(record["seeds"], f"{where}.seeds") if "seeds" in record else common.seeds
    if fork and "seeds" not in record:
        seeds = ()
    arm = replace(
        common,
        name=read.name(name, where),
        label=str(record.get("label", name)),
        block=str(record.get("block", "")),
        seeds=seeds,
        fields=fields,
        axes=axes,
        fork=fork,
        lr=None if fork else common.lr,
        base=() if fork else common.base,
    )
    check_fields(arm, where)
    return arm


def check_fields(arm: Arm, where: str) -> None:
    """Refuse a field that the grid decides, that is set twice, or that is of a fork alone."""
    crossed = {key for point in arm.points.values() for key in point}
    for key in (*map(str, arm.fields), *sorted(crossed)):
        if key in _NOT_SET:
            raise UserError(f"{where}: {key!r} is not for an arm to set: the grid decides it")
        if key in _OF_A_FORK and arm.fork is None:
            raise UserError(f"{where}: {key!r} is of a fork, and the arm has no fork: leave it out")
        group = next((other for other in arm.fields if f"{key}.".startswith(f"{other}.")), None)
        if key in crossed and group is not None:
            raise UserError(f"{where}: {key} is set and an axis too: leave it out, or write axes: {{}} there")
    if arm.lr and any(f"{LR}.".startswith(f"{key}.") for key in (*arm.fields, *crossed)):
        raise UserError(f"{where}: {LR} is set, and lr: own_best chooses it: leave out one of the two")
    if arm.lr and (both := set(arm.lr.seeds) & set(arm.seeds)):
        raise UserError(
            f"{where}: seed {min(both)} chooses the learning rate and decides too: take others for lr.seeds"
        )


def _fork(value: Any, where: str, path: Path) -> ArmFork:
    record = read.mapping(value, f"{where}.fork")
    read.known(record, ("arm", "step", "checkpoint"), f"{where}.fork")
    if set(record) == {"checkpoint"}:
        name = record["checkpoint"]
        if not isinstance(name, str):
            raise UserError(f"{where}.fork.checkpoint must be one path, not {name!r}")
        file = Path(os.path.normpath(path.parent / name))
        if not file.exists():
            raise UserError(f"{where}.fork: there is no {name} (looked in {path.parent})")
        return ArmFork(checkpoint=file)
    if set(record) != {"arm", "step"}:
        raise UserError(f"{where}.fork must name an arm and a step, or a checkpoint")
    return read.in_range(ArmFork, where, str(record["arm"]), read.whole(record["step"], f"{where}.fork.step"))


def parts_of(jobs: Iterable[Job]) -> dict[tuple[str, int | None, str], int]:
    """A number for each job, by which slices share them out; a fork has its parent's."""
    parts: dict[tuple[str, int | None, str], int] = {}
    by_key = {job.key: job for job in jobs}
    for job in by_key.values():
        root = job
        while root.parent:
            root = by_key[root.parent, root.seed, "verdict"]
        parts[job.key] = parts.setdefault(root.key, len(parts))
    # Without gaps, or slices would not be even.
    order = {part: place for place, part in enumerate(dict.fromkeys(parts.values()))}
    return {key: order[part] for key, part in parts.items()}
