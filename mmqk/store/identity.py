"""The identity of a run: a record of its fields, and the hash of that record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

HASH_DIGITS = 10


def canonical(obj: Any) -> str:
    """Return JSON with sorted keys and no spaces, so that equal values give equal text; tuples become lists.

    Raises:
        ValueError: a float is not finite.
        TypeError: a value is not plain data.
    """
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def identity_hash(record: Mapping[str, Any]) -> str:
    """Return the first 10 hex digits of the sha256 of the canonical record."""
    return hashlib.sha256(canonical(record).encode()).hexdigest()[:HASH_DIGITS]


def differing_fields(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the sorted dotted names of the fields in which two records differ, including fields that only one record
    has."""
    flat_a, flat_b = flatten(json.loads(canonical(a))), flatten(json.loads(canonical(b)))
    absent = object()
    return sorted(
        name
        for name in flat_a.keys() | flat_b.keys()
        if not _same(flat_a.get(name, absent), flat_b.get(name, absent))
    )


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names as keys. An empty mapping counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def _same(a: Any, b: Any) -> bool:
    # The values 1, 1.0 and True count as different, as they do in the hash.
    return type(a) is type(b) and a == b


def hash_fraction(content: bytes) -> float:
    """Return a number in [0, 1) that depends only on the content. It decides which samples are held out."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64
