import math
import re

import pytest
import torch
from PIL import Image

from data.build.tokenizer_report import KEPT_BELOW, SHEET, contact_sheet, main, measure, token_statistics
from mmqk.data.tokenizers.source import Documents, Source


def test_statistics_of_known_counts():
    even = token_statistics(torch.arange(8).repeat(5), 16)
    assert (even.tokens, even.used) == (40, 8)
    assert even.entropy == pytest.approx(math.log(8))
    assert (even.bits, even.perplexity) == (pytest.approx(3), pytest.approx(8))
    assert token_statistics(torch.zeros(2, 3).long(), 4).perplexity == pytest.approx(1)
    skewed = token_statistics(torch.tensor([0, 0, 0, 1]), 2)
    assert skewed.entropy == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert skewed.entropy < even.entropy


def test_the_page_has_the_numbers_and_keeps_what_others_added(tiny_data, tmp_path):
    out, tokenizers = tmp_path / "page", tiny_data / "tokenizers"
    folders = {"shards": tiny_data / "pairs", "text": tiny_data / "text", "tokenizers": tokenizers, "out": out}
    command = [part for k, v in folders.items() for part in (f"--{k}", str(v))]
    assert main(command) == 0
    text = (out / "README.md").read_text()
    source = Source(tiny_data / "pairs")
    images, documents = source.images(64), Documents(tiny_data / "text").read()[0]
    numbers = measure(images, source.captions()[0], documents, tokenizers)
    assert numbers.images == {"train": 40, "val": 12}
    assert f"| held out | 12 | {numbers.psnr_db['val']:.2f} |" in text
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
