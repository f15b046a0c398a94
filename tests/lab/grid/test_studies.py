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
from tests.lab.grid.resolved import ROOT, resolved, targets_of_a_row, unequal

MECHANISMS = "configs/claims/norm_competition_mechanisms.yaml"
REAL = "configs/claims/norm_competition_real.yaml"
LATE = "configs/failures/late.yaml"


def trained_targets(run: RunConfig) -> int:
    """Return the number of trained targets per step; each document fills a row, and its first token is not a
    target."""
    dial, weights = run.data.dial, run.loss.weights
    per_row = sum(n for m, n in dial.tokens.items() if weights.get(m, 1.0) > 0)
    return run.data.batch_size * per_row


def test_the_primary_contrasts_change_one_thing_each():
    _, runs = resolved("configs/claims/norm_competition.yaml", seed=1)
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


def test_each_mechanism_is_removed_from_the_same_run():
    _, runs = resolved(MECHANISMS, seed=61)
    for name in ("sink", "qk", "adamh", "embed_norm", "split", "untie_norms", "untie_qk", "untie_mlp", "batch"):
        changed = unequal(runs["hi"], runs[name]) - {"backend"}
        assert len(changed) == 1, (name, changed)
    assert trained_targets(runs["text_only"]) == trained_targets(runs["mid"])
    assert trained_targets(runs["batch"]) == 4 * trained_targets(runs["hi"])
    shares = runs["shares"].loss.weights
    assert shares["text"] * 1.5 == pytest.approx(shares["image"] * 3.5)
    assert sum(shares.values()) == pytest.approx(2)


# On the shipped pairs ------------------------------------------------------------------------------------------------


def test_matched_targets_are_counted_in_the_data():
    _, runs = resolved(REAL, seed=41)
    text, image, captions = targets_of_a_row(128).values()
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


def test_the_codebooks_differ_in_their_image_codes_alone():
    """The test computes the entropy of the codes from their counts in 200 images."""
    _, runs = resolved(REAL, seed=41)
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


def test_targets_per_step_are_matched():
    """The targets are counted from the captions and the layout of a row, as above."""
    _, runs = resolved(LATE, seed=11)
    mixed = runs["mixed"].data
    of_text, of_image, _ = targets_of_a_row(mixed.seq_len).values()
    total = mixed.batch_size * (of_text + of_image)
    assert total == pytest.approx(537.3, abs=1)  # as the grid states
    removed, only = runs["images-removed"].data, runs["text-only"].data
    counts = {
        "image-off": runs["image-off"].data.batch_size * of_text,
        "text-only": only.batch_size * (only.seq_len - 1),
        "images-removed": removed.batch_size * targets_of_a_row(removed.seq_len)["captions"],
    }
    for arm, count in counts.items():
        assert count == pytest.approx(total, rel=0.01), arm
    # The control: with the batch size of the mixed arm, the number of targets would differ by more than 10 %.
    assert mixed.batch_size * of_text != pytest.approx(total, rel=0.1)


def test_the_rehearsal_trains_the_same_settings():
    """The rehearsal differs from the study only in the run length."""
    _, runs = resolved(LATE, seed=11)
    _, rehearsal = resolved("configs/failures/late_rehearsal.yaml", seed=11)
    assert unequal(runs["mixed"], rehearsal["mixed"]) == {"trainer.max_steps", "checkpoint.keep"}
    assert unequal(runs["mixed-qk"], rehearsal["mixed-qk"]) == {"trainer.max_steps"}
