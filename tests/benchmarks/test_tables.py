"""The tables at a tiny size: all peers train the same model, and chunks take less memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks import loss, sizes
from benchmarks.__main__ import measured, units_of
from benchmarks.apart import Apart
from benchmarks.harness import MEASURED, Context, Unit
from benchmarks.others import bare_loop, litgpt_loop, to_litgpt, transformers_loop
from benchmarks.setups import QK_NORM, SIZES, full, parameters_of, toy
from mmqk.model import EarlyFusionTransformer

pytestmark = pytest.mark.slow


@pytest.fixture
def context(tiny_args) -> Context:
    return Context(rounds=1, repeat=1, threads=1, toy=tiny_args)


def rows_of(unit: Unit, context: Context) -> list[dict]:
    return measured(unit, context, "command")["rows"]


def test_loss(context):
    unit = Unit("loss", "tiny", 1, partial(loss._measure, size=loss.Size(256, 16, 512, (32, 64))))
    dense, least, less = rows_of(unit, context)
    assert least["peak_bytes"] < less["peak_bytes"] < dense["peak_bytes"]


@pytest.mark.parametrize("path", ["peers/demonstration-rms", "peers/demonstration-chameleon"])
def test_peers_begin_with_the_same_loss(path, context):
    (unit,) = units_of(context, [path])
    losses = [row["first_loss"] for row in rows_of(unit, context) if row["status"] == MEASURED]
    assert len(losses) >= 3
    assert max(losses) - min(losses) < 1e-5 * max(losses)


def test_sizes(context, monkeypatch):
    monkeypatch.setattr(sizes, "TOY", ((128,), (2048,)))
    (unit,) = units_of(context, ["sizes"])
    dense, chunked = rows_of(unit, context)
    assert (dense["against"], chunked["against"]) == (None, dense["name"])
    assert chunked["first_loss"] == pytest.approx(dense["first_loss"], rel=1e-5)
    assert chunked["peak_bytes"] < dense["peak_bytes"]  # the purpose of chunks


@pytest.mark.parametrize("size", SIZES)
def test_full_sizes_are_what_they_are_called(size):
    said = float(size.removesuffix("M"))
    assert parameters_of(full(size)) == pytest.approx(said * 1e6, rel=0.005)
    assert parameters_of(full(size, vocabulary=65536)) > 1.02 * said * 1e6


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
