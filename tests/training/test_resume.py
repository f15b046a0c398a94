"""A run that is resumed from any checkpoint equals the run without an interruption."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from mmqk.store import read_metrics
from mmqk.train import main
from mmqk.training.module import TrainingModule

WALL_CLOCK = {"tokens_per_s"}


def series(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in WALL_CLOCK} for line in read_metrics(folder / "metrics.jsonl")]


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Return the final weights and buffers, and the optimizer's moments by the position of their parameter."""
    saved = torch.load(folder / "checkpoints/step00000012.ckpt", weights_only=True)
    moments = saved["optimizer_states"][0]["state"]
    named = {f"{i}.{name}": torch.as_tensor(v) for i, own in moments.items() for name, v in own.items()}
    return {**saved["state_dict"], **named}


def rewind(whole: Path, out: Path, step: int, status: str = "running") -> list[str]:
    """Copy a run to ``out`` as if its process had been killed some steps after the checkpoint of ``step``, and return
    its arguments. The lines that it wrote after the checkpoint remain."""
    shutil.copytree(whole, out)
    for path in (out / "checkpoints").glob("*.ckpt"):
        if int(path.stem.removeprefix("step")) > step:
            path.unlink()
    (out / "status.json").write_text(json.dumps({"status": status, "step": 0, "reason": ""}))
    for path in out.rglob("events.out.tfevents.*"):  # TensorBoard orders them by the time in the name
        path.rename(path.with_name(re.sub(r"tfevents\.\d+", "tfevents.1000000000", path.name)))
    return json.loads((whole / "run.json").read_text())["details"]["command"][3:-1]


