"""Test the grids of late failure: what each arm changes, that the numbers of targets match, and that claims can be
decided."""

from __future__ import annotations

import pytest

from mmqk.config import resolve
from mmqk.lab.grid import load_grid
from tests.lab.grid.resolved import ROOT, decidable_claims, mean_caption, resolved, unequal

STUDY = "configs/failures/late.yaml"


@pytest.fixture(scope="module")
def study():
    return resolved(STUDY, seed=11)


def test_each_arm_changes_what_it_names(study):
    grid, runs = study
    forks = {arm.name: arm.fork for arm in grid.arms if arm.fork is not None}
    changed = {name: unequal(runs["mixed"], run) for name, run in runs.items() if name not in forks}
    assert changed == {
        "mixed": set(),
        "mixed-qk": {"model.qk_norm.kind", "checkpoint.keep"},
        "mixed-on": {"alarm.stop_diverged", "checkpoint.keep"},
        "image-off": {"loss.weights.image", "data.batch_size", "checkpoint.keep"},
        "text-only": {"data.mix.pair", "data.seq_len", "checkpoint.keep"},
        "text-qk": {"data.mix.pair", "data.seq_len", "model.qk_norm.kind", "checkpoint.keep"},
        "images-removed": {"data.pairing", "data.batch_size", "data.seq_len", "checkpoint.keep"},
        "softcap": {"model.attn_softcap", "backend", "checkpoint.keep"},
        "third": {"optim.lr", "checkpoint.keep"},
        "decay": {"optim.weight_decay", "checkpoint.keep"},
    }
    # The longer run continues where the run of text only ends, and its schedule does not depend on its length.
    longer = {job.args for job in grid.jobs if job.arm == "text-longer"}
    assert {name: (fork.arm, fork.step) for name, fork in forks.items()} == {
        "text-longer": ("text-only", 10000),
        "third-on": ("third", 7000),
    }
    assert [job.args for job in grid.jobs if job.arm == "third-on"] == [("--alarm.stop_diverged=false",)]
    assert runs["text-only"].trainer["max_steps"] == 10000
    assert longer == {("--trainer.max_steps=20000",)}
    settings = runs["mixed"]
    assert (settings.model.n_layers, settings.model.d_model) == (24, 48)
    assert (settings.optim.schedule, settings.optim.weight_decay, settings.optim.lr) == ("constant", 0.0, 0.01)


def test_targets_per_step_are_matched(study):
    """The targets are counted from the captions and the layout of a row alone, as in test_norm_competition_real."""
    _, runs = study
    mixed = runs["mixed"].data
    beside = mixed.seq_len - 128 + 60  # room for a caption beside an image of 64 codes and its special tokens
    of_text, of_image = 0.75 * (mean_caption(beside) + 3) + 0.25 * (mixed.seq_len - 1), 0.75 * 64
    total = mixed.batch_size * (of_text + of_image)
    assert total == pytest.approx(537.3, abs=1)  # as the grid states
    removed, only = runs["images-removed"].data, runs["text-only"].data
    captions_alone = 0.75 * (mean_caption(removed.seq_len - 2) + 1) + 0.25 * (removed.seq_len - 1)
    counts = {
        "image-off": runs["image-off"].data.batch_size * of_text,
        "text-only": only.batch_size * (only.seq_len - 1),
        "images-removed": removed.batch_size * captions_alone,
    }
    for arm, count in counts.items():
        assert count == pytest.approx(total, rel=0.01), arm
    # The control: with the batch size of the mixed arm, the number of targets would differ by more than 10 %.
    assert mixed.batch_size * of_text != pytest.approx(total, rel=0.1)


def test_claims_can_be_decided(study):
    grid, _ = study
    confirmatory = [claim for claim in decidable_claims(grid) if claim.status == "confirmatory"]
    assert [claim.alpha_family for claim in confirmatory] == ["late", *["second modality"] * 3]
    arms = [arm for arm in grid.arms if arm.name != "third-on"]  # no claim names it
    assert all(len(arm.seeds) == 6 == claim.seeds for arm in arms for claim in confirmatory)


def test_the_rehearsal_trains_the_same_settings(study):
    """The rehearsal differs from the study only in the run length."""
    _, runs = study
    _, rehearsal = resolved("configs/failures/late_rehearsal.yaml", seed=11)
    assert unequal(runs["mixed"], rehearsal["mixed"]) == {"trainer.max_steps", "checkpoint.keep"}
    assert unequal(runs["mixed-qk"], rehearsal["mixed-qk"]) == {"trainer.max_steps"}


def test_the_rescue_forks_the_mixed_runs_of_the_study(study, monkeypatch):
    _, runs = study
    monkeypatch.chdir(ROOT)
    grid = load_grid("configs/failures/late_rescue.yaml")
    parents = [job for job in grid.jobs if job.family.fork is None]
    arms = ("mixed", "mixed-bf16")
    assert [(job.arm, job.seed) for job in parents] == [(arm, seed) for seed in (11, 12) for arm in arms]
    fp32, bf16 = (unequal(resolve(list(job.args)), runs["mixed-on"]) for job in parents[:2])
    assert fp32 == {"checkpoint.keep", "data.val_every_n_steps"}
    assert bf16 == {"trainer.precision", "data.val_every_n_steps"}
    forks = {arm.name: arm.fork for arm in grid.arms if arm.fork is not None}
    steps = {name: fork.step for name, fork in forks.items()}
    assert all(fork.arm == "mixed" for fork in forks.values())
    changes = ("qk", "clip", "third", "decay", "noise")
    every = {f"{change}-{at}": at for change in changes for at in (3000, 5500, 7000)}
    assert steps == every | dict.fromkeys(("kick", "data", "moments", "bf16"), 7000)
    # A checkpoint exists at every one of these steps, and the parents keep all of them.
    settings = runs["mixed"]
    assert all(step % settings.checkpoint.every_n_steps == 0 for step in steps.values())
    assert settings.checkpoint.keep * settings.checkpoint.every_n_steps >= settings.trainer["max_steps"]
