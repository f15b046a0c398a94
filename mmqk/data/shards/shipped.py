"""Reads pairs and texts of shards with a manifest, as in data/. A sample that cannot be used is an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mmqk.data.shards.images import Dropped, load_image, open_image
from mmqk.data.shards.manifest import RESTORE, checked_shards
from mmqk.data.shards.read import read_lines
from mmqk.data.shards.samples import json_of, pair_of, printable, text_of
from mmqk.data.shards.tar import index_tar
from mmqk.store import UserError

IMAGE_SIZE = 64


@dataclass(frozen=True)
class Pair:
    """An image and its caption.

    Attributes:
        key: sample key, ``<vendor>-<codepoint>`` in the shipped shards.
        image: RGB, 64x64.
        caption: the caption.
        meta: the sample's JSON (caption, its parts, source, licence); empty for a sample with a txt caption.
    """

    key: str
    image: Image.Image
    caption: str
    meta: dict[str, Any]


def read_pairs(folder: Path | str, split: str) -> Iterator[Pair]:
    """Yield the pairs of a split, in the order of the shards.

    Raises:
        UserError: the manifest, a shard or a sample is missing or damaged, or differs from the manifest.
    """
    for path, shard in checked_shards(folder, split):
        index = index_tar(path)
        if len(index) != shard.samples:
            raise UserError(f"shard {path} has {len(index)} samples, but the manifest lists {shard.samples}: {RESTORE}")
        for key, sample in index:
            where = f"sample {printable(key)} of shard {path}"
            try:
                content, caption = pair_of(sample)
                image = load_image(content, IMAGE_SIZE)
                meta = json_of(sample)
            except Dropped as dropped:
                raise UserError(f"{where} cannot be used ({dropped.reason}): {RESTORE}") from None
            # Check the size of the file's image, because load_image scales an image of another size.
            with open_image(content) as original:
                width, height = original.size
            if (width, height) != (IMAGE_SIZE, IMAGE_SIZE):
                raise UserError(f"the image of {where} is {width}x{height}, not {IMAGE_SIZE}x{IMAGE_SIZE}: resize it")
            yield Pair(key, image, caption, meta)


def read_text(folder: Path | str, split: str) -> Iterator[str]:
    """Yield the documents of a split, in the order of the files.

    Raises:
        UserError: the manifest, a shard or a document is missing or damaged, or differs from the manifest.
    """
    for path, shard in checked_shards(folder, split):
        count = 0
        for count, line in read_lines(path):
            try:
                yield text_of(line)
            except Dropped as dropped:
                raise UserError(f"line {count} of {path} cannot be used ({dropped.reason}): {RESTORE}") from None
        if count != shard.samples:
            raise UserError(f"{path} has {count} documents, but the manifest lists {shard.samples}: {RESTORE}")
