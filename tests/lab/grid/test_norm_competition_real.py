"""Test the grid on the shipped pairs: its trained targets, counted in the data, and its codebooks."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torchvision.transforms.functional import to_tensor

from mmqk.data.shards.manifest import read_pairs
from mmqk.data.tokenizers.image import ImageTokenizer
from tests.lab.grid.resolved import ROOT, mean_caption, resolved

STUDY = "configs/claims/norm_competition_real.yaml"


@pytest.fixture(scope="module")
def study():
    return resolved(STUDY, seed=41)


@pytest.fixture(scope="module")
def per_sequence():
    """Return the mean number of trained targets of a sequence, from the captions and the layout of a row alone.

    A text row has a target for each of its tokens except ``<bos>``. A pair has targets for its caption, three special
    tokens and an image of 64 codes; beside an image there is room for 60 tokens of a caption. A caption alone is
    followed by one special token.
    """
    beside, alone = mean_caption(60), mean_caption(126)
    return {"text": 0.75 * (beside + 3) + 0.25 * 127, "image": 0.75 * 64, "captions": 0.75 * (alone + 1) + 0.25 * 127}


def test_matched_targets_are_counted_in_the_data(study, per_sequence):
    _, runs = study
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


def test_the_codebooks_differ_in_their_image_codes_alone(study):
    """The test computes the entropy of the codes from their counts in 200 images."""
    _, runs = study
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
