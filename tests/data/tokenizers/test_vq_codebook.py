"""Codebooks and grids other than the shipped ones: 16x16 codes and a codebook of 8,192, at 64 px and at 256 px."""

import pytest
import torch

from mmqk.data.tokenizers.files import ImageTokenizerConfig
from mmqk.data.tokenizers.image import ImageTokenizer

pytest.importorskip("vector_quantize_pytorch")
pytest.importorskip("lightning")

from mmqk.data.tokenizers.train_image import VQTrainingConfig, train_image_tokenizer

FLAGS = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
LARGE = ImageTokenizerConfig(grid=16, codes=8192, code_dim=16, decoder_width=8, decoder_depth=1)


def pictures(number: int, size: int = 64) -> torch.Tensor:
    """Return images of smooth noise, so that no two places of an image look the same."""
    coarse = torch.rand(number, 3, size // 8, size // 8, generator=torch.Generator().manual_seed(number))
    smooth = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1)
    return (smooth * 255).byte()


def test_16x16_of_8192_is_trained_and_survives_the_file(tmp_path):
    images, held_out = pictures(8), pictures(3)
    # A batch has 1,024 vectors. With 8,192, one per code, k-means would take ten times as long.
    training = VQTrainingConfig(steps=2, batch_size=4, shift=2)
    trained = train_image_tokenizer(images, held_out, LARGE, training, val_check_interval=2, **FLAGS)
    x = held_out.float() / 255
    codes = trained.encode(x)
    assert codes.shape == (3, 256) and codes.dtype == torch.int64
    assert codes.min() >= 0 and codes.max() < 8192 and codes.unique().numel() > 100
    assert trained.codebook_VD.shape == (8192, 16)
    assert trained.codebook_VD.unique(dim=0).shape[0] > 1024  # more than the vectors of the first batch

    (tmp_path / "image.safetensors").write_bytes(trained.to_bytes())
    loaded = ImageTokenizer.load(tmp_path)
    assert loaded.config == LARGE and loaded.to_bytes() == trained.to_bytes()
    # In fp16 a vector halfway between two codes can get either code, but the vector of a code still gets that code.
    own = loaded.codebook_VD[codes[0]].T[None, :, None]
    assert torch.equal(loaded.codebook_VD[loaded.quantize(own)[0]], loaded.codebook_VD[codes[0]])
