"""Train both tokenizers from a user's own shards with one command."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from mmqk.data.tokenizers.files import TextTokenizer, vocab_sizes_of
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.data.tokenizers.train import main
from mmqk.store import cli_main
from tests.data.tars import encoded, write_samples

WORDS = ["red", "blue", "green", "round", "square", "small", "heart", "star", "moon", "over", "under", "the", "water"]
SIZES = [(30, 57), (200, 61), (96, 96), (300, 33), (64, 64)]


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> str:
    """Write three shards in img2dataset's layout with 30 pairs of odd sizes, of which one is broken; return the
    pattern of their paths."""
    folder = tmp_path_factory.mktemp("img2dataset")
    for s in range(3):
        samples = []
        for k in range(10):
            rng = np.random.default_rng(10 * s + k)
            width, height = SIZES[k % 5]
            coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
            whole = encoded(coarse.resize((width, height), Image.Resampling.BICUBIC), "jpeg")
            content = whole[: 200 if (s, k) == (1, 3) else None]
            caption = " ".join(rng.choice(WORDS, 12))
            meta = json.dumps({"caption": caption, "width": width, "status": "success"})
            samples.append((f"{s:05d}{k:04d}", {"jpg": content, "txt": caption.encode(), "json": meta.encode()}))
        write_samples(folder / f"{s:05d}.tar", samples)
    return str(folder / "{00000..00002}.tar")


def command(shards: str, out, *more: str) -> list[str]:
    flags = {"--shards": shards, "--text": "", "--val-fraction": "0.2", "--out": str(out)}
    flags |= {"--log-dir": str(out / "log"), "--text-size": "280", "--steps": "2", "--batch-size": "4"}
    return [*(part for pair in flags.items() for part in pair), *more]


def test_one_command_makes_both_from_shards_of_odd_sizes(shards, tmp_path, capsys):
    pytest.importorskip("vector_quantize_pytorch")
    assert main(command(shards, tmp_path, "--image-size", "96", "--grid", "12", "--codes", "64")) == 0
    assert vocab_sizes_of(tmp_path) == {"text": 285, "image": 64}
    tokenizer = ImageTokenizer.load(tmp_path)
    assert (tokenizer.image_size, tokenizer.grid) == (96, (12, 12))
    images = torch.rand(2, 3, 96, 96)
    assert tokenizer.decode(tokenizer.encode(images)).shape == images.shape
    text = TextTokenizer.load(tmp_path)
    assert len(text.encode(" ".join(WORDS))) < 0.8 * len(" ".join(WORDS))  # it learned caption words
    printed = capsys.readouterr().out
    assert "30 samples read, 1 dropped (image cannot be decoded: 1)" in printed
    train, val = map(int, re.findall(r"2 steps on (\d+) images, (\d+) held out", printed)[0])
    assert train + val == 29 and val > 0


def test_both_vocabularies_are_as_large_as_a_small_set_gives(shards, tmp_path, capsys):
    pytest.importorskip("vector_quantize_pytorch")
    shape = ["--image-size", "32", "--grid", "2", "--steps", "1", "--codes", "500", "--text-size", "60000"]
    assert cli_main(main)(command(shards, tmp_path, *shape)) == 0
    printed = capsys.readouterr().out
    images = int(re.findall(r"1 steps on (\d+) images", printed)[0])
    sizes = vocab_sizes_of(tmp_path)
    assert sizes["image"] == 4 * images < 500 and f"the codebook has {4 * images}, not 500" in printed
    assert 261 < sizes["text"] < 1000 and f"the vocabulary has {sizes['text'] - 5}" in printed
    text = TextTokenizer.load(tmp_path)
    assert all(len(text.encode(f" {word}")) == 1 for word in WORDS)  # no more pairs to merge
    # The control is the test above: what the set can give is kept as it is asked for.
