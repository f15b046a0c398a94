"""Find the parent of each fork of a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmqk.lab.grid.arms import Arm, check_settings
from mmqk.store import UserError


def inherit(arms: Sequence[Arm], named: Mapping[str, Any], path: Path) -> list[Arm]:
    """Give each fork the seeds and axes of its parent, unless the fork sets its own.

    Raises:
        UserError: the parent of a fork does not exist, does not have a seed of the fork, or has several runs per
            seed.
    """
    done: dict[str, Arm] = {}
    left = {arm.name: arm for arm in arms}
    while left:
        ready = [arm for arm in left.values() if not (arm.fork and arm.fork.arm) or _family(arm, done)]
        if not ready:
            arm = next(iter(left.values()))
            assert arm.fork is not None
            if arm.fork.arm in left or any(arm.fork.arm in other.points for other in left.values()):
                raise UserError(
                    f"{path}: arms.{arm.name}.fork: it is a fork of {arm.fork.arm}, which is a fork of it: fork one"
                    " of them from an arm that is not a fork"
                )
            every = sorted({*(a.name for a in arms), *(name for a in done.values() for name in a.points)})
            raise UserError(
                f"{path}: arms.{arm.name}.fork: there is no arm {arm.fork.arm!r} (arms: {', '.join(every)})"
            )
        for arm in ready:
            del left[arm.name]
            done[arm.name] = _as_child(arm, _family(arm, done), named[arm.name] or {})
    return [done[arm.name] for arm in arms]


def _family(arm: Arm, done: Mapping[str, Arm]) -> Arm | None:
    start = arm.fork.arm if arm.fork else ""
    return done.get(start) or next((a for a in done.values() if start in a.points), None)


def _as_child(arm: Arm, parent: Arm | None, record: Mapping[str, Any]) -> Arm:
    if parent is None or arm.fork is None:
        return arm
    where = f"{arm.path}: arms.{arm.name}"
    if strangers := set(arm.seeds) - set(parent.seeds):
        raise UserError(f"{where}.seeds: {min(strangers)} is not a seed of its parent {parent.name}")
    axes = arm.axes if "axes" in record or arm.fork.arm != parent.name else parent.axes
    child = replace(arm, seeds=arm.seeds or parent.seeds, axes=axes)
    check_settings(child, where)
    for point in child.points.values():
        if not match(arm.fork.arm, {parent.name: parent}, point):
            raise UserError(
                f"{where}.fork: {parent.name} has several runs per seed: name one of"
                f" {', '.join(parent.points)}, or cross {arm.name} with the same axes"
            )
    return child


def match(start: str, families: Mapping[str, Arm], point: Mapping[str, Any]) -> str:
    """Return the name of the arm (with the values of its axes) that is the parent of a fork with the axis values
    ``point``. Return an empty string if there is none."""
    for family in families.values():
        if start in family.points:
            return start
        if start == family.name:
            return next((n for n, p in family.points.items() if p.items() <= point.items()), "")
    return ""
