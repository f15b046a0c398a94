"""Every table at a tiny size: the JSON is complete, the Markdown has all rows, and all peers train the same model."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks import loss, sizes, together, variants
from benchmarks.__main__ import measured, units_of
from benchmarks.apart import Apart
from benchmarks.harness import MEASURED, Context, Unit
from benchmarks.others import bare_loop, litgpt_loop, to_litgpt, transformers_loop
from benchmarks.record import keep, read
from benchmarks.setups import QK_NORM, SIZES, full, parameters_of, toy
from benchmarks.tables import one
from mmqk.model import EarlyFusionTransformer

pytestmark = pytest.mark.slow

RECORD = {
    "table", "unit", "title", "full", "started", "took_seconds", "command", "commit", "machine", "versions", "facts",
    "base", "rows",
}  # fmt: skip
ROW = {
    "name", "status", "reason", "against", "note", "seconds", "repeat", "work", "peak_bytes", "first_seconds",
    "first_loss",
}  # fmt: skip


@pytest.fixture
def context(tiny_args) -> Context:
    return Context(rounds=1, repeat=1, threads=1, toy=tiny_args)


def check(unit: Unit, context: Context, tmp_path) -> dict:
    """Measure, store and read a unit. Check that each row has all its fields, and that the Markdown table has every
    row."""
    record = measured(unit, context, "command")
    keep(tmp_path / "cpu" / f"{unit.table}.json", record)
    (found,) = read([tmp_path])
    assert found == record and set(found) == RECORD
    page = one(found)
    for row in found["rows"]:
        assert set(row) == ROW
        assert f"| {row['name']} |" in page
        if row["status"] == MEASURED:
            assert len(row["seconds"]) == 1 and row["seconds"][0] > 0 and row["work"]
        else:
            assert row["reason"] and row["reason"] in page
    names = [row["name"] for row in found["rows"]]
    assert len(set(names)) == len(names) and found["base"] in [None, *names]
    return found


def test_monitors(context, tmp_path):
    unit, attached = units_of(context, ["monitors"])
    assert [row["status"] for row in check(attached, context, tmp_path / "attach")["rows"]] == [MEASURED] * 4
    rows = check(unit, context, tmp_path / "demonstration")["rows"]
    assert [row["status"] for row in rows] == [MEASURED] * 5
    # All rows train the same module in turn, so their first losses differ.
    assert len({row["first_loss"] for row in rows}) > 1


def test_loss(context, tmp_path):
    unit = Unit("loss", "tiny", 1, partial(loss._measure, size=loss.Size(256, 16, 512, (32, 64))))
    dense, least, less = check(unit, context, tmp_path)["rows"]
    assert least["peak_bytes"] < less["peak_bytes"] < dense["peak_bytes"]


@pytest.mark.parametrize("path", ["peers/demonstration-rms", "peers/demonstration-chameleon"])
def test_peers_begin_with_the_same_loss(path, context, tmp_path):
    (unit,) = units_of(context, [path])
    found = check(unit, context, tmp_path)
    losses = [row["first_loss"] for row in found["rows"] if row["status"] == MEASURED]
    assert len(losses) >= 3
    assert max(losses) - min(losses) < 1e-5 * max(losses)


def test_a_backend_that_cannot_says_so(context, tmp_path):
    (unit,) = units_of(context, ["variants/softcap"])
    found = {row["name"]: row for row in check(unit, context, tmp_path)["rows"]}
    assert found["math, cap"]["status"] == MEASURED
    assert found["flex, cap"]["status"] != MEASURED  # it needs CUDA


def test_sizes(context, tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "TOY", ((128,), (2048,)))
    (unit,) = units_of(context, ["sizes"])
    dense, chunked = check(unit, context, tmp_path)["rows"]
    assert (dense["against"], chunked["against"]) == (None, dense["name"])
    assert chunked["first_loss"] == pytest.approx(dense["first_loss"], rel=1e-5)
    assert chunked["peak_bytes"] < dense["peak_bytes"]  # the purpose of chunks


@pytest.mark.parametrize("size", SIZES)
def test_full_sizes_are_what_they_are_called(size):
    said = float(size.removesuffix("M"))
    assert parameters_of(full(size)) == pytest.approx(said * 1e6, rel=0.005)
    assert parameters_of(full(size, vocabulary=65536)) > 1.02 * said * 1e6


@pytest.mark.parametrize("name", variants.COMPARED)
def test_every_arm_is_a_run(name, context):
    """The parser accepts the flags of each arm, and every arm but the plain one changes the configuration."""
    arms = variants.COMPARED[name][1]
    long = "--data.seq_len=128"  # backend flex requires a multiple of 128
    plain = toy(context, long, *arms[variants.PLAIN]).identity
    for arm, flags in arms.items():
        run = toy(context, long, *flags)
        assert (run.identity == plain) == (arm == variants.PLAIN)


def test_processes_start_together(context, tmp_path):
    rows = together.rows_of(context, (1, 2), repeat=2, rounds=1)
    assert [row["status"] for row in rows] == [MEASURED, MEASURED], rows
    assert [row["work"]["steps"] for row in rows] == [2, 4]


def test_a_way_in_a_process_of_its_own(context):
    """In a separate process the loss is the same as in this process, and an error is reported."""
    run = toy(context, QK_NORM)
    here, there = bare_loop(run, "cpu"), Apart(partial(bare_loop, run, "cpu"), threads=1)
    here(1)
    assert there(1) > 0
    assert there.first_loss == here.first_loss
    with pytest.raises(RuntimeError, match="TypeError"):
        Apart(partial(int, "1", base="no base"), threads=1)(1)


def test_litgpt_has_the_weights(context):
    """The loss of litgpt and transformers equals mmqk's. The controls: another seed or a changed matrix gives another
    result."""
    pytest.importorskip("litgpt")
    run = toy(context, QK_NORM)
    ours, theirs, hugging = (
        make(run, "cpu", compiled)
        for make, compiled in ((bare_loop, False), (litgpt_loop, False), (transformers_loop, False))
    )
    for loop in (ours, theirs, hugging):
        loop(1)
    assert theirs.first_loss == pytest.approx(ours.first_loss, rel=1e-6)
    assert hugging.first_loss == pytest.approx(ours.first_loss, rel=1e-6)
    other = bare_loop(toy(context, QK_NORM, "--seed=1"), "cpu")
    other(1)
    assert abs(other.first_loss - ours.first_loss) > 1e-4
    ids_BT = torch.arange(8)[None]
    model = EarlyFusionTransformer(run.model)
    moved = EarlyFusionTransformer(run.model)
    with torch.no_grad():
        moved.blocks[0].attention.w_v.weight.mul_(1.5)
    plain, other_logits = to_litgpt(model, 8)(ids_BT), to_litgpt(moved, 8)(ids_BT)
    assert torch.allclose(plain, model(ids_BT), atol=1e-5)
    assert not torch.allclose(other_logits, model(ids_BT), atol=1e-5)
