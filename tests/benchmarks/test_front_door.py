"""`python -m benchmarks`: how it distributes units over slices, and what it stores, prints and refuses."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.__main__ import TABLES, deal, main, seconds, slices_needed, units_of
from benchmarks.harness import Context, Unit
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


def test_every_table_has_units_of_both_sizes():
    for context in (Context(), FULL):
        assert {u.table for u in units_of(context)} == set(TABLES)
        paths = [u.path for u in units_of(context)]
        assert len(set(paths)) == len(paths)


def test_one_file_a_table_and_slice(tmp_path, monkeypatch, capsys):
    def broken(context):
        raise RuntimeError("the setup does not work")

    def fine(context):
        row = {
            "name": "a", "status": "measured", "reason": "", "against": None, "note": "", "seconds": [0.5],
            "repeat": 1, "work": {"steps": 1}, "peak_bytes": None, "first_seconds": None, "first_loss": None,
        }  # fmt: skip
        return {"title": "fine", "facts": {}, "base": "a", "rows": [row]}

    made = [Unit("loss", "one", 9, fine), Unit("loss", "two", 8, broken), Unit("peers", "three", 7, fine)]
    monkeypatch.setattr("benchmarks.__main__.units_of", lambda context, asked: made)
    threads = torch.get_num_threads()
    try:
        out = ["--out", str(tmp_path), "--threads", str(threads)]
        main(out)
        assert sorted(p.name for p in (tmp_path / "cpu").iterdir()) == ["loss.json", "peers.json"]
        main(["--slice", "2/3", *out])
    finally:
        torch.set_num_threads(threads)
    assert "loss-2of3.json" in {p.name for p in (tmp_path / "cpu").iterdir()}
    found = json.loads((tmp_path / "cpu/loss.json").read_text())
    assert [u["unit"] for u in found] == ["one", "two"]
    assert found[1]["rows"][0]["reason"] == "RuntimeError: the setup does not work"
    assert str(tmp_path) not in found[0]["command"]
    capsys.readouterr()
    assert main(["--tables", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert page.count("### fine") == 2 and page.count("the setup does not work") == 1


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
