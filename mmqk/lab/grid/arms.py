"""Arms of a grid: the fields that they set, their axes, learning rates, forks and runs; the keys of a grid file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from mmqk.model.ranges import LARGEST, MOST_SEED, MOST_STEPS, SMALLEST, check_fields, number
from mmqk.store import UserError

T = TypeVar("T")
Names = list[str] | str | None
LR = "optim.lr"
# Fields whose values are combined with every arm, by the name of the axis: for each value, the suffix of the arm's name
# and the fields to set.
Axes = Mapping[str, Mapping[str, Mapping[str, Any]]]
# Fields that an arm cannot set, because the grid sets them.
_NOT_SET = ("seed", "out", "config", "fork")
_OF_A_FORK = ("fork_skip_batches", "fork_noise", "fork_seed", "fork_new_moments", "fork_skip")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*(-[A-Za-z0-9_.]+)*")


@dataclass(frozen=True)
class LrRule:
    """How arms get their learning rates: each arm sets its own learning rate, or selection runs with other seeds
    choose it.

    Attributes:
        grid: learning rates to try, ascending.
        seeds: seeds of the selection runs.
        metric: a metric of `mmqk.lab.metrics`; the learning rate with the best mean over seeds is selected.
    """

    rule: Literal["matched", "own_best"] = "matched"
    grid: tuple[float, ...] = number((), SMALLEST, LARGEST)
    seeds: tuple[int, ...] = number((0,), 0, MOST_SEED)
    metric: str = "final_excess"

    def __post_init__(self) -> None:
        check_fields(self, "")
        for name, values in (("grid", self.grid), ("seeds", self.seeds)):
            if self.rule == "own_best" and (not values or len(set(values)) < len(values)):
                raise ValueError(f"{name} must be a list of different numbers, not {list(values)}")


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
    seeds: tuple[int, ...]
    fields: Mapping[str, Any]
    axes: Axes = field(default_factory=dict)
    fork: ArmFork | None = None
    base: tuple[Path, ...] = ()
    lr: LrRule | None = None
    grid: str = ""
    path: Path = Path()

    @property
    def points(self) -> dict[str, dict[str, Any]]:
        """The field values of each combination of axis values. The keys are arm names with the values of the axes."""
        points: dict[str, dict[str, Any]] = {self.name: {}}
        for values in self.axes.values():
            points = {
                f"{name}-{suffix}": {**point, **fields}
                for name, point in points.items()
                for suffix, fields in values.items()
            }
        return points


@dataclass(frozen=True)
class Job:
    """One planned run.

    Attributes:
        arm: name of the arm, with the values of its axes.
        seed: the seed; None if the run takes it from the checkpoint that it is forked from.
        args: command line for ``mmqk train``, without ``--fork``.
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


@dataclass(frozen=True)
class GridFile:
    """The keys of a grid file."""

    name: str
    base: list[str] | str
    arms: dict[str, Any]
    title: str = ""
    seeds: tuple[int, ...] = number((0,), 0, MOST_SEED)
    quick: Names = None
    axes: dict[str, Any] | None = None
    lr: dict[str, Any] | None = None
    claims: list[dict[str, Any]] | None = None
    direction: Any = None
    hypotheses: Any = None
    report: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "")
        check_seeds(self.seeds)
        folder_name(self.name, "name")
        if not self.arms:
            raise ValueError("arms is empty: name at least one arm")


@dataclass(frozen=True)
class ArmFile:
    """The keys of an arm in a grid file."""

    label: str = ""
    block: str = ""
    seeds: tuple[int, ...] | None = number(None, 0, MOST_SEED)
    set: dict[str, Any] | None = None
    axes: dict[str, Any] | None = None
    fork: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "")
        check_seeds(self.seeds)


def check_seeds(seeds: Sequence[int] | None) -> None:
    """Refuse an empty list of seeds, and a seed that is named twice."""
    if seeds is not None and (not seeds or len(set(seeds)) < len(seeds)):
        raise ValueError(f"seeds is {list(seeds)}: it must be a list of different whole numbers")


