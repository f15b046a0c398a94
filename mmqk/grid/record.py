"""Read ablation.json, which stores a grid, the registration of its claims, and a list of its runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mmqk.store import DamagedFile, read_json

ABLATION_NAME = "ablation.json"
ADVICE = "restore it from a copy, as it holds the registration of the claims"

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
    "ranking": _WORDS, "specification": _WORDS, "outcomes": (None, bool, str, [str]),
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
    record = read_json(path, SHAPE, ADVICE)
    if record is None:
        return None
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