RUNS = {
    "one batch": [],
    "four micro-batches": ["--trainer.accumulate_grad_batches=4"],
    "packed documents": ["--data.pack=documents", "--data.seq_len=256"],
    "the dial": ['--data.mix={"dial": 1}', "--data.seq_len=96", "--trainer.accumulate_grad_batches=2"],
    "qk-clip and split moments": ["--optim.qk_clip=0.1", "--optim.split_second_moment=true", "--loss.z_loss=1e-3",
                                  "--trainer.accumulate_grad_batches=2", "--model.attn_dropout=0.1"],
    "sigma reparam": ["--model.weight_reparam=sigma", "--optim.decay_gains=true", "--model.attn_dropout=0.1"],
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def whole(request, tiny_args, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    args = [*tiny_args, "--model.residual_dropout=0.1", "--checkpoint.keep=9", "--data.val_every_n_steps=4",
            "--monitor.probe_sequences=1", *request.param]  # fmt: skip
    assert main([*args, f"--out={out}"]) == 0
    return out


@pytest.mark.parametrize("step", [0, 4, 8, 12])
def test_resume_from_any_checkpoint_is_the_straight_run(whole, tmp_path, step):
    """At steps 4, 8 and 12 a probe, a validation and a checkpoint coincide; at step 12 only the final status is
    missing."""
    args = rewind(whole, tmp_path / "again", step)
    assert main([*args, f"--out={tmp_path / 'again'}"]) == 0
    assert series(tmp_path / "again") == series(whole)
    assert [line["step"] for line in series(whole) if "val_loss/text" in line] == [4, 8, 12]
    ours, theirs = state(tmp_path / "again"), state(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert json.loads((tmp_path / "again/status.json").read_text())["status"] == "completed"


@pytest.fixture
def read(monkeypatch) -> list[torch.Tensor]:
    """Return a list to which every training step appends its token ids."""
    ids, training_step = [], TrainingModule.training_step

    def reading(self, batch, index):
        ids.append(batch.ids_BT.clone())
        return training_step(self, batch, index)

    monkeypatch.setattr(TrainingModule, "training_step", reading)
    return ids


def same_run(ours: Path, theirs: Path) -> bool:
    one, two = state(ours), state(theirs)
    same_keys = one.keys() == two.keys()
    return same_keys and all(torch.equal(one[k], two[k]) for k in one) and series(ours) == series(theirs)


def test_a_checkpoint_exactly_at_the_end_of_an_epoch(tiny_args, tmp_path, read):
    """An epoch has 40 pairs, which are 4 batches of 10, so two checkpoints are between two epochs."""
    args = [*tiny_args, '--data.mix={"pair": 1}', "--data.image_first_prob=0", "--data.batch_size=10",
            "--checkpoint.keep=9"]  # fmt: skip
    assert main([*args, f"--out={tmp_path / 'whole'}"]) == 0
    straight = [batch.tolist() for batch in read]
    epochs = [sorted(row for batch in straight[first : first + 4] for row in batch) for first in (0, 4, 8)]
    assert epochs[0] == epochs[1] == epochs[2] and straight[:4] != straight[4:8] != straight[8:]
    for step in (4, 8):
        read.clear()
        rewind(tmp_path / "whole", tmp_path / str(step), step)
        assert main([*args, f"--out={tmp_path / str(step)}"]) == 0
        assert [batch.tolist() for batch in read] == straight[step:]
        assert same_run(tmp_path / str(step), tmp_path / "whole")


def test_two_kills_within_one_epoch(tiny_args, tmp_path, read):
    """An epoch has 20 batches of 2 pairs. The resumed run is killed too."""
    args = [*tiny_args, '--data.mix={"pair": 1}', "--data.batch_size=2", "--model.residual_dropout=0.1",
            "--checkpoint.keep=9"]  # fmt: skip
    assert main([*args, f"--out={tmp_path / 'whole'}"]) == 0
    straight = [batch.tolist() for batch in read]
    for before, step in (("whole", 4), ("killed at 4", 8)):
        read.clear()
        rewind(tmp_path / before, tmp_path / f"killed at {step}", step)
        assert main([*args, f"--out={tmp_path / f'killed at {step}'}"]) == 0
        assert [batch.tolist() for batch in read] == straight[step:]
        assert same_run(tmp_path / f"killed at {step}", tmp_path / "whole")
    # The control: another seed is another run.
    assert main([*args, "--seed=1", f"--out={tmp_path / 'other'}"]) == 0
    assert not same_run(tmp_path / "other", tmp_path / "whole")


def test_what_a_run_switches_on_is_at_work_when_it_is_resumed(whole):
    """The control of the comparison above: the state that it compares changes during the run."""
    names, settings = state(whole), json.loads((whole / "run.json").read_text())["identity"]
    if settings["model"]["weight_reparam"] == "sigma":
        from mmqk.config import resolve

        run = resolve(json.loads((whole / "run.json").read_text())["details"]["command"][3:])
        first = TrainingModule(run.model, run.loss, run.optim, run.seed, run.backend).state_dict()
        moved = [float((first[k] - names[k]).abs().max()) for k in first if k.endswith((".u", ".v"))]
        assert len(moved) == 2 * 7 * 2 and min(moved) > 1e-4
    clipped = [line["qk_clip_gamma/layer00"] for line in series(whole) if "qk_clip_gamma/layer00" in line]
    if settings["optim"]["qk_clip"] is None:
        assert clipped == []
    else:
        assert len(clipped) == 12 and min(clipped[8:]) < 1
        assert names["0.exp_avg_sq"].ndim == 3  # moments by modality


def test_one_line_a_step_in_order(whole):
    lines = [json.loads(line)["step"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(13))


def test_resumed_checkpoint_is_not_overwritten_in_the_middle_of_a_step(whole, tmp_path):
    args = rewind(whole, tmp_path / "again", 8)
    before = (tmp_path / "again/checkpoints/step00000008.ckpt").read_bytes()
    assert main([*args, f"--out={tmp_path / 'again'}"]) == 0
    assert (tmp_path / "again/checkpoints/step00000008.ckpt").read_bytes() == before


@pytest.mark.parametrize("step", [0, 4])  # 0: killed before its first checkpoint
def test_tensorboard_draws_no_step_twice(whole, tmp_path, step):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = rewind(whole, tmp_path / "again", step)
    assert main([*args, f"--out={tmp_path / 'again'}"]) == 0
    found = EventAccumulator(str(tmp_path / "again"), size_guidance={"scalars": 0}).Reload()
    for tag in ("loss", "loss/text", "loss/image"):
        assert [event.step for event in found.Scalars(tag)] == list(range(1, 13))


def test_a_run_killed_after_its_last_checkpoint_has_a_row_in_hparams(whole, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = rewind(whole, tmp_path / "again", 12)
    for path in (tmp_path / "again").rglob("events.out.tfevents.*"):
        path.unlink()
    assert main([*args, f"--out={tmp_path / 'again'}"]) == 0
    found = EventAccumulator(str(tmp_path / "again")).Reload()
    assert "_hparams_/session_end_info" in found.summary_metadata
