"""Small shards and documents, and the shipped tokenizers."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.build.write import write_documents, write_shard
from mmqk.data.shards.manifest import Manifest, write_manifest
from mmqk.data.tokenizers.image import ImageTokenizer

REPOSITORY = Path(__file__).resolve().parents[3]
WORDS = ("red", "blue", "green", "round", "square", "small", "large", "heart", "star", "moon")


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


def _sample(index: int) -> tuple[str, bytes, dict[str, str]]:
    rng = np.random.default_rng(index)
    pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "webp", lossless=True)
    return f"x-{index}", file.getvalue(), {"caption": " ".join(rng.choice(WORDS, 5))}


@pytest.fixture(scope="session")
def small_data(tmp_path_factory) -> Path:
    """Return a folder with `pairs/` (24 training and 6 held-out pairs) and `text/` (documents)."""
    root = tmp_path_factory.mktemp("small")
    pairs, text = root / "pairs", root / "text"
    splits: dict[str, dict] = {"pairs": {}, "text": {}}
    for folder in (pairs, text):
        folder.mkdir()
    for split, indices in (("train", range(24)), ("val", range(24, 30))):
        splits["pairs"][split] = (write_shard(pairs / f"{split}-00000.tar", map(_sample, indices)),)
        documents = [{"text": json.dumps(_sample(i)[2]) + " – naïve", "source": "test"} for i in indices]
        splits["text"][split] = (write_documents(text / f"{split}.jsonl.xz", documents),)
    for folder in (pairs, text):
        write_manifest(folder, Manifest(splits[folder.name], {"name": folder.name}))
    return root
