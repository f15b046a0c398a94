"""Check the page of `mmqk inspect` against counts and texts that are computed from the batches."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmqk.data.dial import Dial
from mmqk.data.loader import MicroBatches
from mmqk.data.shards.manifest import read_pairs
from mmqk.data.tokenizers.files import BEGIN_IMAGE, END_IMAGE, EOS, TextTokenizer, tokenizers_hash
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.data.tokens.folder import TokenWriter, layout_of
from mmqk.inspection import main
from mmqk.inspection.views import IdDecoder
from tests.tiny import data_of

TEXT, IMAGE, PADDING = "#0072B2", "#E69F00", "#d5dae0"
SHOWN = 6
PLACES = 128
LONG = (f"--sequences={SHOWN}", f"--data.seq_len={PLACES}")


class Page:
    """The source of a page, its text and its numbers, and the text and images of each sequence."""

    def __init__(self, folder: Path):
        self.source = (folder / "index.html").read_text(encoding="utf-8")
        self.numbers = json.loads((folder / "statistics.json").read_text(encoding="utf-8"))
        self.text = html.unescape(" ".join(re.sub(r"<[^>]+>", " ", self.source).split()))

    def section(self, index: int) -> str:
        found = re.search(rf'<section class="sequence" id="sequence-{index}">(.*?)</section>', self.source, re.S)
        assert found is not None
        return found[1]

    def widths(self, index: int, lane: str) -> Counter:
        """Return the number of positions of each color in one lane of a sequence.

        The lanes are "tokens" (tall bars), "trained" (trained targets, shorter bars) and "weight 0" (thin lines).
        """
        y, height = {"tokens": (0, 14), "trained": (19, 10), "weight 0": (23, 2)}[lane]
        shape = rf'<rect x="\d+" y="{y}" width="(\d+)" height="{height}" fill="(#\w+)"/>'
        counts: Counter = Counter()
        for width, color in re.findall(shape, self.section(index)):
            counts[color] += int(width)
        return counts

    def read(self, index: int) -> str:
        """Return the text of a sequence without its special tokens."""
        return html.unescape("".join(re.findall(r"<i>(.*?)</i>", self.section(index), re.S)))

    def pictures(self, index: int, what: str) -> list[Image.Image]:
        uris = re.findall(rf'src="data:image/png;base64,([^"]+)" alt="{what}"', self.section(index))
        return [Image.open(io.BytesIO(base64.b64decode(uri))) for uri in uris]


def inspected(folder: Path, args: list[str], *more: str) -> Page:
    assert main([*args, *more, "--out", str(folder)]) == 0
    return Page(folder)


def batch_of(args: list[str], *more: str):
    """Return the first sequences of training as a batch."""
    return MicroBatches(data_of([*args, *LONG[1:], *more]).order, SHOWN, 1, 0, 1, steps=1)[0]


@pytest.fixture(scope="module")
def page(tiny_args, tmp_path_factory) -> Page:
    return inspected(tmp_path_factory.mktemp("page"), tiny_args, *LONG)


@pytest.fixture(scope="module")
def batch(tiny_args):
    return batch_of(tiny_args)


def test_places_and_targets_are_those_of_the_batch(page, batch, tiny_args):
    for i in range(SHOWN):
        valid, image = batch.valid_BT[i], batch.modality_BT[i] == 1
        tokens, trained = page.widths(i, "tokens"), page.widths(i, "trained")
        assert tokens[PADDING] == PLACES - int(valid.sum())
        assert tokens[TEXT] == int((valid & ~image).sum()) and tokens[IMAGE] == int((valid & image).sum())
        assert trained[TEXT] + trained[IMAGE] == int(batch.target_mask_BT[i].sum())
        assert trained[IMAGE] == tokens[IMAGE] and not page.widths(i, "weight 0")
    assert any(page.widths(i, "tokens")[PADDING] for i in range(SHOWN))
    other = batch_of(tiny_args, "--seed=1")
    assert any(page.widths(i, "tokens")[PADDING] != int((~other.valid_BT[i]).sum()) for i in range(SHOWN))


def test_text_is_that_of_the_tokens(page, batch, tiny_data):
    tokenizer, layout = TextTokenizer.load(tiny_data / "tokenizers"), layout_of(tiny_data / "tokenizers")
    captions = [pair.caption for pair in read_pairs(tiny_data / "pairs", "train")]
    read = []
    for i in range(SHOWN):
        ids = batch.ids_BT[i][batch.valid_BT[i]].numpy()
        words = ids[(ids >= 5) & (ids < layout.vocab_sizes["text"])]
        read.append(page.read(i))
        assert read[i] == tokenizer.decode(words - 5)
        if BEGIN_IMAGE in ids:
            assert any(caption.startswith(read[i]) for caption in captions) and len(read[i]) > 10
    assert len(set(read)) > 2 and not any(caption.startswith(read[0][::-1]) for caption in captions)


def test_pictures_are_decoded_from_the_codes_and_stand_beside_their_original(page, batch, tiny_data, tiny_args):
    tokenizer = ImageTokenizer.load(tiny_data / "tokenizers")
    offset = layout_of(tiny_data / "tokenizers").vocab_sizes["text"]
    pairs, order = list(read_pairs(tiny_data / "pairs", "train")), data_of([*tiny_args, *LONG[1:]]).order
    pictured = 0
    for i in range(SHOWN):
        ids = batch.ids_BT[i]
        decoded, originals = (page.pictures(i, w) for w in ("decoded from its codes", "the original"))
        if not (ids >= offset).any():
            assert decoded == originals == []
            continue
        pixels = tokenizer.decode(ids[ids >= offset][None] - offset)[0].permute(1, 2, 0) * 255
        assert np.array_equal(np.array(decoded[0]), pixels.round().byte().numpy())
        (content,) = order.contents(i)
        assert np.array_equal(np.array(originals[0]), np.array(pairs[content.item].image))
        assert not np.array_equal(np.array(originals[0]), np.array(pairs[content.item - 1].image))
        pictured += 1
    assert pictured >= 3


def test_statistics_are_of_the_documents_that_are_read(page, tiny_args):
    data = data_of([*tiny_args, *LONG[1:]])
    rows = [data.order.row(i) for i in range(48)]  # 12 steps of 4 sequences
    numbers, ids = page.numbers, np.concatenate([row.ids[1:] for row in rows])
    assert numbers["sequences"] == numbers["run_sequences"] == numbers["fresh_sequences"] == 48
    image = ids[ids >= 305]
    assert numbers["targets"] == {"text": len(ids) - len(image), "image": len(image)}
    assert numbers["padding"] == pytest.approx(1 - (len(ids) + 48) / (48 * PLACES))
    found = numbers["modalities"]["image"]
    assert found["tokens"] == len(image) and found["used"] == len(set(image.tolist()))
    p = np.bincount(image - 305)[np.unique(image - 305)] / len(image)
    assert found["unigram"] == pytest.approx(-(p * np.log(p)).sum() + (len(p) - 1) / (2 * len(image)))
    assert found["share"] == pytest.approx(len(image) / len(ids))
    assert f"{found['unigram']:.2f}" in page.text and f"{len(image):,}" in page.text


def test_tokens_are_those_that_another_pairing_leaves(tiny_args, tmp_path):
    tokens = {}
    for pairing in ("matched", "shuffled", "captions"):
        found = inspected(tmp_path / pairing, tiny_args, f"--data.pairing={pairing}").numbers["sources"]
        tokens[pairing] = next(source for source in found if source["kind"] == "pair")["train_tokens"]
    assert tokens["captions"] < tokens["shuffled"] == tokens["matched"]


def test_interleaved_documents_with_several_images_and_their_drops(tiny_args, tiny_data, tmp_path):
    text, vocabulary = TextTokenizer.load(tiny_data / "tokenizers"), layout_of(tiny_data / "tokenizers")
    image = [BEGIN_IMAGE, *(np.arange(64) % 32 + vocabulary.vocab_sizes["text"]), END_IMAGE]
    words = [[i + 5 for i in text.encode(t)] for t in ("the people of ", "this <b>union</b> & trade")]
    documents = [np.array([*words[0], *image, *words[1], *image, EOS])] * 6
    dropped = {"image cannot be decoded": 3, "document is <empty>": 1}
    folder, tokenizers = tmp_path / "tokens", tiny_data / "tokenizers"
    writer = TokenWriter(folder, "interleaved", vocabulary, tokenizers_hash(tokenizers))
    writer.add_part("train", "00000", documents)
    writer.add_part("val", "00000", documents[:2])
    writer.finish(dropped)
    more = ["--data.mix", '{"interleaved": 1}', f"--data.interleaved={folder}", "--data.seq_len=256"]
    page = inspected(tmp_path / "page", tiny_args, *more, "--data.val_sequences=4", "--monitor.probe_sequences=2")
    assert page.read(0) == "the people of this <b>union</b> & trade"
    assert page.source.count("<b>") == 8 * 6  # 6 special tokens in each of 8 sequences; that of the text is escaped
    assert len(page.pictures(0, "decoded from its codes")) == 2 and page.pictures(0, "the original") == []
    assert page.numbers["dropped"]["interleaved"] == dropped
    assert "image cannot be decoded 3" in page.text and "document is <empty> 1" in page.text


def test_words_are_whole_characters_and_lose_nothing(tiny_data):
    decoder, text = IdDecoder(tiny_data / "tokenizers"), TextTokenizer.load(tiny_data / "tokenizers")
    for sample in ("the people shall see", "日本 🦊 naïve\n\ttrade", ""):
        words = decoder.words([i + 5 for i in text.encode(sample)])
        assert "".join(words) == sample and not any("\ufffd" in word for word in words)
    assert decoder.words([text.encode("日")[0] + 5]) == ["\ufffd"]  # part of a character


def test_the_dial_is_measured_against_what_is_known_of_it(tiny_args, tmp_path):
    args = ["--data.mix", '{"dial": 1}', "--data.seq_len=96", "--trainer.max_steps=500"]
    page, data = inspected(tmp_path, tiny_args, *args), data_of([*tiny_args, *args])
    dial = Dial(data.config.dial)
    ids = np.stack([data.order.row(i).ids for i in range(page.numbers["sequences"])])
    nats, is_image = -dial.log_prob(ids)[:, 1:], ids[:, 1:] >= dial.vocab_sizes["text"]
    for name, of in (("text", ~is_image), ("image", is_image)):
        assert page.numbers["dial"]["met"][name] == pytest.approx(float(nats[of].mean()))
        assert f"{dial.floors()[name]:.3f}" in page.text
    assert page.pictures(0, "ids as shades") and page.pictures(0, "decoded from its codes") == []
