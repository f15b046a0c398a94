"""`python -m benchmarks`: how it distributes units over slices, and which result of a unit counts."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import deal, seconds, slices_needed, units_of
from benchmarks.harness import Context
from benchmarks.record import keep, read

FULL = Context(device="cuda", full=True)


@pytest.mark.parametrize("n", [1, 3, 40])
def test_slices_hold_every_unit_once(n):
    units = units_of(FULL)
    parts = deal(units, n)
    assert len(parts) == n
    assert sorted(u.path for part in parts for u in part) == sorted(u.path for u in units)
    assert deal(units, n) == parts  # two machines distribute the units in the same way


def test_slices_fit_and_one_fewer_would_not():
    units = units_of(FULL)
    n = slices_needed(units)
    assert max(map(seconds, deal(units, n))) <= max(480, *(u.seconds for u in units))
    assert max(map(seconds, deal(units, n - 1))) > max(400, *(u.seconds for u in units))


def test_the_newest_of_a_unit_counts(tmp_path):
    def unit(started, device="d"):
        return {"table": "loss", "unit": "u", "started": started, "machine": {"device": device}}

    keep(tmp_path / "a/loss.json", unit("2026-01-02"))
    keep(tmp_path / "a/loss-1of2.json", unit("2026-01-03"))
    keep(tmp_path / "a/loss-2of2.json", unit("2026-01-01"))
    keep(tmp_path / "b/loss.json", unit("2025-01-01", device="e"))
    assert sorted(u["started"] for u in read([tmp_path])) == ["2025-01-01", "2026-01-03"]
    keep(tmp_path / "a/loss.json", unit("2026-01-04"))  # replaces the earlier result
    assert len(json.loads((tmp_path / "a/loss.json").read_text())) == 1
