"""The grid language: base configs, named arms that set fields, seeds, and the claims they decide.

    name: demo
    base: [../demo.yaml]            relative to this file, merged in order
    seeds: [0, 1, 2]                of every arm that names none
    arms:
      plain: {label: no QK-Norm, block: decided, set: {model.qk_norm.kind: none}}
      qk:    {label: QK-Norm,    block: decided, set: {model.qk_norm.kind: rms}}
    claims:
      - {id: C2, statement: ..., metric: ..., treatment: plain, control: qk, delta: 0.69}
    report: {hero: [plain, qk]}

The fields under ``set`` are those of ``python -m mmqk.train``, so an unknown one is refused by its parser.
Claims and report are for `mmqk.analysis`; here only their names of arms are checked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mmqk.store import UserError, identity_hash

GRID_KEYS = ("name", "title", "base", "seeds", "arms", "claims", "report")
ARM_KEYS = ("label", "block", "seeds", "set")
# What a registered claim may say; `mmqk.analysis` reads them.
CLAIM_KEYS = (
    *("id", "statement", "source", "mark", "number_there", "metric", "treatment", "control", "arms"),
    *("delta", "direction", "regime", "positive_control", "at_least", "status", "falsifier", "note"),
    "finding",
)
REPORT_KEYS = ("hero", "shown", "headline", "cannot_tell", "command")
# These come from the grid itself.
_NOT_SET = ("seed", "out", "config", "fork")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*(-[A-Za-z0-9_.]+)*")


@dataclass(frozen=True)
class Arm:
    """One variant: a name, the words for it, its seeds, and the fields it sets over the base."""

    name: str
    label: str
    block: str
    seeds: tuple[int, ...]
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """One run to be made: ``args`` is its command line for ``python -m mmqk.train``."""

    arm: str
    seed: int
    args: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """A grid as read from its file; ``raw`` is the file's content as plain data."""

    path: Path
    name: str
    title: str
    base: tuple[Path, ...]
    arms: tuple[Arm, ...]
    raw: Mapping[str, Any]

    @property
    def jobs(self) -> list[Job]:
        """All runs, the first seed of every arm first: an interrupted grid can be compared already."""
        rounds = max(len(arm.seeds) for arm in self.arms)
        return [
            Job(arm.name, arm.seeds[i], tuple(self._args(arm, arm.seeds[i])))
            for i in range(rounds)
            for arm in self.arms
            if i < len(arm.seeds)
        ]

    def _args(self, arm: Arm, seed: int) -> Iterable[str]:
        for base in self.base:
            yield from ("--config", str(base))
        for name, value in arm.fields.items():
            yield f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
        yield f"--seed={seed}"


def load_grid(path: str | Path) -> Grid:
    """Read a grid; every key is one that is known.

    Raises:
        UserError: the file is missing or not YAML, a key is unknown or of the wrong type, a base config does
            not exist, a claim or the report names an arm or a claim that is not there.
    """
    path = Path(path)
    raw = _read(path)
    _known(raw, GRID_KEYS, f"{path}")
    for key in ("name", "base", "arms"):
        if key not in raw:
            raise UserError(f"{path}: there is no {key!r}, which every grid has")
    bases = _strings(raw["base"], f"{path}: base")
    base = tuple(Path(os.path.normpath(path.parent / name)) for name in bases)
    for name, file in zip(bases, base, strict=True):
        if not file.is_file():
            raise UserError(f"{path}: the base config {name} does not exist (looked in {path.parent})")
    seeds = _seeds(raw.get("seeds", [0]), f"{path}: seeds")
    arms = _mapping(raw["arms"], f"{path}: arms")
    if not arms:
        raise UserError(f"{path}: arms is empty: name at least one arm")
    grid = Grid(
        path=path,
        name=_name(raw["name"], f"{path}: name"),
        title=str(raw.get("title", raw["name"])),
        base=base,
        arms=tuple(_arm(name, value, seeds, path) for name, value in arms.items()),
        raw=raw,
    )
    _check_references(grid)
    return grid


