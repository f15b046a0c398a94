"""Merge several grids into one, so that their claims share runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mmqk.lab.grid import language as read
from mmqk.lab.grid.arms import Arm
from mmqk.lab.grid.grid import Grid, load_grid
from mmqk.lab.grid.record import REPORT
from mmqk.store import UserError, canonical


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
    first = grids[0]
    names = [grid.name for grid in grids]
    for grid in grids[1:]:
        if names.count(grid.name) > 1:
            raise UserError(f"{grid.path}: another grid has the name {grid.name}: rename one")
    raw = dict(first.raw)
    raw["claims"] = _claims(grids)
    if len(grids) == 1:
        return replace(first, raw=raw if raw["claims"] else first.raw)
    arms: dict[str, Arm] = {}
    records: dict[str, Any] = {}
    for grid in grids:
        for arm in grid.arms:
            arm = replace(arm, block=arm.block or grid.name)
            arms[arm.name] = _together(arms.get(arm.name), arm)
            record = records.setdefault(arm.name, dict(grid.raw["arms"][arm.name] or {}) | {"block": arm.block})
            record["seeds"] = list(arms[arm.name].seeds)
            if arm.axes:
                record["axes"] = {axis.name: [fields for _, fields in axis.values] for axis in arm.axes}
    name, title = "+".join(names), " · ".join(grid.title for grid in grids)
    raw = {"name": name, "title": title, "arms": records, "claims": raw["claims"], "report": _report(grids)}
    if quick := [name for grid in grids for name in read.strings(grid.raw.get("quick") or [], "quick")]:
        raw["quick"] = quick
    if hypotheses := [h for grid in grids for h in grid.raw.get("hypotheses") or []]:
        raw["hypotheses"] = hypotheses
    crossed: dict[str, str] = {}
    for arm in arms.values():
        for point in arm.points:
            if crossed.setdefault(point, arm.name) != arm.name:
                raise UserError(f"{arm.path}: another grid has an arm {point}: rename one")
    return Grid(first.path, name, title, tuple(arms.values()), raw)


def _together(one: Arm | None, other: Arm) -> Arm:
    if one is None:
        return other
    if _definition(one) != _definition(other):
        raise UserError(
            f"{other.path}: arm {other.name} differs from the one in {one.path}: rename one, or make them equal"
        )
    if one.replay and other.replay and one.replay != other.replay:
        raise UserError(
            f"{other.path}: arm {other.name} has another replay rule in {one.path}: rename one, or make them equal"
        )
    seeds = (*one.seeds, *(seed for seed in other.seeds if seed not in one.seeds))
    return replace(one, seeds=seeds, replay=one.replay or other.replay)


def _definition(arm: Arm) -> str:
    """Return everything that determines the runs of an arm, except the seeds."""
    base = [str(Path(path).resolve()) for path in arm.base]
    return canonical(
        {
            "base": base,
            "fields": arm.fields,
            "points": arm.points,
            "fork": str(arm.fork),
            "lr": asdict(arm.lr) if arm.lr else None,
        }
    )


def _claims(grids: Sequence[Grid]) -> list[dict[str, Any]]:
    claims: dict[str, dict[str, Any]] = {}
    for grid in grids:
        for claim in grid.raw.get("claims") or []:
            old = claims.setdefault(claim["id"], {**claim, "grid": grid.name})
            if {**claim, "grid": ""} != {**old, "grid": ""}:
                raise UserError(
                    f"{grid.path}: claim {claim['id']} differs from the one in {old['grid']}: rename one"
                )
    return list(claims.values())


def _report(grids: Sequence[Grid]) -> Mapping[str, Any]:
    """Merge the report settings: lists are joined, and any other value is taken from the first grid that sets it."""
    together: dict[str, Any] = {}
    for key in REPORT:
        for value in ((grid.raw.get("report") or {}).get(key) for grid in grids):
            if isinstance(value, list) and isinstance(together.get(key, []), list):
                together[key] = [
                    *together.get(key, []),
                    *(v for v in value if v not in together.get(key, [])),
                ]
            elif value is not None:
                together.setdefault(key, value)
    return together
