"""Test the grids of late failure: the numbers of targets match, and the rehearsal trains the same settings."""

from __future__ import annotations

import pytest

from tests.lab.grid.resolved import mean_caption, resolved, unequal

STUDY = "configs/failures/late.yaml"


@pytest.fixture(scope="module")
def study():
    return resolved(STUDY, seed=11)


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


def test_the_rehearsal_trains_the_same_settings(study):
    """The rehearsal differs from the study only in the run length."""
    _, runs = study
    _, rehearsal = resolved("configs/failures/late_rehearsal.yaml", seed=11)
    assert unequal(runs["mixed"], rehearsal["mixed"]) == {"trainer.max_steps", "checkpoint.keep"}
    assert unequal(runs["mixed-qk"], rehearsal["mixed-qk"]) == {"trainer.max_steps"}
