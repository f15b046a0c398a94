"""Read ablation.json, which stores a grid, the registration of its claims, and a list of its runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mmqk.store import DamagedFile, read_json

ABLATION_NAME = "ablation.json"
ADVICE = "restore it from a copy, as it holds the registration of the claims"

# The expected shape of a value: a type (`float` for any number), None for null, a tuple of alternative shapes,
# [shape] for a list, or a dict of shapes for an object. In a dict, "*" is the shape of all other keys.
Shape = Any
_TYPES = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "an object", list: "a list",
    None: "null",
}  # fmt: skip
_WORD = (bool, int, float, str)
_WORDS = (None, str, [str])
_RUN = {
    "arm": str, "seed": int, "folder": str, "id": str, "claims": str, "family": (None, str), "role": (None, str),
    "never": str, "point": (None, {"*": (*_WORD, None, list, dict)}),
    "fork": (None, {"parent": (None, str), "step": int}),
    "replay": (
        None,
        {"of": str, "depth": (None, float), "step": int, "numerics": str, "number": int},
    ),
}  # fmt: skip
_ARM = {
    "label": _WORD, "block": _WORD, "set": (None, dict), "seeds": [int],
    "fork": {"arm": str, "step": int, "checkpoint": str},
}  # fmt: skip
REPORT = {
    "hero": _WORDS, "shown": _WORDS, "headline": _WORDS, "cannot_tell": _WORDS, "command": _WORDS, "question": _WORDS,
    "ranking": _WORDS, "outcomes": (None, bool, str, [str]),
    "figures": (None, [{"kind": str, "arms": _WORDS, "like": (None, str)}]),
}  # fmt: skip
SHAPE = {
    "name": str,
    "registered": (None, str),
    "lost": bool,
    "grid": {
        "name": str, "title": _WORD, "arms": (None, {"*": (None, _ARM)}), "claims": (None, [dict]),
        "hypotheses": (None, [dict]),
        "report": (None, REPORT), "lr": (None, {"metric": str}), "added": [str],
    },
    "runs": [_RUN],
    "threads": int,
    "lr": [{"arm": str, "lr": float, "metric": str, "values": {"*": (None, float)}}],
}  # fmt: skip


def read_ablation(folder: Path) -> dict[str, Any] | None:
    """Return the content of ``ablation.json``; None if the folder has none.

    Raises:
        DamagedFile: the file cannot be read, or lists a run outside ``folder``. In a record without claims, the
            original run of replays may be outside.
    """
    path = folder / ABLATION_NAME
    record = read_json(path, advice=ADVICE)
    if record is None:
        return None
    if wrong := misfit(record, SHAPE):
        raise DamagedFile(path, wrong, ADVICE)
    for key in ("grid", "runs"):
        if key not in record:
            raise DamagedFile(path, f"it has no {key}", ADVICE)
    originals = {(entry.get("replay") or {}).get("of") for entry in record["runs"]}
    for place, entry in enumerate(record["runs"]):
        for key in ("arm", "seed", "folder"):
            if key not in entry:
                raise DamagedFile(path, f"runs[{place}] has no {key}", ADVICE)
        if (replay := entry.get("replay")) and (lacks := _lacking(replay)):
            raise DamagedFile(path, f"runs[{place}].replay has no {lacks}", ADVICE)
        name = entry["folder"]
        replayed = not record["grid"].get("claims") and name in originals
        if not _inside(name) and not replayed:
            raise DamagedFile(
                path, f"runs[{place}].folder is {name!r:.60}, which is not inside {folder}", ADVICE
            )
    return record


def _lacking(replay: dict[str, Any]) -> str:
    """Return the first missing key of a replay entry, or an empty string if no key is missing."""
    control = replay.get("numerics") == "control"
    needed = ("of", "numerics", "step") if control else ("of", "numerics", "step", "depth")
    return next((key for key in needed if replay.get(key) is None), "")


def _inside(name: str) -> bool:
    """Return whether a path is relative and stays inside its folder."""
    if not name or "\0" in name or os.path.isabs(name):
        return False
    normal = os.path.normpath(name)
    return normal != "." and normal.split("/")[0] != ".."


def misfit(value: Any, shape: Shape, where: str = "") -> str:
    """Return a description of the first part of a value that does not have the expected shape, with its key. Return
    an empty string if the whole value has the shape."""
    if isinstance(shape, tuple):
        misfits = [misfit(value, one, where) for one in shape]
        return "" if "" in misfits else misfits[-1]
    if isinstance(shape, dict | list):
        kind = type(shape)
        if not isinstance(value, kind):
            return _unlike(value, kind, where)
        pairs: Any = (
            value.items() if isinstance(value, dict) else ((f"[{i}]", v) for i, v in enumerate(value))
        )
        for name, inner in pairs:
            expected = shape[0] if isinstance(shape, list) else shape.get(name, shape.get("*", object))
            if expected is not object:
                dot = "." if where and isinstance(shape, dict) else ""
                if reason := misfit(inner, expected, f"{where}{dot}{name}"):
                    return reason
        return ""
    if shape is None:
        return "" if value is None else _unlike(value, None, where)
    if isinstance(value, bool):
        return "" if shape is bool else _unlike(value, shape, where)
    return "" if isinstance(value, int | float if shape is float else shape) else _unlike(value, shape, where)


def _unlike(value: Any, kind: Any, where: str) -> str:
    text = json.dumps(value)
    return f"{where[:80] or 'it'} is {text if len(text) <= 40 else text[:37] + '...'} and not {_TYPES[kind]}"
