"""A tiny data set with its own tokenizers, and the command line of a run that trains on it in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.data.tars import encoded

COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220), "black": (10, 10, 10)}
SHAPES = ("square", "stripe", "corner", "bar")
WORDS = "the people of this union shall see a long and steady growth of trade and peace".split()  # noqa: SIM905


def draw(color: str, shape: str, seed: int) -> Image.Image:
    """Return an image of a colored shape on white with a little noise."""
    random = np.random.default_rng(seed)
    pixels = np.full((64, 64, 3), 255, dtype=np.uint8)
    region = {
        "square": np.s_[16:48, 16:48], "stripe": np.s_[24:40, :], "corner": np.s_[:32, :32], "bar": np.s_[:, 24:40],
    }[shape]  # fmt: skip
    pixels[region] = COLORS[color]
    noise = random.integers(-9, 10, pixels.shape)
    return Image.fromarray((pixels.astype(int) + noise).clip(0, 255).astype(np.uint8))


def samples(n: int, offset: int):
    for i in range(offset, offset + n):
        color, shape = list(COLORS)[i % 4], SHAPES[i // 4 % 4]
        file = encoded(draw(color, shape, i), "WEBP", lossless=True)
        yield (f"tiny-{i:04d}", file, {"caption": f"a {color} {shape} on a white ground, plain and flat"})


def documents(n: int, seed: int):
    random = np.random.default_rng(seed)
    for _ in range(n):
        yield {"text": " ".join(random.choice(WORDS, 120)), "source": "made up"}


def write_tiny_data(root: Path) -> None:
    """Write pairs/ (40 train, 12 val), text/ and tokenizers/ (300 BPE entries, images of 8x8 codes from a codebook of
    32)."""
    from torchvision.transforms.functional import pil_to_tensor

    from data.build.write import write_documents, write_shard
    from mmqk.data.shards.manifest import Manifest, write_manifest
    from mmqk.data.tokenizers.files import ImageTokenizerConfig, TextTokenizer
    from mmqk.data.tokenizers.image import ImageTokenizer

    for name in ("pairs", "text", "tokenizers"):
        (root / name).mkdir()
    pairs = {
        "train": (write_shard(root / "pairs/train-00000.tar", samples(24, 0)),
                  write_shard(root / "pairs/train-00001.tar", samples(16, 24))),
        "val": (write_shard(root / "pairs/val-00000.tar", samples(12, 100)),),
    }  # fmt: skip
    write_manifest(root / "pairs", Manifest(pairs, {"name": "tiny"}))
    text = {
        "train": (write_documents(root / "text/train.jsonl.xz", documents(30, 0)),),
        "val": (write_documents(root / "text/val.jsonl.xz", documents(8, 1)),),
    }
    write_manifest(root / "text", Manifest(text, {"name": "tiny"}))
    captions = [meta["caption"] for _, _, meta in samples(40, 0)] + [d["text"] for d in documents(30, 0)]
    (root / "tokenizers/text.json").write_text(TextTokenizer.train(captions, size=300).to_json())

    torch.manual_seed(0)
    tokenizer = ImageTokenizer(ImageTokenizerConfig(codes=32, code_dim=8, decoder_width=16, decoder_depth=1))
    images = torch.stack([pil_to_tensor(draw(c, s, 0)) for c in COLORS for s in SHAPES]).float() / 255
    with torch.no_grad():
        vectors = tokenizer.features(images).permute(0, 2, 3, 1).flatten(0, 2)
    tokenizer.codebook_VD.copy_(vectors[torch.randperm(len(vectors))[:32]])
    (root / "tokenizers/image.safetensors").write_bytes(tokenizer.to_bytes())


def data_of(args: list[str]) -> Any:
    """Return the data of a run with these arguments, ready to be read."""
    from mmqk.config import resolve
    from mmqk.data.datamodule import TokenDataModule

    run = resolve(args)
    data = TokenDataModule(run.data, run.seed)
    data.setup()
    return data


def tiny_args(tiny_data: Path) -> list[str]:
    """Return the arguments of `mmqk.train`, without ``--out``."""
    return [
        f"--data.pairs={tiny_data / 'pairs'}", f"--data.text={tiny_data / 'text'}",
        f"--data.tokenizers={tiny_data / 'tokenizers'}", f"--data.cache={tiny_data / 'cache'}",
        "--data.seq_len=88", "--data.batch_size=4", "--data.val_sequences=8",
        "--model.d_model=16", "--model.n_layers=2", "--model.n_heads=2", "--optim.lr=0.01",
        "--optim.warmup_steps=4", "--trainer.max_steps=12", "--trainer.accelerator=cpu", "--threads=1",
        "--monitor.every_n_steps=4", "--monitor.probe_split=heldout", "--checkpoint.every_n_steps=4", "--quiet",
    ]  # fmt: skip
