"""Read and check the values of a grid file. An error message is one sentence that names the key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mmqk.model.ranges import MOST_SEED, decimal_numbers, shortened
from mmqk.store import UserError, read_utf8

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*(-[A-Za-z0-9_.]+)*")


class _Loader(decimal_numbers(yaml.SafeLoader)):  # type: ignore[misc]
    """YAML loader that refuses a duplicate key, which would silently drop an arm, and a key that is not text."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # These are the written keys. A merge key (``<<``) later adds others, which the written keys override.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            # YAML reads the keys ``on`` and ``yes`` as booleans and ``1`` as a number, so their names would silently
            # change.
            if key.tag != yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG:
                problem = f"the key {key.value} is not text in YAML: put it in quotes"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            if key.value in seen:
                problem = f"the key {key.value!r} is written twice"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file as plain data.

    Raises:
        UserError: the file cannot be read, is not a YAML mapping, or has a duplicate key or a number that is not
            finite.
    """
    text = read_utf8(path, "give a grid such as those in configs/ablations")
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{path} is not valid YAML: {line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    # Convert dates to text, because the grid is stored with the runs as JSON.
    try:
        return json.loads(json.dumps(mapping(raw, str(path)), default=str, allow_nan=False))
    except ValueError as error:
        raise UserError(f"{path} has a number that is not finite (.inf or .nan)") from error


def known(record: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    """Refuse a key that is not one of ``keys``."""
    for key in record:
        if key not in keys:
            raise UserError(f"{where}: unknown key {key!r} (known: {', '.join(keys)})")


def mapping(value: Any, where: str) -> dict[str, Any]:
    """Return the value, which must be a mapping."""
    if not isinstance(value, dict):
        raise UserError(f"{where} must be a mapping of names to values, not {type(value).__name__}")
    return value


def strings(value: Any, where: str) -> list[str]:
    """Return the value, which must be a name or a list of names, as a list."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise UserError(f"{where} must be a name or a list of names, not {value!r}")
    return values


def text(value: Any, where: str) -> str:
    """Return a word or a number as text."""
    if not isinstance(value, str | int | float):
        raise UserError(f"{where} must be text, not {value!r}")
    return str(value)


def flags(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields as arguments of a command line."""
    return tuple(
        f"--{k}={v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for k, v in fields.items()
    )


def build(kind: type[T], record: Mapping[str, Any], where: str) -> T:
    """Return a dataclass with the given fields, parsed as in ``mmqk.train``. A field that is null has its default.

    Raises:
        UserError: an unknown field, a wrong type, or a number outside its range.
    """
    # This import loads pydantic, which --help and the views of a folder do not need.
    from mmqk.config.parse import parse_fields

    try:
        return parse_fields(kind, {name: value for name, value in record.items() if value is not None})
    except (UserError, ValueError) as error:
        sentence = str(error).rstrip(".")
        raise UserError(f"{where}: {sentence[:1].lower()}{sentence[1:]}") from error


def seeds(value: Any, where: str) -> tuple[int, ...]:
    """Return the seeds, which must be different whole numbers from 0 to `MOST_SEED`."""
    good = isinstance(value, list) and value and all(type(v) is int and 0 <= v <= MOST_SEED for v in value)
    if not good or len(set(value)) < len(value):
        raise UserError(
            f"{where} must be a list of different whole numbers from 0 to {MOST_SEED}, not {shortened(value)}"
        )
    return tuple(value)


def name(value: Any, where: str) -> str:
    """Return the value, which must be a valid folder name."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise UserError(f"{where}: {value!r} is not a folder name: use letters, digits, '-', '_' and '.'")
    return value
