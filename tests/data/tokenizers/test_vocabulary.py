from pathlib import Path

from mmqk.data.tokenizers.files import (
    BEGIN_IMAGE,
    BOS,
    END_IMAGE,
    EOS,
    PAD,
    SPECIALS,
    TextTokenizer,
    vocab_sizes_of,
)
from mmqk.data.tokenizers.image import ImageTokenizer


def test_specials_come_first_and_count_as_text(shipped: Path):
    assert (BOS, EOS, PAD, BEGIN_IMAGE, END_IMAGE) == (0, 1, 2, 3, 4)
    assert SPECIALS[BEGIN_IMAGE] == "<image>" and SPECIALS[END_IMAGE] == "</image>"
    sizes = vocab_sizes_of(shipped)
    assert list(sizes.items()) == [("text", 1029), ("image", 512)]
    # The reference: the sizes of the loaded tokenizers.
    assert sizes["text"] == len(SPECIALS) + TextTokenizer.load(shipped).size
    assert sizes["image"] == ImageTokenizer.load(shipped).size
