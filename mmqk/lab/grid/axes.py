"""Axes of a grid: fields, or named groups of fields, whose values are crossed with each arm."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmqk.lab.grid import language as read
from mmqk.store import UserError

# YAML reads 1e-3 as text, because it has no decimal point. On an axis, such text is converted to a number.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass(frozen=True)
class Axis:
    """An axis of the grid. Each value is a suffix for the name of the arm, and the fields to set."""

    name: str
    values: tuple[tuple[str, Mapping[str, Any]], ...]


def read_axes(value: Any, where: str) -> tuple[Axis, ...]:
    """Return the axes of a grid or an arm.

    ``optim.lr: [0.01, 0.03]`` sets one field and adds ``lr0.01`` to the name.
    ``size: {small: {model.width: 64, …}, …}`` sets several fields and adds ``small``.

    Raises:
        UserError: values that are not a list, a repeated value, or a field on two axes.
    """
    record = read.mapping(value, where)
    short = [name.rpartition(".")[2] for name in record]
    axes = [
        _groups(name, values, f"{where}.{name}")
        if isinstance(values, dict)
        else _field(name, last if short.count(last) == 1 else name, values, f"{where}.{name}")
        for (name, values), last in zip(record.items(), short, strict=True)
    ]
    seen: set[str] = set()
    for axis in axes:
        fields = {field for _, value in axis.values for field in value}
        if both := sorted(fields & seen):
            raise UserError(f"{where}: {both[0]} is on two axes: remove it from one")
        seen |= fields
    return tuple(axes)


def _field(name: str, short: str, values: Any, where: str) -> Axis:
    if not isinstance(values, list) or not values:
        raise UserError(f"{where} must be a list of values, or named groups of fields, not {values!r}")
    values = [float(v) if isinstance(v, str) and _EXPONENT.fullmatch(v) else v for v in values]
    return Axis(name, _distinct([(f"{short}{_text(v)}", {name: v}) for v in values], where))


def _groups(name: str, values: dict[str, Any], where: str) -> Axis:
    groups: list[tuple[str, Mapping[str, Any]]] = [
        (read.name(key, where), read.mapping(v, f"{where}.{key}")) for key, v in values.items()
    ]
    if not groups or any(group.keys() != groups[0][1].keys() or not group for _, group in groups):
        raise UserError(f"{where}: every group must set the same fields")
    return Axis(name, _distinct(groups, where))


def _distinct(
    values: list[tuple[str, Mapping[str, Any]]], where: str
) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    names = [name for name, _ in values]
    for name in names:
        read.name(name, where)
        if names.count(name) > 1:
            raise UserError(f"{where} has two values with the name {name}: remove one")
    return tuple(values)


def _text(value: Any) -> str:
    """Return a value as part of a folder name."""
    if isinstance(value, float):
        return f"{value:.12g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_-")
