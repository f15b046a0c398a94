"""The measure finds a gain that was planted, and none where there is none."""

from __future__ import annotations

import pytest
import torch

from mmqk.data.cache import open_cache
from mmqk.data.sequences import SequenceBuilder
from mmqk.store import UserError, front_door
from mmqk.tokenizers.caption_gain import caption_gain, main, partners
from mmqk.tokenizers.vocabulary import JointVocabulary


def test_partners_have_another_caption():
    captions = ["a", "a", "b", "c", "c", "c", "d"]
    found = partners(captions)
    assert all(captions[i] != captions[j] for i, j in enumerate(found))
    with pytest.raises(UserError):
        partners(["a", "a"])


class Oracle(torch.nn.Module):
    """Predicts each image code the better the more the words before it are those it was made for."""

    def __init__(self, rows, vocab, use_caption):
        super().__init__()
        self.caption_of = {tuple(row[-66:-2].tolist()): row[:-66].tolist() for row in rows}
        self.vocab, self.use_caption = vocab, use_caption

    def forward(self, ids_BT, modality_BT):
        logits = torch.zeros(*ids_BT.shape, self.vocab)
        for b, row in enumerate(ids_BT.tolist()):
            end = row.index(4)
            codes, caption = tuple(row[end - 64 : end]), row[: end - 65]
            known = self.caption_of[codes][: len(caption)] == caption
            if known or not self.use_caption:
                logits[b, torch.arange(end - 65, end - 1), torch.tensor(codes)] = 3.0
        return logits


@pytest.mark.parametrize("use_caption", [True, False])
def test_gain_is_found_where_it_was_planted(tiny_data, use_caption):
    names = ("pairs", "text", "tokenizers", "cache")
    cache = open_cache(*(tiny_data / n for n in names), say=lambda _: None)["val"]
    vocabulary = JointVocabulary.load(tiny_data / "tokenizers")
    builder = SequenceBuilder(cache, vocabulary, seq_len=112)
    captions = [str(cache.caption(i).tolist()) for i in range(len(cache.codes_NG))]
    rows = [builder.pair(i, image_first=False) for i in range(len(captions))]
    found = caption_gain(Oracle(rows, sum(vocabulary.blocks.values()), use_caption), builder, captions)
    assert found.images == 12
    if use_caption:
        assert found.interval[0] > 0 and found.gain == pytest.approx(found.shuffled - found.true)
    else:
        assert found.gain == pytest.approx(0.0, abs=1e-9)


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert front_door(main)(["--run", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
