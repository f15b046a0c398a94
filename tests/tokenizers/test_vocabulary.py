import numpy as np
import pytest
import torch

from mmqk.store import UserError
from mmqk.tokenizers import ImageTokenizer, JointVocabulary, TextTokenizer
from mmqk.tokenizers.vocabulary import BEGIN_IMAGE, BOS, END_IMAGE, EOS, PAD, SPECIALS

VOCABULARY = JointVocabulary(text_size=7, image_size=4)


def test_specials_come_first_and_count_as_text():
    assert (BOS, EOS, PAD, BEGIN_IMAGE, END_IMAGE) == (0, 1, 2, 3, 4)
    assert SPECIALS[BEGIN_IMAGE] == "<image>" and SPECIALS[END_IMAGE] == "</image>"
    assert list(VOCABULARY.vocab_sizes.items()) == [("text", 12), ("image", 4)]
    assert VOCABULARY.size == 16


def test_every_id_is_given_once():
    text, image = VOCABULARY.text(list(range(7))), VOCABULARY.image(list(range(4)))
    assert [*range(5), *text, *image] == list(range(VOCABULARY.size))
    text_end = VOCABULARY.vocab_sizes["text"]
    assert max(text) < text_end <= min(image)


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_places_are_undone(make):
    ids = make([3, 0, 3, 1])
    for there, back in ((VOCABULARY.text, VOCABULARY.text_ids), (VOCABULARY.image, VOCABULARY.image_codes)):
        placed = there(ids)
        assert type(placed) is type(ids)
        assert list(placed) != list(ids)
        assert list(back(placed)) == list(ids)
    # control: the inverse of the other block gives other ids
    assert list(VOCABULARY.image_codes(VOCABULARY.text(ids))) != list(ids)


def test_arrays_keep_shape_and_type():
    codes = np.zeros((2, 3), dtype=np.int32)
    assert VOCABULARY.image(codes).shape == (2, 3) and VOCABULARY.image(codes).dtype == np.int32
    assert VOCABULARY.image(torch.zeros(2, 3, dtype=torch.int64)).dtype == torch.int64


def test_sizes_are_read_without_the_weights_and_agree_with_them(shipped):
    vocabulary = JointVocabulary.load(shipped)
    assert vocabulary.text_size == TextTokenizer.load(shipped).size
    assert vocabulary.image_size == ImageTokenizer.load(shipped).size
    assert vocabulary.vocab_sizes == {"text": 1029, "image": 512}


def test_missing_and_damaged_tokenizers_are_named(tmp_path, shipped):
    with pytest.raises(UserError, match=r"text\.json is missing"):
        JointVocabulary.load(tmp_path)
    (tmp_path / "text.json").write_bytes((shipped / "text.json").read_bytes())
    with pytest.raises(UserError, match=r"image\.safetensors is missing"):
        JointVocabulary.load(tmp_path)
    (tmp_path / "image.safetensors").write_bytes((shipped / "image.safetensors").read_bytes())
    assert JointVocabulary.load(tmp_path) == JointVocabulary.load(shipped)
    for content in ("[]", '{"model": {}}', "half a fi"):
        (tmp_path / "text.json").write_text(content)
        with pytest.raises(UserError, match=r"text\.json cannot be used"):
            JointVocabulary.load(tmp_path)
