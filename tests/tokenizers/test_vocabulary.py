from pathlib import Path

import pytest

from mmqk.data.tokenizers.files import BEGIN_IMAGE, BOS, END_IMAGE, EOS, PAD, SPECIALS, vocab_sizes_of
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.data.tokenizers.text import TextTokenizer
from mmqk.store import UserError


def test_specials_come_first_and_count_as_text(shipped: Path):
    assert (BOS, EOS, PAD, BEGIN_IMAGE, END_IMAGE) == (0, 1, 2, 3, 4)
    assert SPECIALS[BEGIN_IMAGE] == "<image>" and SPECIALS[END_IMAGE] == "</image>"
    sizes = vocab_sizes_of(shipped)
    assert list(sizes.items()) == [("text", 1029), ("image", 512)]
    # The reference: the sizes of the loaded tokenizers.
    assert sizes["text"] == len(SPECIALS) + TextTokenizer.load(shipped).size
    assert sizes["image"] == ImageTokenizer.load(shipped).size


def test_missing_and_damaged_tokenizers_are_named(tmp_path, shipped):
    with pytest.raises(UserError, match=r"text\.json is missing"):
        vocab_sizes_of(tmp_path)
    (tmp_path / "text.json").write_bytes((shipped / "text.json").read_bytes())
    with pytest.raises(UserError, match=r"image\.safetensors is missing"):
        vocab_sizes_of(tmp_path)
    (tmp_path / "image.safetensors").write_bytes((shipped / "image.safetensors").read_bytes())
    assert vocab_sizes_of(tmp_path) == vocab_sizes_of(shipped)
    for content in ("[]", '{"model": {}}', "half a fi"):
        (tmp_path / "text.json").write_text(content)
        with pytest.raises(UserError, match=r"text\.json cannot be used"):
            vocab_sizes_of(tmp_path)
