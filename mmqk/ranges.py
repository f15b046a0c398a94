"""Checks fields of a configuration: a number declares its range, a choice is a `Literal`.

    @dataclass(frozen=True)
    class OptimConfig:
        lr: float = number(1e-3, SMALLEST, LARGEST)
        schedule: Literal["constant", "cosine"] = "cosine"

        def __post_init__(self) -> None:
            check_fields(self, "optim")

This module needs only the standard library, so every package may import it. A range is metadata of its field and is
not part of a run's identity.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

# About the smallest and largest normal numbers of fp32, for a field without a narrower range.
SMALLEST, LARGEST = 1e-37, 1e38
BELOW_ONE = 1 - 1e-7
MOST_STEPS = 10**9
MOST_SEED = 2**32 - 1
# Below this, the rounding of fp32 weights would remove most of a perturbation.
SMALLEST_PERTURBATION = 1e-7
_KEY = "range"
# YAML 1.1 also reads 0x10 (16), 010 (8), 0b1 (1) and 1:30 (90) as numbers. mmqk reads these forms, and integers of 19
# digits or more, as text.
_NOT_DECIMAL = {
    "tag:yaml.org,2002:int": r"(?![-+]?0[0-9a-zA-Z_]|[^:]*:|[-+]?[0-9_]{19})",
    "tag:yaml.org,2002:float": r"(?![^:]*:)",
}


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, both included; only whole numbers if both are ``int``.

    Attributes:
        zero: whether 0 is allowed even if it is outside the range. For most fields 0 turns something off.
    """

    low: float
    high: float
    zero: bool = False

    def check(self, name: str, value: Any, note: str = "") -> None:
        """Check that a value is in the range.

        Raises:
            ValueError: the value is not in the range. The message names the field, the value and the range.
        """
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        right = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        if right and (self.low <= value <= self.high or (self.zero and value == 0)):
            return
        kind = "whole number" if whole else "number"
        raise ValueError(
            f"{name} is {shortened(value)}: it must be a {kind} from {_said(self.low)} to {_said(self.high)}"
            f"{', or 0' if self.zero else ''}{note}."
        )


def number(default: Any, low: float, high: float, *, zero: bool = False) -> Any:
    """Return a field with a range, which applies to every element of a mapping or list. ``default`` may be a
    factory."""
    metadata = ranged(low, high, zero=zero)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def ranged(low: float, high: float, *, zero: bool = False) -> dict[str, Range]:
    """Return the metadata of a range, for a field without a default."""
    return {_KEY: Range(low, high, zero)}


def range_of(declared: Field[Any]) -> Range | None:
    """Return the range that a field declares."""
    return declared.metadata.get(_KEY)


def check_fields(config: Any, path: str, between: str = ".") -> None:
    """Check every field of a dataclass that declares a range or a `Literal`.

    The range does not apply to a default that is null, NaN or text, because such a default is not a number.

    Args:
        config: the dataclass.
        path: dotted name of the dataclass, for the message; empty for none.
        between: the separator of path and field name.

    Raises:
        ValueError: a number is outside its range, or a value is not a choice of its field.
    """
    prefix = f"{path}{between}" if path else ""
    for name, (choices, only) in _choices_of(type(config)).items():  # type: ignore[arg-type]
        value = getattr(config, name)
        if value not in choices and (only or isinstance(value, str)):
            raise ValueError(f"{prefix}{name} must be one of {', '.join(choices)}, but is {value!r}.")
    for declared in fields(config):
        wanted, value = range_of(declared), getattr(config, declared.name)
        if wanted is None or value is None or (isinstance(value, str) and isinstance(declared.default, str)):
            continue
        if value is declared.default and isinstance(value, float) and math.isnan(value):
            continue
        note = ", or null" if declared.default is None else ""
        for name, each in _each(f"{prefix}{declared.name}", value):
            wanted.check(name, each, note)


@lru_cache
def _choices_of(kind: type) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return, for each field whose type is a `Literal` or a union that contains one, its choices, and whether it
    accepts no other values."""
    choices = {}
    for name, hint in get_type_hints(kind).items():
        for part in (hint, *get_args(hint)):
            if get_origin(part) is Literal:
                choices[name] = get_args(part), part is hint
    return choices


def _each(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield f"{name}.{key}", each
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield f"{name}[{i}]", each
    else:
        yield name, value


def _said(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:.12g}"


def shortened(value: Any) -> str:
    """Return a value as text of at most 60 characters. A whole number of more than 24 digits is not printed, because
    Python refuses to print one with thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**24:
        return f"a number of more than 24 digits ({'-' if value < 0 else ''}…)"
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:56]} …"


def decimal_numbers(loader: Any) -> Any:
    """Return a PyYAML loader class that reads only decimal numbers as numbers, and other forms as text."""

    resolvers = {
        first: [
            (tag, re.compile(f"{_NOT_DECIMAL.get(tag, '')}(?:{pattern.pattern})", pattern.flags))
            for tag, pattern in known
        ]
        for first, known in loader.yaml_implicit_resolvers.items()
    }
    return type(loader.__name__, (loader,), {"yaml_implicit_resolvers": resolvers})
