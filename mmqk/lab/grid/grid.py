"""The grid language: base configs, arms that set fields, axes that are crossed with them, seeds and claims.

    name: demo
    base: [../demo.yaml]            relative to this file, merged in order
    seeds: [0, 1, 2]                for arms without seeds
    axes: {optim.lr: [0.01, 0.03]}  crossed with every arm
    lr: {rule: own_best, grid: [0.01, 0.03], seeds: [9], metric: final_loss/text}
    arms:
      plain: {label: no QK-Norm, block: decided, set: {model.qk_norm.kind: none}}
      qk:    {label: QK-Norm,    block: decided, set: {model.qk_norm.kind: rms}}
      late:  {label: QK-Norm from step 300, fork: {arm: plain, step: 300}, set: {model.qk_norm.kind: rms}}
    replay: {depths: [0.01, 0.05, 0.2], replays: 3, noise: 1.0e-6, horizon: 3}
    quick: [plain, qk]              the arms of --quick
    claims:
      - {id: C2, statement: ..., metric: ..., treatment: plain, control: qk, min_effect: 0.69}
    hypotheses:
      - {id: H1, statement: ..., predicts: {C2: above}}
    report: {hero: [plain, qk]}

docs/ablations.md has examples. The fields under ``set`` and ``axes`` are those of ``python -m mmqk.train``, whose
parser refuses unknown fields. `mmqk.lab` uses the claims and the report; this package only reads them and checks
the names of their arms. This package does not import torch, because `mmqk.lab` imports it and must work without
torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmqk.lab.grid import language as read
from mmqk.lab.grid.arms import LR, Arm, Job, read_arm
from mmqk.lab.grid.axes import read_axes
from mmqk.lab.grid.claims import check_arms, check_directions, check_report, read_claims
from mmqk.lab.grid.forks import inherit, match
from mmqk.lab.grid.record import SHAPE, misfit
from mmqk.lab.grid.rules import read_lr, read_replay
from mmqk.store import UserError, named_config

GRID_KEYS = (
    "name", "title", "base", "seeds", "arms", "quick", "axes", "lr", "replay", "claims", "claim", "direction",
    "hypotheses", "report",
)  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """A grid read from a file, or several merged grids. ``raw`` is the content of the YAML as plain data."""

    path: Path
    name: str
    title: str
    arms: tuple[Arm, ...]
    raw: Mapping[str, Any]

    @property
    def jobs(self) -> list[Job]:
        """All runs of the grid without replays: first those that select a learning rate, then all others by seed.

        With this order, the arms can be compared even if the grid is interrupted.
        """
        crossed = [(arm, name, point) for arm in self.arms for name, point in arm.points.items()]
        return [*self._selection(crossed), *self._verdict(crossed)]

    def _selection(self, crossed: Iterable[tuple[Arm, str, dict[str, Any]]]) -> Iterable[Job]:
        for arm, name, point in crossed:
            for seed in arm.lr.seeds if arm.lr else ():
                for lr in arm.lr.grid if arm.lr else ():
                    at = {**point, LR: lr}
                    args = (*_base(arm), *read.flags({**arm.fields, **at}), f"--seed={seed}")
                    yield Job(f"{name}-lr{lr:.12g}", seed, args, arm, at, "selection")

    def _verdict(self, crossed: Sequence[tuple[Arm, str, dict[str, Any]]]) -> Iterable[Job]:
        families = {arm.name: arm for arm in self.arms}
        parents = {name: (arm, point) for arm, name, point in crossed}
        for i in range(max(max(len(arm.seeds), 1) for arm in self.arms)):
            for arm, name, point in crossed:
                if i >= max(len(arm.seeds), 1):
                    continue
                seed = arm.seeds[i] if arm.seeds else None
                parent, start = "", arm.fork and arm.fork.arm
                fields = dict(point)
                if start:
                    parent = match(start, families, point)
                    shared = parents[parent][1].items()
                    fields = {k: v for k, v in point.items() if (k, v) not in shared}
                args = (*_base(arm), *read.flags({**arm.fields, **fields}))
                if seed is not None and not start:
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
    path = Path(path)
    raw = read.read_yaml(path)
    read.known(raw, GRID_KEYS, f"{path}")
    for key in ("name", "base", "arms"):
        if key not in raw:
            raise UserError(f"{path}: the key {key!r} is missing: add it")
    if "claim" in raw:
        if "claims" in raw:
            raise UserError(f"{path}: it has both claim and claims: put them into one list under claims")
        raw["claims"] = [{"id": raw["name"], **read.mapping(raw.pop("claim"), f"{path}: claim")}]
    named = read.mapping(raw["arms"], f"{path}: arms")
    if not named:
        raise UserError(f"{path}: arms is empty: name at least one arm")
    for name in added or ():
        if name in named:
            raise UserError(f"{path} has an arm {name}: give the added arm another name")
    if added:
        raw |= {"arms": {**raw["arms"], **added}, "added": list(added)}
        named = raw["arms"]
    common = Arm(
        name="",
        label="",
        block="",
        seeds=read.seeds(raw.get("seeds", [0]), f"{path}: seeds"),
        fields={},
        axes=read_axes(raw.get("axes") or {}, f"{path}: axes"),
        base=_bases(raw["base"], path),
        lr=read_lr(raw.get("lr"), f"{path}: lr"),
        replay=read_replay(raw["replay"], f"{path}: replay") if "replay" in raw else None,
        grid=read.name(raw["name"], f"{path}: name"),
        path=path,
    )
    arms = inherit([read_arm(name, value, common) for name, value in named.items()], named, path)
    names = [crossed for arm in arms for crossed in arm.points]
    for twice in (name for i, name in enumerate(names) if name in names[:i]):
        raise UserError(
            f"{path}: two arms have the name {twice} after they are crossed with the axes: rename one"
        )
    every = {*names, *(arm.name for arm in arms)}
    claims = read_claims(raw.get("claims"), every, common.grid, path)
    check_directions(claims, raw.get("claims") or (), raw.get("direction"), path)
    if wrong := misfit(raw, SHAPE["grid"]):  # ablation.json stores the raw grid
        raise UserError(f"{path}: {wrong}: correct it")
    check_report(read.mapping(raw.get("report") or {}, f"{path}: report"), every, claims, path)
    check_arms(read.strings(raw.get("quick") or [], f"{path}: quick"), every, f"{path}: quick")
    return Grid(path, common.grid, str(raw.get("title", common.grid)), tuple(arms), raw)


def _bases(value: Any, path: Path) -> tuple[Path, ...]:
    names = read.strings(value, f"{path}: base")
    return tuple(_base_file(name, path) for name in names)


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
