"""The grid file: base configs, arms that set fields, axes that are crossed with them, seeds and claims.

    name: demo
    base: [../demo.yaml]            relative to this file, merged in order
    seeds: [0, 1, 2]                for arms without seeds
    axes: {optim.lr: [0.01, 0.03]}  crossed with every arm
    lr: {rule: own_best, grid: [0.01, 0.03], seeds: [9], metric: final_loss/text}
    arms:
      plain: {label: no QK-Norm, block: decided, set: {model.qk_norm.kind: none}}
      qk:    {label: QK-Norm,    block: decided, set: {model.qk_norm.kind: rms}}
      late:  {label: QK-Norm from step 300, fork: {arm: plain, step: 300}, set: {model.qk_norm.kind: rms}}
    quick: [plain, qk]              the arms of --quick
    claims:
      - {id: C2, statement: ..., metric: ..., treatment: plain, control: qk, min_effect: 0.69}
    report: {hero: [plain, qk]}

docs/ablations.md has examples. The fields under ``set`` and ``axes`` are those of ``mmqk train``, whose parser
refuses unknown fields. ``hypotheses`` is text that no code reads: it is part of the hash of registered claims. This
package does not import torch, because the report reads grids and must work without torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

from mmqk.lab.grid.arms import LR, Arm, GridFile, Job, build, check_settings, flags, read_arm, read_axes, read_lr
from mmqk.lab.grid.claims import Claim, Report, as_list, check_arms, check_directions, check_report, read_claims
from mmqk.store import UserError, canonical, named_config


@dataclass(frozen=True)
class Grid:
    """A grid read from a file, or several merged grids. ``raw`` is the content of the YAML as plain data;
    `load_grids` adds the name of its grid to each claim."""

    path: Path
    name: str
    title: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    raw: Mapping[str, Any]

    @property
    def points(self) -> list[tuple[Arm, str, dict[str, Any]]]:
        """Each arm with each combination of its axis values: the arm, the name with the values, and the values."""
        return [(arm, name, point) for arm in self.arms for name, point in arm.points.items()]

    @property
    def jobs(self) -> list[Job]:
        """All runs of the grid: first those that select a learning rate, then all others by seed.

        With this order, the arms can be compared even if the grid is interrupted.
        """
        return [*self._selection(), *self._verdict()]

    def _selection(self) -> Iterable[Job]:
        for arm, name, point in self.points:
            for seed, lr in product(arm.lr.seeds, arm.lr.grid) if arm.lr else ():
                at = {**point, LR: lr}
                args = (*_base(arm), *flags({**arm.fields, **at}), f"--seed={seed}")
                yield Job(f"{name}-lr{lr:.12g}", seed, args, arm, at, "selection")

    def _verdict(self) -> Iterable[Job]:
        families = {arm.name: arm for arm in self.arms}
        points = {name: point for _, name, point in self.points}
        runs = [(i, seed, *of) for of in self.points for i, seed in enumerate(of[0].seeds or (None,))]
        for _, seed, arm, name, point in sorted(runs, key=itemgetter(0)):
            parent, fields = "", dict(point)
            if arm.fork and arm.fork.arm:
                parent = parent_of(arm.fork.arm, families, point)
                fields = {k: v for k, v in point.items() if (k, v) not in points[parent].items()}
            args = (*_base(arm), *flags({**arm.fields, **fields}))
            if seed is not None and not parent:
                args = (*args, f"--seed={seed}")
            yield Job(name, seed, args, arm, point, parent=parent)


def load_grid(path: str | Path, added: Mapping[str, Any] | None = None) -> Grid:
    """Read a grid.

    Args:
        added: further arms by name, in the format of ``arms``; ``raw`` lists their names under ``added``.

    Raises:
        UserError: the file cannot be read, a key or a value is invalid, two arms have one name, or a name refers to
            an arm, claim or base config that does not exist.
    """
    from mmqk.config.parse import read_yaml  # as in `build`

    path = Path(path)
    raw = read_yaml(path, "grid", "give a grid such as those in configs/ablations")
    try:
        json.dumps(raw, allow_nan=False)  # the grid is stored with the runs as JSON
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} has a value that JSON cannot have ({error}): replace it") from error
    file = build(GridFile, raw, f"{path}")
    if twice := [name for name in added or () if name in file.arms]:
        raise UserError(f"{path} has an arm {twice[0]}: give the added arm another name")
    if added:
        raw |= {"arms": {**raw["arms"], **added}, "added": list(added)}
    axes, lr = read_axes(file.axes or {}, f"{path}: axes"), read_lr(file.lr or {}, f"{path}: lr")
    base = tuple(_base_file(name, path) for name in as_list(file.base))
    common = Arm("", "", "", file.seeds, {}, axes, base=base, lr=lr, grid=file.name, path=path)
    arms = _inherit([read_arm(name, value, common) for name, value in raw["arms"].items()], raw["arms"], path)
    names = [name for arm in arms for name in arm.points]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise UserError(f"{path}: two arms have the name {twice[0]} after they are crossed with the axes: rename one")
    every = {*names, *(arm.name for arm in arms)}
    claims = read_claims(raw.get("claims"), every, file.name, path)
    check_directions(claims, raw.get("claims") or (), file.direction, path)
    check_report(build(Report, file.report or {}, f"{path}: report"), every, claims, path)
    check_arms(as_list(file.quick), every, f"{path}: quick")
    return Grid(path, file.name, file.title or file.name, tuple(arms), claims, raw)


def _base_file(name: str, path: Path) -> Path:
    beside = Path(os.path.normpath(path.parent / name))
    file = beside if beside.is_file() else named_config(name)
    if file is None:
        raise UserError(
            f"{path}: the base config {name} does not exist (looked in {path.parent} and for a shipped file of that"
            " name)"
        )
    return file


def _base(arm: Arm) -> Iterable[str]:
    return (part for base in arm.base for part in ("--config", str(base)))


# Forks ----------------------------------------------------------------------------------------------------


def _inherit(arms: Sequence[Arm], named: Mapping[str, Any], path: Path) -> list[Arm]:
    """Give each fork the seeds and axes of its parent, unless the fork sets its own.

    Raises:
        UserError: the parent of a fork does not exist, does not have a seed of the fork, or has several runs per
            seed.
    """
    starts = {arm.name: arm.fork.arm for arm in arms if arm.fork and arm.fork.arm}
    done = {arm.name: arm for arm in arms if arm.name not in starts}
    while left := [arm for arm in arms if arm.name not in done]:
        found = [(arm, a) for arm in left for a in done.values() if starts[arm.name] in (a.name, *a.points)]
        if not found:
            arm, names = left[0], sorted({*done, *(point for a in done.values() for point in a.points)})
            raise UserError(
                f"{path}: arms.{arm.name}.fork: {starts[arm.name]!r} is no arm of this grid, or a fork of {arm.name}: "
                f"name one of {', '.join(names)}"
            )
        for arm, parent in found:
            done[arm.name] = _as_child(arm, parent, named[arm.name] or {})
    return [done[arm.name] for arm in arms]


def _as_child(arm: Arm, parent: Arm, record: Mapping[str, Any]) -> Arm:
    assert arm.fork is not None
    where = f"{arm.path}: arms.{arm.name}"
    if strangers := set(arm.seeds) - set(parent.seeds):
        raise UserError(f"{where}.seeds: {min(strangers)} is not a seed of its parent {parent.name}")
    axes = arm.axes if "axes" in record or arm.fork.arm != parent.name else parent.axes
    child = replace(arm, seeds=arm.seeds or parent.seeds, axes=axes)
    check_settings(child, where)
    for point in child.points.values():
        if not parent_of(arm.fork.arm, {parent.name: parent}, point):
            raise UserError(
                f"{where}.fork: {parent.name} has several runs per seed: name one of"
                f" {', '.join(parent.points)}, or cross {arm.name} with the same axes"
            )
    return child


def parent_of(start: str, families: Mapping[str, Arm], point: Mapping[str, Any]) -> str:
    """Return the name of the arm (with the values of its axes) that is the parent of a fork with the axis values
    ``point``. Return an empty string if there is none."""
    for family in families.values():
        if start in family.points:
            return start
        if start == family.name:
            return next((n for n, p in family.points.items() if p.items() <= point.items()), "")
    return ""


# Several grids --------------------------------------------------------------------------------------------


def load_grids(paths: Sequence[str | Path], added: Mapping[str, Any] | None = None) -> Grid:
    """Load and merge grids; the name of the result joins their names.

    An arm with the same definition in two grids becomes one arm with the seeds of both grids. If arms with different
    names have equal runs, the planner detects this when it resolves the configurations. Claims and report settings
    are joined; each claim records its grid. An arm without a block gets the name of its grid as its block, so that
    the seed spread is not pooled over several grids. ``added`` has further arms for the first grid.

    Raises:
        UserError: a file is refused by `load_grid`, two grids have the same name, or two arms or claims with the
            same name differ.
    """
    grids = [load_grid(path, added if path == paths[0] else None) for path in paths]
    first, names = grids[0], [grid.name for grid in grids]
    for grid in grids[1:]:
        if names.count(grid.name) > 1:
            raise UserError(f"{grid.path}: another grid has the name {grid.name}: rename one")
    claims = _joined_claims(grids)
    if len(grids) == 1:
        return replace(first, raw={**first.raw, "claims": claims} if claims else first.raw)
    arms: dict[str, Arm] = {}
    records: dict[str, Any] = {}
    for grid in grids:
        for arm in grid.arms:
            arm = replace(arm, block=arm.block or grid.name)
            arms[arm.name] = _together(arms.get(arm.name, arm), arm)
            record = records.setdefault(arm.name, dict(grid.raw["arms"][arm.name] or {}) | {"block": arm.block})
            record["seeds"] = list(arms[arm.name].seeds)
            if arm.axes:
                record["axes"] = {name: [*values.values()] for name, values in arm.axes.items()}
    name, title = "+".join(names), " · ".join(grid.title for grid in grids)
    raw = {"name": name, "title": title, "arms": records, "claims": claims, "report": _joined_report(grids)}
    for key in ("quick", "hypotheses"):
        if joined := [value for grid in grids for value in as_list(grid.raw.get(key))]:
            raw[key] = joined
    crossed: dict[str, str] = {}
    for arm in arms.values():
        for point in arm.points:
            if crossed.setdefault(point, arm.name) != arm.name:
                raise UserError(f"{arm.path}: another grid has an arm {point}: rename one")
    read = {(grid.name, claim.id): claim for grid in grids for claim in grid.claims}
    kept = tuple(read[claim["grid"], claim["id"]] for claim in claims)
    return Grid(first.path, name, title, tuple(arms.values()), kept, raw)


def _together(one: Arm, other: Arm) -> Arm:
    def definition(arm: Arm) -> str:
        """Return everything that determines the runs of an arm, except the seeds."""
        base = [str(path.resolve()) for path in arm.base]
        return canonical([base, arm.fields, arm.points, str(arm.fork), str(arm.lr)])

    if definition(one) != definition(other):
        raise UserError(
            f"{other.path}: arm {other.name} differs from the one in {one.path}: rename one, or make them equal"
        )
    return replace(one, seeds=(*one.seeds, *(seed for seed in other.seeds if seed not in one.seeds)))


def _joined_claims(grids: Sequence[Grid]) -> list[dict[str, Any]]:
    claims: dict[str, dict[str, Any]] = {}
    for grid in grids:
        for claim in grid.raw.get("claims") or []:
            old = claims.setdefault(claim["id"], {**claim, "grid": grid.name})
            if {**claim, "grid": ""} != {**old, "grid": ""}:
                raise UserError(f"{grid.path}: claim {claim['id']} differs from the one in {old['grid']}: rename one")
    return list(claims.values())


def _joined_report(grids: Sequence[Grid]) -> Mapping[str, Any]:
    """Merge the report settings: lists are joined, and any other value is taken from the first grid that sets it."""
    joined: dict[str, Any] = {}
    for key, value in (item for grid in grids for item in (grid.raw.get("report") or {}).items()):
        old = joined.get(key, [])
        if isinstance(value, list) and isinstance(old, list):
            joined[key] = [*old, *(v for v in value if v not in old)]
        elif value is not None:
            joined.setdefault(key, value)
    return joined