def claims_hash(grid: Mapping[str, Any]) -> str:
    """Hash of the claims of a grid's content; the same whatever else the grid holds."""
    return identity_hash({"claims": grid.get("claims") or []})


def _arm(name: Any, value: Any, seeds: tuple[int, ...], path: Path) -> Arm:
    where = f"{path}: arms.{name}"
    record = _mapping({} if value is None else value, where)
    _known(record, ARM_KEYS, where)
    fields = _mapping(record.get("set") or {}, f"{where}.set")
    for field in fields:
        if str(field) in _NOT_SET:
            raise UserError(f"{where}.set: {field!r} is not for an arm to set: the grid decides it")
    return Arm(
        name=_name(name, where),
        label=str(record.get("label", name)),
        block=str(record.get("block", "")),
        seeds=_seeds(record["seeds"], f"{where}.seeds") if "seeds" in record else seeds,
        fields=fields,
    )


def _check_references(grid: Grid) -> None:
    arms = {arm.name for arm in grid.arms}
    claims = grid.raw.get("claims") or []
    if not isinstance(claims, list):
        raise UserError(f"{grid.path}: claims is a list")
    ids: list[str] = []
    for number, value in enumerate(claims):
        claim = _mapping(value, f"{grid.path}: claims[{number}]")
        _known(claim, CLAIM_KEYS, f"{grid.path}: claims[{number}]")
        if "id" not in claim or claim["id"] in ids:
            raise UserError(f"{grid.path}: claims[{number}] has no id of its own")
        ids.append(claim["id"])
    for claim in claims:
        where = f"{grid.path}: claim {claim['id']}"
        named = [claim[key] for key in ("treatment", "control") if claim.get(key) is not None]
        _arms_exist([*named, *_strings(claim.get("arms") or [], f"{where}: arms")], arms, where)
        control = claim.get("positive_control")
        if control is not None and control not in ids:
            raise UserError(f"{where}: its positive control {control!r} is not one of the claims")
    report = _mapping(grid.raw.get("report") or {}, f"{grid.path}: report")
    _known(report, REPORT_KEYS, f"{grid.path}: report")
    for key in ("hero", "shown"):
        where = f"{grid.path}: report.{key}"
        _arms_exist(_strings(report.get(key) or [], where), arms, where)


def _arms_exist(names: Iterable[Any], arms: set[str], where: str) -> None:
    for name in names:
        if name not in arms:
            raise UserError(f"{where}: there is no arm {name!r} (arms: {', '.join(sorted(arms))})")


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key written twice, which would lose an arm without a word."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is written twice", key_node.start_mark
            )
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(
            f"{path} cannot be read ({reason}): give a grid such as those in configs/ablations"
        ) from error
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{path} is not valid YAML: {line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    # Dates and the like become text: the grid is stored with the runs as JSON.
    try:
        return json.loads(json.dumps(_mapping(raw, str(path)), default=str, allow_nan=False))
    except ValueError as error:
        raise UserError(f"{path} holds a number that is not finite (.inf or .nan)") from error


def _known(record: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in record:
        if key not in keys:
            raise UserError(f"{where}: unknown key {key!r} (known: {', '.join(keys)})")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} must be a mapping of names to values, not {type(value).__name__}")
    return value


def _strings(value: Any, where: str) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise UserError(f"{where} must be a name or a list of names, not {value!r}")
    return values


def _seeds(value: Any, where: str) -> tuple[int, ...]:
    good = isinstance(value, list) and value and all(type(v) is int and v >= 0 for v in value)
    if not good or len(set(value)) < len(value):
        raise UserError(f"{where} must be a list of different whole numbers from 0 on, not {value!r}")
    return tuple(value)


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise UserError(f"{where}: {value!r} is no name for a folder: use letters, digits, '-', '_' and '.'")
    return value
