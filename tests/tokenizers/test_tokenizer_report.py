import io
import math
import re
import shlex
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.build.tokenizer_report import (
    KEPT_BELOW,
    SHEET,
    contact_sheet,
    main,
    measure,
    parser,
    token_statistics,
)
from mmqk.data.tokenizers.files import ImageTokenizerConfig
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.data.tokenizers.source import Documents, Selection, Source
from mmqk.data.tokenizers.text import TextTokenizer
from mmqk.data.tokenizers.train import _image_config
from mmqk.data.tokenizers.train import parser as train_parser
from mmqk.data.tokenizers.vq import psnr


@pytest.fixture
def tokenizers(small_data, tmp_path):
    torch.manual_seed(0)
    image = ImageTokenizer(ImageTokenizerConfig(codes=16, code_dim=8, decoder_width=16, decoder_depth=1))
    image.codebook_VD.normal_()
    text = TextTokenizer.train(["red blue round square heart moon"] * 9, 270)
    (tmp_path / "image.safetensors").write_bytes(image.to_bytes())
    (tmp_path / "text.json").write_text(text.to_json())
    return tmp_path


def test_psnr_of_known_errors():
    images = torch.rand(3, 3, 8, 8)
    offsets = torch.tensor([0.1, 0.01, 1.0])
    expected = torch.tensor([20.0, 40.0, 0.0])
    torch.testing.assert_close(
        psnr(images, images + offsets[:, None, None, None]), expected, atol=1e-3, rtol=0
    )


def test_statistics_of_known_counts():
    even = token_statistics(torch.arange(8).repeat(5), 16)
    assert (even.tokens, even.used) == (40, 8)
    assert even.entropy == pytest.approx(math.log(8))
    assert (even.bits, even.perplexity) == (pytest.approx(3), pytest.approx(8))
    assert token_statistics(torch.zeros(2, 3).long(), 4).perplexity == pytest.approx(1)
    skewed = token_statistics(torch.tensor([0, 0, 0, 1]), 2)
    assert skewed.entropy == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert skewed.entropy < even.entropy


def test_the_page_has_the_numbers_and_keeps_what_others_added(small_data, tokenizers, tmp_path):
    out = tmp_path / "page"
    folders = {
        "shards": small_data / "pairs",
        "text": small_data / "text",
        "tokenizers": tokenizers,
        "out": out,
    }
    command = [part for k, v in folders.items() for part in (f"--{k}", str(v))]
    assert main(command) == 0
    text = (out / "README.md").read_text()
    source = Source(small_data / "pairs")
    images, documents = source.images(64), Documents(small_data / "text").read()[0]
    numbers = measure(images, source.captions()[0], documents, tokenizers)
    assert numbers.images == {"train": 24, "val": 6}
    assert f"| held out | 6 | {numbers.psnr_db['val']:.2f} |" in text
    assert f"| {numbers.codes['train'].entropy:.2f} |" in text
    assert len(re.findall(r"^\| (image codes|captions|documents) \|", text, re.M)) == 3
    assert "icons" not in text and "The\nsplits are those of" in text
    with Image.open(out / SHEET) as sheet:
        assert sheet.size == contact_sheet(images.val_BCHW, tokenizers).size

    assert text.rstrip().endswith(KEPT_BELOW)
    (out / "README.md").write_text(text + "\n## Added\n")
    for _ in range(2):
        main(command)
    assert (out / "README.md").read_text() == text + "## Added\n"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Write a tar of 20 pairs of odd sizes and one image without a caption, and tokenizers for 256 px with 16x16
    codes and a codebook of 8,192."""
    root = tmp_path_factory.mktemp("large")
    with tarfile.open(root / "a.tar", "w") as tar:
        for i in range(21):
            file = io.BytesIO()
            pixels = np.random.default_rng(i).integers(0, 256, (30, 10 + i, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((100 + 7 * i, 300)).save(file, "jpeg")
            fields = {"jpg": file.getvalue()} | ({"txt": b"a red moon"} if i else {})
            for name, data in fields.items():
                member = tarfile.TarInfo(f"{i:04d}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    config = ImageTokenizerConfig(256, 16, 8192, code_dim=8, decoder_width=16, decoder_depth=1)
    torch.manual_seed(0)
    image = ImageTokenizer(config)
    image.codebook_VD.normal_()
    (root / "image.safetensors").write_bytes(image.to_bytes())
    text = TextTokenizer.train(["red blue round square heart moon"] * 9, 270)
    (root / "text.json").write_text(text.to_json())
    return root


def test_the_page_of_tars_and_of_a_larger_tokenizer(large, tmp_path, monkeypatch):
    monkeypatch.chdir(large.parent)
    data = ["--shards", str(large / "*.tar"), "--text", "", "--val-fraction", "0.3"]
    assert main([*data, "--tokenizers", str(large), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    source = Source(str(large / "*.tar"), Selection(val_fraction=0.3))
    images = source.images(256)
    numbers = measure(images, source.captions()[0], [], large)
    n_val = len(images.val_BCHW)
    assert n_val + len(images.train_BCHW) == 20
    assert "256 codes with\n8192 possible values take 3328 bits per image" in text  # 16 * 16 * log2(8192)
    assert f"| held out | {n_val} | {numbers.psnr_db['val']:.2f} |" in text
    assert f"| image codes | {256 * (20 - n_val):,} |" in text
    assert "of the images" not in text and "icons" not in text and "0.3 is held out by a hash" in text
    assert "| documents |" not in text and "in documents" not in text
    assert "Number of images: 21 samples read, 1 dropped (no caption: 1).\n" in text
    with Image.open(tmp_path / SHEET) as sheet:  # six images of 256 px in each row
        assert sheet.size == (6 * 260 + 4, -(-min(n_val, 18) // 6) * (2 * 256 + 4 * 4) + 4)
    # the commands on the page have the flags that were given, with paths relative to the working directory
    assert str(large) not in text
    commands = re.findall(r"`python -m [\w.]*\.(\w+) ([^`]*)`", text)
    flags = {name: shlex.split(line) for name, line in commands}
    again = parser().parse_args(flags["tokenizer_report"])
    data[1] = f"{large.name}/*.tar"
    assert vars(again) == vars(parser().parse_args([*data, "--tokenizers", large.name]))
    trained = train_parser().parse_args(flags["train"])
    assert _image_config(trained).__dict__ | {"code_dim": 8, "decoder_depth": 1} == (
        ImageTokenizer.load(large).config.__dict__
    )
    assert (trained.text_size, trained.out, trained.shards) == (270, Path(large.name), again.shards)
