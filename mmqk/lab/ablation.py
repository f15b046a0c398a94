"""Read ablation.json, the record of a grid beside its runs: the grid, its registered claims and its runs."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from mmqk.store import DamagedFile, read_json

ABLATION_NAME = "ablation.json"
ADVICE = "restore it from a copy, as it holds the registration of the claims"
# Keys that each run has in ablation.json. All other keys may be missing.
_RUN = {"arm": str, "seed": int, "folder": str}


def read_ablation(folder: Path) -> dict[str, Any] | None:
    """Return the content of ``ablation.json``; None if the folder has none.

    Raises:
        DamagedFile: the file cannot be read, has no grid or no list of runs, or lists a run outside ``folder``.
    """
    path = folder / ABLATION_NAME
    record = read_json(path, {"name": str, "registered": str | None, "grid": dict, "runs": list, "lr": list}, ADVICE)
    if record is None:
        return None
    for key in ("grid", "runs"):
        if key not in record:
            raise DamagedFile(path, f"it has no {key}", ADVICE)
    for place, run in enumerate(record["runs"]):
        if not isinstance(run, dict):
            raise DamagedFile(path, f"runs[{place}] is {run!r:.40}", ADVICE)
        for key, kind in _RUN.items():
            if not isinstance(run.get(key), kind):
                raise DamagedFile(path, f"runs[{place}].{key} is {run.get(key)!r:.40}", ADVICE)
        name = PurePosixPath(run["folder"])
        if name.is_absolute() or ".." in name.parts or not name.parts:
            raise DamagedFile(path, f"runs[{place}].folder is {str(name)!r:.60}, not inside {folder}", ADVICE)
    return record
