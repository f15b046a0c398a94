from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmqk.data.tokenizers.files import ImageTokenizerConfig
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.data.tokenizers.train_image import psnr
from mmqk.data.tokenizers.training_data import Source
from mmqk.store import UserError

REPOSITORY = Path(__file__).resolve().parents[3]
# PSNR on held-out images in dB: that of the shipped codebook is higher, that of a permuted codebook is lower.
HELD_OUT_DB = 20.0


def small_tokenizer(seed: int = 0) -> ImageTokenizer:
    torch.manual_seed(seed)
    config = ImageTokenizerConfig(codes=16, code_dim=8, decoder_width=16, decoder_depth=1)
    tokenizer = ImageTokenizer(config)
    tokenizer.codebook_VD.normal_()
    return tokenizer.eval().requires_grad_(False)


def test_encode_finds_the_nearest_code():
    tokenizer = small_tokenizer()
    images = torch.rand(3, 3, 64, 64)
    codes = tokenizer.encode(images)
    z = tokenizer.features(images)

    def nearest(codebook):
        found = torch.empty(3, 64, dtype=torch.long)
        for b in range(3):
            for row in range(8):
                for column in range(8):
                    distances = [float((z[b, :, row, column] - code).square().sum()) for code in codebook]
                    found[b, 8 * row + column] = min(range(16), key=distances.__getitem__)
        return found

    assert torch.equal(codes, nearest(tokenizer.codebook_VD))
    # The control: a shifted codebook gives other codes.
    assert not torch.equal(codes, nearest(tokenizer.codebook_VD.roll(1, 0)))
    assert codes.unique().numel() > 1


def test_the_grid_is_row_major(shipped_image):
    white = torch.ones(1, 3, 64, 64)
    spot = white.clone()
    spot[:, :, 8:16, 48:56] = 0  # row 1, column 6
    changed = (shipped_image.encode(white) != shipped_image.encode(spot))[0]
    assert changed[1 * 8 + 6]
    assert not changed[6 * 8 + 1]
    difference = shipped_image.decode(shipped_image.encode(spot)) - shipped_image.decode(shipped_image.encode(white))
    strength = difference.abs().sum(1)[0]
    assert strength[8:16, 48:56].mean() > 10 * strength[48:56, 8:16].mean()


def test_held_out_images_come_back(shipped_image):
    images = Source(REPOSITORY / "data/emoji").images(64).val_BCHW.float() / 255
    codes = shipped_image.encode(images)
    assert psnr(images, shipped_image.decode(codes)).mean() > HELD_OUT_DB
    assert codes.unique().numel() > 256
    shuffled = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    # The control: permuted codes give worse images.
    assert psnr(images, shipped_image.decode(shuffled[codes])).mean() < HELD_OUT_DB - 6


def test_weights_survive_the_file(tmp_path):
    tokenizer = small_tokenizer()
    (tmp_path / "image.safetensors").write_bytes(tokenizer.to_bytes())
    again = ImageTokenizer.load(tmp_path)
    assert again.config == tokenizer.config
    assert again.to_bytes() == tokenizer.to_bytes() != small_tokenizer(seed=1).to_bytes()
    for name, weight in tokenizer.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=1e-3, atol=1e-3)


def test_missing_and_damaged_files_are_named(tmp_path):
    path = tmp_path / "image.safetensors"
    with pytest.raises(UserError, match=r"image\.safetensors is missing"):
        ImageTokenizer.load(tmp_path)
    whole = small_tokenizer().to_bytes()
    other_size = whole.replace(b'16, \\"code_dim', b'17, \\"code_dim')
    for content in (b"", b"not a tokenizer", whole[: len(whole) // 2], other_size):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"image\.safetensors cannot be used .*--overwrite"):
            ImageTokenizer.load(tmp_path)
    save_file({"weight": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="its format is not"):
        ImageTokenizer.load(tmp_path)
    path.write_bytes(whole)
    ImageTokenizer.load(tmp_path)
