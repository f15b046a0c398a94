"""`python -m benchmarks data --peers` on a few tars: the judge finds what a reader repeats and what it drops."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from benchmarks import readers, streams
from benchmarks.deliveries import _joined, deliver
from benchmarks.harness import ABSENT, MEASURED, Context
from benchmarks.streams import Tars, judge, same_shard, shards_in
from benchmarks.tables import SCENARIOS

TARS = Tars(tars=8, samples=6, batch=4)


class Careless(readers.Mmqk):
    """Delivers the first sample after a resume twice, in place of the second one."""

    def __init__(self, setup, states=()):
        super().__init__(setup, states)
        self.resumed = bool(states)

    def epoch(self):
        batches = super().epoch()
        for batch in islice(batches, self.resumed):
            yield [batch[0], batch[0], *batch[2:]]
        yield from batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    streams.write_kinds(folder, TARS)
    return folder


@pytest.fixture(autouse=True)
def _light(monkeypatch):
    monkeypatch.setattr("benchmarks.deliveries.PRELOAD", ["benchmarks.streams", "webdataset"])


def cells_of(name, folder):
    comparison = streams._scenarios(name, TARS, folder)
    assert isinstance(comparison, streams.Comparison), comparison
    assert set(comparison.cells) == set(SCENARIOS)
    return comparison.cells


def test_mmqk_continues_exactly(folder):
    cells = cells_of("mmqk", folder)
    resumes = ("resume", "second resume", "at epoch's end", "2 workers", "0 to 2 workers", "2 ranks to 1")
    assert {cells[name] for name in resumes} == {"0 / 0 / yes"}
    assert (cells["two epochs"], cells["new order"], cells["broken sample"]) == ("0 / 0", "yes", "skipped, named")


@pytest.mark.slow
def test_webdataset_begins_the_epoch_again(folder):
    cells = cells_of("webdataset", folder)
    assert cells["resume"] == "20 / 0 / no"  # the 20 samples before it, again
    assert cells["two epochs"] == "0 / 0"
    assert cells["broken sample"].startswith("error; with an option: skipped")


def test_a_reader_that_repeats_and_drops_is_caught(folder, monkeypatch):
    """The negative control, through the same processes."""
    comparison = streams.Comparison("mmqk", TARS, folder)
    whole = streams.run(comparison.task(save=(20,)))
    task = comparison.task(20, states=whole.states(20))
    for reader, verdict in ((readers.Mmqk, "0 / 0 / yes"), (Careless, "1 / 1 / no")):
        delivered = in_this_process(reader, task, monkeypatch)
        assert str(judge(whole.keys(until=20) + delivered, whole.keys())) == verdict


def in_this_process(reader, task, monkeypatch):
    monkeypatch.setitem(readers.READERS, "mmqk", (reader, ("mmqk",)))
    deliver(task)
    return [key for batch in _joined(Path(task.out), 1, 1)[0] for key in batch]


def test_judge():
    assert str(judge("abcd", "abcd")) == "0 / 0 / yes"
    assert str(judge("abdc", "abcd")) == "0 / 0 / no"
    assert str(judge("badc", "abcd", group=2)) == "0 / 0 / yes"  # the order within a global batch
    assert str(judge("aabd", "abcd")) == "1 / 1 / no"
    assert str(judge("abcdab", "abcd", None)) == "2 / 0"


def test_mixing():
    assert same_shard([["1x0", "1x1", "2x0"], ["2x1"]]) == 0.5
    assert shards_in(["1x0", "1x1", "2x0", "3x0"], samples=2) == 1.5


def test_a_missing_package_has_a_row(monkeypatch, folder):
    monkeypatch.setitem(readers.READERS, "other", (readers.Reader, ("a-package-that-nobody-installs",)))
    (row,) = streams.measure(Context(rows="^other$"), TARS)["rows"]
    assert row["status"] == ABSENT and "a-package-that-nobody-installs is not installed" in row["reason"]
    assert row["status"] != MEASURED
