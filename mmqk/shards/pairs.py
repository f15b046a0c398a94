"""Read and write the shards of a manifest: tars of image+caption pairs, and xz-compressed JSON lines of text."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mmqk.shards.images import Dropped, load_image
from mmqk.shards.lines import read_lines
from mmqk.shards.manifest import RESTORE, Shard, checked_shards, sha256_file
from mmqk.shards.samples import json_of, pair_of, text_of
from mmqk.shards.tars import TarIndex, index_tar
from mmqk.shards.unread import printable
from mmqk.store import UserError

IMAGE_SIZE = 64
# liblzma's manual recommends lc=4 and pb=0 for text.
_TEXT_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]


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
            raise UserError(
                f"shard {path} has {len(index)} samples, but the manifest lists {shard.samples}: {RESTORE}"
            )
        yield from pairs_of(index)


def pairs_of(index: TarIndex) -> Iterator[Pair]:
    """Yield the pairs of one archive.

    Raises:
        UserError: a sample lacks a readable image or caption, or its image is not 64x64.
    """
    for key, sample in index:
        where = f"sample {printable(key)} of shard {index.path}"
        try:
            content, caption = pair_of(sample)
            image = load_image(content, IMAGE_SIZE)
            meta = json_of(sample)
        except Dropped as dropped:
            raise UserError(
                f"{where} cannot be used ({dropped.reason}): repair or remove the sample, then write the shard"
                " and its manifest again"
            ) from None
        # Check the size of the file's image, because load_image scales an image of another size.
        with Image.open(io.BytesIO(content)) as original:
            width, height = original.size
        if (width, height) != (IMAGE_SIZE, IMAGE_SIZE):
            raise UserError(
                f"the image of {where} is {width}x{height}, not {IMAGE_SIZE}x{IMAGE_SIZE}: resize it"
            )
        yield Pair(key, image, caption, meta)


def write_shard(path: Path, samples: Iterable[tuple[str, bytes, dict[str, Any]]]) -> Shard:
    """Write (key, lossless WebP bytes, metadata) as one WebDataset tar; equal samples give equal bytes.

    Raises:
        ValueError: a key contains a dot, at which WebDataset would split it.
    """
    count = 0
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, webp, meta in samples:
            if "." in key:
                raise ValueError(f"sample key {key!r} contains a dot")
            text = json.dumps(meta, ensure_ascii=False, separators=(",", ":")).encode()
            for name, content in ((f"{key}.webp", webp), (f"{key}.json", text)):
                member = tarfile.TarInfo(name)  # mtime, uid and gid are 0
                member.size = len(content)
                member.mode = 0o644
                tar.addfile(member, io.BytesIO(content))
            count += 1
    return Shard(path.name, count, sha256_file(path))


def read_text(folder: Path | str, split: str) -> Iterator[str]:
    """Yield the documents of a split, in the order of the files.

    Raises:
        UserError: the manifest, a shard or a document is missing or damaged, or differs from the manifest.
    """
    for path, shard in checked_shards(folder, split):
        count = 0
        for count, line, _ in read_lines(path):
            try:
                yield text_of(line)
            except Dropped as dropped:
                raise UserError(
                    f"line {count} of {path} cannot be used ({dropped.reason}): {RESTORE}"
                ) from None
        if count != shard.samples:
            raise UserError(f"{path} has {count} documents, but the manifest lists {shard.samples}: {RESTORE}")


def write_documents(path: Path, documents: Iterable[dict[str, str]]) -> Shard:
    """Write documents (``text``, ``source``) as xz-compressed JSON lines; equal documents give equal bytes."""
    count = 0
    with lzma.open(path, "wt", filters=_TEXT_FILTERS, encoding="utf-8", newline="\n") as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
            count += 1
    return Shard(path.name, count, sha256_file(path))
