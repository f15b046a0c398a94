"""Resolve the runs of a shipped grid with `mmqk.config`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmqk.config import RunConfig, resolve
from mmqk.lab.grid import load_grid
from mmqk.lab.grid.grid import Grid
from mmqk.store import flatten

ROOT = Path(__file__).parents[3]


def resolved(path: str, seed: int) -> tuple[Grid, dict[str, RunConfig]]:
    """Return a grid of the repository, and the run of each of its arms with this seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        grid = load_grid(path)
        return grid, {job.arm: resolve(list(job.args)) for job in grid.jobs if job.seed == seed}


def unequal(a: RunConfig, b: RunConfig) -> set[str]:
    """Return the fields in which two whole configurations differ. If a mapping is empty in one of them, only the
    fields inside the mapping count."""
    flat_a, flat_b = flatten(a.nested()), flatten(b.nested())
    absent = object()
    return {
        name
        for name in flat_a.keys() | flat_b.keys()
        if flat_a.get(name, absent) != flat_b.get(name, absent)
        and {} not in (flat_a.get(name), flat_b.get(name))
    }
