"""The measured caption gain is positive if the model uses the caption and 0 otherwise; images with the same caption
count as one sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from data.build.caption_gain import caption_gain, summary
from mmqk.data.sequences import SequenceBuilder
from mmqk.data.tokens.encode import open_source
from mmqk.data.tokens.folder import layout_of
from mmqk.model import ModelConfig


class Oracle(torch.nn.Module):
    """Predicts the codes of an image only after its own caption; after any caption if ``use_caption`` is False."""

    def __init__(self, rows, vocab_sizes, use_caption):
        super().__init__()
        self.caption_of = {tuple(row[-66:-2].tolist()): row[:-66].tolist() for row in rows}
        self.config, self.use_caption = ModelConfig(vocab_sizes=vocab_sizes), use_caption

    def forward(self, ids_BT, modality_BT):
        logits = torch.zeros(*ids_BT.shape, self.config.vocab_size)
        for b, row in enumerate(ids_BT.tolist()):
            end = row.index(4)
            codes, caption = tuple(row[end - 64 : end]), row[: end - 65]
            known = self.caption_of[codes][: len(caption)] == caption
            if known or not self.use_caption:
                logits[b, torch.arange(end - 65, end - 1), torch.tensor(codes)] = 3.0
        return logits


@pytest.mark.parametrize("use_caption", [True, False])
def test_gain_is_found_where_it_was_planted(tiny_data, use_caption):
    tokenizers = tiny_data / "tokenizers"
    pairs = open_source("pair", tiny_data / "pairs", tokenizers, tiny_data / "cache")["val"]
    builder = SequenceBuilder({"pair": pairs}, layout_of(tokenizers), seq_len=112)
    rows = [builder.pair(i, image_first=False).ids for i in range(len(pairs))]
    found = caption_gain(Oracle(rows, builder.layout.vocab_sizes, use_caption), builder)
    assert (found.images, found.captions) == (12, 12)
    if use_caption:
        assert found.interval[0] > 0 and found.gain == pytest.approx(found.shuffled - found.true)
    else:
        assert found.gain == pytest.approx(0.0, abs=1e-9)


def test_images_of_one_caption_are_one_sample():
    random = np.random.default_rng(0)
    true_C, shuffled_C = random.normal(4.0, 0.1, 9), random.normal(4.1, 0.1, 9)
    captions = [f"caption {c}" for c in range(9)]
    once = summary(torch.tensor(true_C), torch.tensor(shuffled_C), captions)
    reference = stats.ttest_1samp(shuffled_C - true_C, 0).confidence_interval(0.95)
    assert once.interval == pytest.approx((reference.low, reference.high))
    # Three images per caption, which scatter around the value of one image, give the same interval as one image.
    scatter_CN = np.tile([-0.3, 0.0, 0.3], (9, 1))
    order = random.permutation(27)
    thrice = summary(
        torch.tensor((true_C[:, None] + scatter_CN).ravel()[order]),
        torch.tensor((shuffled_C[:, None] - scatter_CN).ravel()[order]),
        [captions[i // 3] for i in order],
    )
    assert (thrice.images, thrice.captions) == (27, 9)
    assert thrice.interval == pytest.approx(once.interval)
    assert (thrice.true, thrice.gain) == pytest.approx((once.true, once.gain))