def read_arm(name: str, value: Any, common: Arm) -> Arm:
    """Read an arm; ``common`` has the defaults of the grid. A fork later inherits axes and seeds from its parent.

    Raises:
        UserError: an unknown key, a field that an arm cannot set, or a missing checkpoint.
    """
    where = f"{common.path}: arms.{folder_name(name, f'{common.path}: arms.{name}')}"
    record = build(ArmFile, {} if value is None else value, where)
    if record.fork is not None:
        fork = _fork(record.fork, f"{where}.fork", common.path)
        common = replace(common, fork=fork, seeds=(), axes={}, lr=None, base=())
    label, fields = record.label or name, record.set or {}
    seeds = common.seeds if record.seeds is None else record.seeds
    axes = read_axes(record.axes or {}, f"{where}.axes") if "axes" in (value or {}) else common.axes
    arm = replace(common, name=name, label=label, block=record.block, seeds=seeds, fields=fields, axes=axes)
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
        if key in crossed and any(f"{key}.".startswith(f"{other}.") for other in arm.fields):
            raise UserError(f"{where}: {key} is both set and an axis: remove it, or give the arm 'axes: {{}}'")
    if arm.lr and any(f"{LR}.".startswith(f"{key}.") for key in (*arm.fields, *crossed)):
        raise UserError(f"{where}: {LR} is set, but the rule own_best also selects it: remove one of the two")
    if arm.lr and (both := set(arm.lr.seeds) & set(arm.seeds)):
        raise UserError(
            f"{where}: seed {min(both)} selects the learning rate and is also in the verdicts: use other lr.seeds"
        )


def _fork(record: Mapping[str, Any], where: str, path: Path) -> ArmFork:
    fork = build(ArmFork, record, where)
    if set(record) not in ({"checkpoint"}, {"arm", "step"}):
        raise UserError(f"{where} must name an arm and a step, or a checkpoint")
    if fork.checkpoint is None:
        return fork
    file = Path(os.path.normpath(path.parent / fork.checkpoint))
    if not file.exists():
        raise UserError(f"{where}: there is no {fork.checkpoint} (looked in {path.parent})")
    return ArmFork(checkpoint=file)


def read_axes(record: Mapping[str, Any], where: str) -> Axes:
    """Return the axes of a grid or an arm.

    ``optim.lr: [0.01, 0.03]`` sets one field and adds ``lr0.01`` to the name.
    ``size: {small: {model.width: 64, …}, …}`` sets several fields and adds ``small``.

    Raises:
        UserError: values that are not a list, a repeated value, or a field on two axes.
    """
    short = [name.rpartition(".")[2] for name in record]
    axes: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    seen: set[str] = set()
    for (name, values), last in zip(record.items(), short, strict=True):
        place = f"{where}.{name}"
        if isinstance(values, dict):
            pairs = list(values.items())
            named = [set(fields) if isinstance(fields, dict) else set() for _, fields in pairs]
            if not pairs or not named[0] or any(fields != named[0] for fields in named):
                raise UserError(f"{place}: every group must set the same fields")
        elif isinstance(values, list) and values:
            prefix = last if short.count(last) == 1 else name
            pairs = [(f"{prefix}{_suffix(v)}", {name: v}) for v in values]
        else:
            raise UserError(f"{place} must be a list of values, or named groups of fields, not {values!r}")
        names = [folder_name(key, place) for key, _ in pairs]
        if twice := next((key for key in names if names.count(key) > 1), None):
            raise UserError(f"{place} has two values with the name {twice}: remove one")
        if both := sorted(seen & pairs[0][1].keys()):
            raise UserError(f"{where}: {both[0]} is on two axes: remove it from one")
        seen |= pairs[0][1].keys()
        axes[name] = dict(pairs)
    return axes


def _suffix(value: Any) -> str:
    """Return a value as part of a folder name."""
    if isinstance(value, float):
        return f"{value:.12g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_-")


def read_lr(record: Mapping[str, Any], where: str) -> LrRule | None:
    """Return the rule for learning rates; None if the arms set their learning rates.

    Raises:
        UserError: an unknown rule or key, or invalid learning rates or seeds.
    """
    rule = build(LrRule, record, where)
    if rule.rule == "own_best":
        return replace(rule, grid=tuple(sorted(rule.grid)))
    if unread := sorted(record.keys() - {"rule"}):
        raise UserError(f"{where}.{unread[0]} is for the rule own_best: add 'rule: own_best', or remove it")
    return None


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


# Reading --------------------------------------------------------------------------------------------------


def flags(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields as arguments of a command line."""
    return tuple(f"--{k}={v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for k, v in fields.items())


def build(kind: type[T], record: Mapping[str, Any], where: str) -> T:
    """Return a dataclass with the given fields, parsed as in ``mmqk train``.

    Raises:
        UserError: an unknown field, a wrong type, or a number outside its range.
    """
    # This import loads pydantic, which --help and the views of a folder do not need.
    from mmqk.config.parse import parse_fields

    try:
        return parse_fields(kind, record)
    except (UserError, ValueError) as error:
        sentence = str(error).rstrip(".")
        raise UserError(f"{where}: {sentence[:1].lower()}{sentence[1:]}") from error


def folder_name(value: Any, where: str) -> str:
    """Return the value, which must be a valid folder name."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise UserError(f"{where}: {value!r} is not a folder name: use letters, digits, '-', '_' and '.'")
    return value
