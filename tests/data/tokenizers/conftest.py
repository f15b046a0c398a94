"""The shipped tokenizers, on one thread."""

from pathlib import Path

import pytest
import torch

from mmqk.data.tokenizers.image import ImageTokenizer

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shipped() -> Path:
    return REPOSITORY / "data" / "tokenizers"


@pytest.fixture(scope="session")
def shipped_image(shipped: Path) -> ImageTokenizer:
    return ImageTokenizer.load(shipped)
