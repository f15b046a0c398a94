"""Forks that leave out single sequences: their batches are the parent's order without exactly these sequences."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mmqk.config import resolve
from mmqk.data.order import sequence_numbers
from mmqk.store import UserError
from mmqk.train import main
from tests.tiny import data_of
from tests.training.batches import recorded
from tests.training.runs import LAST, checkpoint, command, rewind, same_run

STEP, SIZE = 8, 4
FIRST = STEP * SIZE


@pytest.fixture(scope="module")
def order(whole):
    return data_of(command(whole)).order


def without(order, left_out: set[int], start: int = FIRST, size: int = SIZE) -> dict[int, list[list[int]]]:
    """Return the batches of steps 9 to 12, from a plain walk along the order."""
    numbers = iter(n for n in range(start, start + 200) if n not in left_out)
    return {s: [order.row(next(numbers)).ids.tolist() for _ in range(size)] for s in range(STEP + 1, LAST + 1)}


def test_numbers_equal_a_walk_along_the_order():
    for seed in range(50):
        random = np.random.default_rng(seed)
        left_out = sorted(random.choice(60, int(random.integers(0, 30)), replace=False).tolist())
        walk = [n for n in range(200) if n not in left_out][:100]
        assert sequence_numbers(np.arange(100), left_out).tolist() == walk


@pytest.mark.parametrize(
    ("given", "left_out", "fields"),
    [
        ("33,34,41", {33, 34, 41}, ()),
        ("[32, 38-40]", {32, 38, 39, 40}, ("--trainer.accumulate_grad_batches=2",)),
        ("47,33", {33, 47}, ("--data.workers=1", "--fork_noise=1e-3", "--model.qk_norm.kind=rms")),
    ],
)
def test_a_fork_reads_the_order_without_them(whole, order, tmp_path, monkeypatch, given, left_out, fields):
    args = [f"--fork={checkpoint(whole, STEP)}", f"--fork_skip={given}", "--checkpoint.every_n_steps=2", *fields]
    batches = recorded(monkeypatch, args, tmp_path / "fork")
    assert batches == without(order, left_out)
    assert batches != without(order, {n + 1 for n in left_out})  # the control
    # After a resume too.
    rewind(tmp_path / "fork", tmp_path / "again", 10)
    again = recorded(monkeypatch, args, tmp_path / "again")
    assert again == {step: batches[step] for step in (11, 12)} and same_run(tmp_path / "again", tmp_path / "fork")


def test_with_batches_left_out_and_a_fork_of_the_fork(whole, order, tmp_path, monkeypatch):
    """The fork of a fork leaves out what its parent leaves out, and more; ``fork_skip_batches`` counts the others."""
    one = [f"--fork={checkpoint(whole, STEP)}", "--fork_skip=33,45", "--checkpoint.every_n_steps=2",
           "--fork_skip_batches=1"]  # fmt: skip
    assert recorded(monkeypatch, one, tmp_path / "one") == without(order, {32, 33, 34, 35, 36, 45})
    two = [f"--fork={checkpoint(tmp_path / 'one', 10)}", "--fork_skip=46", "--data.batch_size=2"]
    batches = recorded(monkeypatch, two, tmp_path / "two")
    assert json.loads((tmp_path / "two/fork.json").read_text())["skip"] == [46]
    # Steps 9 and 10 of the first fork read sequences 37 to 44.
    assert batches == {s: [order.row(n).ids.tolist() for n in ns] for s, ns in ((11, (47, 48)), (12, (49, 50)))}


def test_identity_and_refusals(whole, tmp_path):
    from_8 = f"--fork={checkpoint(whole, STEP)}"
    one, two, ranges, none = (
        resolve([from_8, *given]) for given in (["--fork_skip=40,41"], ["--fork_skip=41,40"], ["--fork_skip=40-41"], [])
    )
    assert one.id == two.id == ranges.id != none.id
    assert "skip" not in none.identity["fork"] and one.identity["fork"]["skip"] == [40, 41]
    for wrong in ("a", "5-3", "1,,x", "1-2000000"):
        with pytest.raises(UserError, match=r"fork_skip is .*: give sequence numbers"):
            resolve([from_8, f"--fork_skip={wrong}"])
    with pytest.raises(UserError, match="fork_skip belongs to a fork"):
        resolve([*command(whole), "--fork_skip=3"])
    with pytest.raises(UserError, match="names sequence 31, but at step 8 the next sequence is 32"):
        main([from_8, "--fork_skip=31,40", f"--out={tmp_path / 'read'}"])
