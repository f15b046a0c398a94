from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqk.data.shards.manifest import read_pairs
from mmqk.data.tokenizers.files import TextTokenizer, tokenizers_hash
from mmqk.store import UserError

SHIPPED = TextTokenizer.load(Path(__file__).resolve().parents[3] / "data" / "tokenizers")


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_comes_back(text):
    ids = SHIPPED.encode(text)
    assert SHIPPED.decode(ids) == text
    assert all(0 <= i < SHIPPED.size for i in ids)


def test_shipped_vocabulary_has_1024_entries_and_covers_captions():
    captions = [pair.caption for pair in read_pairs(Path(__file__).resolve().parents[3] / "data/emoji", "val")]
    tokens = sum(len(SHIPPED.encode(caption)) for caption in captions)
    assert SHIPPED.size == 1024
    # a vocabulary that learned nothing would give one token per byte
    assert sum(map(len, captions)) / tokens > 2
    bytes_only = TextTokenizer.train(captions[:5], 256)
    assert sum(map(len, captions)) / sum(len(bytes_only.encode(caption)) for caption in captions) < 1.1


def test_same_texts_give_the_same_entries(tmp_path):
    texts = ["the red round heart", "the blue square moon", "a heart and a moon"] * 3
    one, two = (TextTokenizer.train(texts, 280).to_json() for _ in range(2))
    assert one == two
    assert one != TextTokenizer.train([text[::-1] for text in texts], 280).to_json()
    (tmp_path / "text.json").write_text(one)
    assert TextTokenizer.load(tmp_path).encode("the heart") == TextTokenizer.train(texts, 280).encode("the heart")


def test_the_hash_names_both_files(tmp_path):
    (tmp_path / "text.json").write_bytes(b"a")
    with pytest.raises(UserError, match=r"image\.safetensors is missing"):
        tokenizers_hash(tmp_path)
    (tmp_path / "image.safetensors").write_bytes(b"b")
    first = tokenizers_hash(tmp_path)
    assert len(first) == 10 and first == tokenizers_hash(tmp_path)
    (tmp_path / "image.safetensors").write_bytes(b"c")
    assert tokenizers_hash(tmp_path) != first
    # the hash also changes if bytes move from one file to the other
    (tmp_path / "text.json").write_bytes(b"ab")
    (tmp_path / "image.safetensors").write_bytes(b"")
    assert tokenizers_hash(tmp_path) != first
