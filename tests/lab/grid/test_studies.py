"""Test the grids of the studies of norm competition and of late failure: arms differ only in the intended fields, and
their numbers of targets match, counted in the data."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torchvision.transforms.functional import to_tensor

from mmqk.config import RunConfig
from mmqk.data.dial import Dial
from mmqk.data.shards.manifest import read_pairs
from mmqk.data.tokenizers.image import ImageTokenizer
from tests.lab.grid.resolved import ROOT, mean_caption, resolved, unequal


@pytest.fixture(scope="module")
def competition():
    return resolved("configs/claims/norm_competition.yaml", seed=1)


@pytest.fixture(scope="module")
def mechanisms():
    return resolved("configs/claims/norm_competition_mechanisms.yaml", seed=61)


@pytest.fixture(scope="module")
def real():
    return resolved("configs/claims/norm_competition_real.yaml", seed=41)


@pytest.fixture(scope="module")
def late():
    return resolved("configs/failures/late.yaml", seed=11)


def trained_targets(run: RunConfig) -> int:
    """Return the number of trained targets per step; each document fills a row, and its first token is not a
    target."""
    dial, weights = run.data.dial, run.loss.weights
    per_row = sum(n for m, n in dial.tokens.items() if weights.get(m, 1.0) > 0)
    return run.data.batch_size * per_row


def test_the_primary_contrasts_change_one_thing_each(competition):
    _, runs = competition
    for rate in ("low", "high", "edge"):
        mid = runs[f"mid-{rate}"]
        entropies = {"data.dial.entropy.text", "data.dial.entropy.image"}
        assert unequal(mid, runs[f"hi-{rate}"]) == entropies
        if rate == "edge":  # only the gap is tested there
            continue
        assert unequal(mid, runs[f"lag1-{rate}"]) == {"data.dial.lag.text", "data.dial.lag.image"}
        assert unequal(mid, runs[f"image_off-{rate}"]) == {"loss.weights.image", "data.batch_size"}
        assert trained_targets(mid) == trained_targets(runs[f"image_off-{rate}"])
    for rate in ("low", "high", "edge"):
        floors = {name: Dial(runs[f"{name}-{rate}"].data.dial).floors() for name in ("mid", "hi")}
        assert floors["mid"]["image"] == pytest.approx(floors["mid"]["text"])
        assert floors["hi"]["image"] - floors["hi"]["text"] > 1.5
        assert sum(floors["hi"].values()) == pytest.approx(sum(floors["mid"].values()))
    # The controls: other arms differ in more fields, and an arm with the image loss off and the same batch size has a
    # different number of targets.
    assert unequal(runs["mid-low"], runs["hi-high"]) > entropies
    assert trained_targets(runs["mid-low"]) != trained_targets(runs["image_off_16-low"])


def test_each_mechanism_is_removed_from_the_same_run(mechanisms):
    _, runs = mechanisms
    for name in ("sink", "qk", "adamh", "embed_norm", "split", "untie_norms", "untie_qk", "untie_mlp", "batch"):
        changed = unequal(runs["hi"], runs[name]) - {"backend"}
        assert len(changed) == 1, (name, changed)
    assert trained_targets(runs["text_only"]) == trained_targets(runs["mid"])
    assert trained_targets(runs["batch"]) == 4 * trained_targets(runs["hi"])
    shares = runs["shares"].loss.weights
    assert shares["text"] * 1.5 == pytest.approx(shares["image"] * 3.5)
    assert sum(shares.values()) == pytest.approx(2)


# On the shipped pairs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def per_sequence():
    """Return the mean number of trained targets of a sequence, from the captions and the layout of a row alone.

    A text row has a target for each of its tokens except ``<bos>``. A pair has targets for its caption, three special
    tokens and an image of 64 codes; beside an image there is room for 60 tokens of a caption. A caption alone is
    followed by one special token.
    """
    beside, alone = mean_caption(60), mean_caption(126)
    return {"text": 0.75 * (beside + 3) + 0.25 * 127, "image": 0.75 * 64, "captions": 0.75 * (alone + 1) + 0.25 * 127}


def test_matched_targets_are_counted_in_the_data(real, per_sequence):
    _, runs = real
    text, image, captions = (per_sequence[name] for name in ("text", "image", "captions"))
    assert (text, image, captions) == pytest.approx((55.06, 48.0, 54.16), abs=0.01)  # as the grid states
    assert {run.data.seq_len for name, run in runs.items() if name != "text-only"} == {128}
    total = runs["plain"].data.batch_size * (text + image)
    only = runs["text-only"].data
    assert only.batch_size * (only.seq_len - 1) == pytest.approx(total, rel=0.02)
    assert runs["image-off"].data.batch_size * text == pytest.approx(total, rel=0.02)
    assert runs["images-removed"].data.batch_size * captions == pytest.approx(8 * text, rel=0.02)
    # The controls: 7 or 8 text rows of 128 tokens per batch, or 14 rows without the image loss, do not match.
    for wrong in (7 * 127, 8 * 127, 14 * text):
        assert wrong != pytest.approx(total, rel=0.02)


def test_the_codebooks_differ_in_their_image_codes_alone(real):
    """The test computes the entropy of the codes from their counts in 200 images."""
    _, runs = real
    pairs = islice(read_pairs(ROOT / "data/emoji", "train"), 200)
    images_BCHW = torch.stack([to_tensor(pair.image) for pair in pairs])
    entropies, texts = [], set()
    for arm, size in (("codes-64", 64), ("plain", 512), ("codes-2048", 2048)):
        folder = ROOT / runs[arm].data.tokenizers
        texts.add((folder / "text.json").read_bytes())
        codes_BN = ImageTokenizer.load(folder).encode(images_BCHW)
        assert codes_BN.shape == (200, 64) and codes_BN.max() < size
        share = torch.bincount(codes_BN.flatten(), minlength=size) / codes_BN.numel()
        entropies.append(float(torch.special.entr(share).sum()))
    assert len(texts) == 1
    assert entropies[0] + 0.8 < entropies[1] < entropies[2] - 0.5


# Late failure -------------------------------------------------------------------------------------------------------


def test_targets_per_step_are_matched(late):
    """The targets are counted from the captions and the layout of a row, as above."""
    _, runs = late
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


def test_the_rehearsal_trains_the_same_settings(late):
    """The rehearsal differs from the study only in the run length."""
    _, runs = late
    _, rehearsal = resolved("configs/failures/late_rehearsal.yaml", seed=11)
    assert unequal(runs["mixed"], rehearsal["mixed"]) == {"trainer.max_steps", "checkpoint.keep"}
    assert unequal(runs["mixed-qk"], rehearsal["mixed-qk"]) == {"trainer.max_steps"}
