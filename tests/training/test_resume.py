"""A run that is resumed from any checkpoint equals the run without an interruption."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from mmqk.checkpoint import load_model
from mmqk.config import resolve
from mmqk.train import main
from mmqk.training.module import TrainingModule
from tests.training.batches import recorded
from tests.training.runs import checkpoint, command, rewind, same_run, series, state, status

RUNS = {
    "one batch": [],
    "packed documents, adamh": ["--data.pack=documents", "--data.seq_len=256", "--optim.matrices=adamh",
                                "--trainer.accumulate_grad_batches=4"],
    "the dial, muon": ['--data.mix={"dial": 1}', "--data.seq_len=96", "--trainer.accumulate_grad_batches=2",
                       "--optim.matrices=muon", "--optim.skip_step=6", "--optim.adagc=1.05",
                       "--optim.msign_every=3"],
    "qk-clip and split moments": ["--optim.qk_clip=0.1", "--optim.split_second_moment=true", "--loss.z_loss=1e-3",
                                  "--trainer.accumulate_grad_batches=2", "--model.attn_dropout=0.1"],
    "shards, two workers": ["--data.read=shards", "--data.workers=2", "--trainer.accumulate_grad_batches=2"],
    "sigma reparam": ["--model.weight_reparam=sigma", "--optim.decay_gains=true", "--model.attn_dropout=0.1"],
}  # fmt: skip


@pytest.fixture(scope="module")
def straight(tiny_args, tmp_path_factory):
    """Return a function that trains a run of `RUNS` without an interruption, once."""
    folder = tmp_path_factory.mktemp("straight")

    def trained(name: str) -> Path:
        out = folder / name.replace(" ", "_")
        args = [*tiny_args, "--model.residual_dropout=0.1", "--checkpoint.keep=9", "--data.val_every_n_steps=4",
                "--monitor.probe_sequences=1", *RUNS[name]]  # fmt: skip
        assert out.exists() or main([*args, f"--out={out}"]) == 0
        return out

    return trained


@pytest.mark.parametrize(("name", "step"), [("one batch", 0), *((name, 4) for name in RUNS), ("one batch", 12)])
def test_resume_from_any_checkpoint_is_the_straight_run(straight, tmp_path, name, step):
    """At steps 4 and 12 a probe, a validation and a checkpoint coincide; a run killed at step 0 has no checkpoint,
    and at step 12 only the final status is missing."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, whole = tmp_path / "again", straight(name)
    args = rewind(whole, out, step)
    before = checkpoint(out, step).read_bytes() if step else b""
    assert main([*args, f"--out={out}"]) == 0
    assert same_run(out, whole) and status(out)["status"] == "completed"
    assert [line["step"] for line in series(whole) if "val_loss/text" in line] == [4, 8, 12]
    lines = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(13))  # one line a step, in order
    assert not step or checkpoint(out, step).read_bytes() == before  # not written again in the middle of a step
    losses = [line["loss"] for line in series(whole, after=0)]
    assert all(a != b for a, b in pairwise(losses))
    if step == 12:
        return
    found = EventAccumulator(str(out), size_guidance={"scalars": 0}).Reload()
    for tag in ("loss", "loss/text", "loss/image"):  # TensorBoard draws no step twice
        assert [event.step for event in found.Scalars(tag)] == list(range(1, 13))


def test_what_a_run_switches_on_is_at_work_when_it_is_resumed(straight):
    """The control of the comparison above: the state that it compares changes during the run."""
    sigma = straight("sigma reparam")
    run, last = resolve(command(sigma)), state(sigma)
    first = TrainingModule(run.model, run.loss, run.optim, run.seed, run.backend).state_dict()
    moved = [float((first[k] - last[k]).abs().max()) for k in first if k.endswith((".u", ".v"))]
    assert len(moved) == 2 * 7 * 2 and min(moved) > 1e-4
    loaded = load_model(sigma)
    assert loaded.config == run.model and not loaded.training
    assert all(torch.equal(value, last[f"model.{name}"]) for name, value in loaded.state_dict().items())
    split = straight("qk-clip and split moments")
    clipped = [line["qk_clip_gamma/layer00"] for line in series(split, after=0)]
    assert len(clipped) == 12 and min(clipped[8:]) < 1
    assert state(split)["0.exp_avg_sq"].ndim == 3  # moments by modality
    assert any(name.endswith("momentum_buffer") for name in state(straight("the dial, muon")))


def test_two_kills_and_a_checkpoint_exactly_at_the_end_of_an_epoch(tiny_args, tmp_path, monkeypatch, whole):
    """An epoch has 40 pairs, which are 4 batches of 10, so two checkpoints are between two epochs. The resumed run is
    killed too. The control: it differs from another run."""
    args = [*tiny_args, '--data.mix={"pair": 1}', "--data.image_first_prob=0", "--data.batch_size=10",
            "--checkpoint.keep=9"]  # fmt: skip
    straight = recorded(monkeypatch, args, tmp_path / "whole")
    epochs = [[row for step in range(first, first + 4) for row in straight[step]] for first in (1, 5, 9)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2]) and epochs[0] != epochs[1] != epochs[2]
    for before, step in (("whole", 4), ("killed at 4", 8)):
        out = tmp_path / f"killed at {step}"
        rewind(tmp_path / before, out, step)
        read = recorded(monkeypatch, args, out)
        assert read == {number: rows for number, rows in straight.items() if number > step}
        assert same_run(out, tmp_path / "whole") and not same_run(out, whole)
