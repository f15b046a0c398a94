"""Without ``modality``, `attach` and `preflight` read the ids of image tokens from the model's config."""

from __future__ import annotations

import warnings

import pytest
import torch

from mmqk.monitors import attach, preflight
from tests.monitors.preflight.families import IMAGE, IMAGE_TOKEN, batch_of, model_of

pytest.importorskip("transformers")
PLACEHOLDER = {"image": range(IMAGE_TOKEN, IMAGE_TOKEN + 1)}


def llava_batch():
    ids = batch_of("llama")["input_ids"]
    ids[:, 1:5] = IMAGE_TOKEN
    return {"input_ids": ids, "pixel_values": torch.randn(len(ids), 3, 8, 8), "labels": ids}


CASES = {
    "qwen2.5-vl": (PLACEHOLDER, f"image is id {IMAGE_TOKEN}, video is id 1"),
    "llava": (PLACEHOLDER, f"image is id {IMAGE_TOKEN}"),
    "chameleon": ({"image": [*PLACEHOLDER.values(), IMAGE]}, f"image is id {IMAGE_TOKEN} and {len(IMAGE)} more"),
}


@pytest.mark.parametrize("family", CASES)
def test_the_ids_are_those_of_the_config(family, capsys):
    torch.manual_seed(0)
    model, batch = model_of(family), llava_batch() if family == "llava" else batch_of(family)
    given, words = CASES[family]
    watch = attach(model, every_n_steps=1, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a batch without videos is no mistake in the ids
        model(**batch)
        watch.step()
    assert f"modality from {type(model.config).__name__}: {words}" in capsys.readouterr().out
    found = {tag: x for tag, x in watch.probe(**batch).flat().items() if "video" not in tag}
    by_hand = attach(model, modality=given).probe(**batch).flat()
    shared = {tag: x for tag, x in by_hand.items() if "/layer" in tag}  # the output softmax has a block for videos
    of_both = {tag: found[tag] for tag in shared}
    assert "attn_mass/text-image/layer00" in shared and of_both == pytest.approx(shared, rel=1e-5, abs=1e-5)
    table = preflight(model, batch)
    assert table.findings[0].text.endswith(words)
    assert "no token of the batch" not in str(table)
    # Control: other ids give other numbers.
    other = attach(model, modality={"image": range(4, 8)}).probe(**batch).flat()
    assert other["q_norm/image/layer00"] != found["q_norm/image/layer00"]
