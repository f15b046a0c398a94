"""Shards, both ways: WebDataset tars of image+caption pairs, and xz-compressed JSON lines of documents.

Every reader checks the manifest first. webdataset reads a truncated tar as a shorter one without a word.
"""

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

from mmqk.shards.images import on_white
from mmqk.shards.manifest import RESTORE, Shard, checked_shards, manifest_hash, sha256_file
from mmqk.shards.samples import IMAGE_FIELDS
from mmqk.store import UserError, check_regular

__all__ = [
    "IMAGE_SIZE",
    "Pair",
    "iterate_shard",
    "manifest_hash",
    "read_pairs",
    "read_text",
    "write_documents",
    "write_shard",
]

IMAGE_SIZE = 64
# lc=4, pb=0: what liblzma's manual advises for text.
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
    """The pairs of a split, in the order of the shards.

    Raises:
        UserError: the manifest, a shard or a sample is missing, corrupt or not what the manifest says.
    """
    for path, shard in checked_shards(folder, split):
        count = 0
        for pair in iterate_shard(path):
            count += 1
            yield pair
        if count != shard.samples:
            raise UserError(
                f"shard {path} holds {count} samples, its manifest says {shard.samples}: {RESTORE}"
            )


def iterate_shard(path: Path) -> Iterator[Pair]:
    """The pairs of one tar, without a manifest.

    Raises:
        UserError: the file is no tar or ends early, or a sample lacks a readable image or caption.
    """
    check_regular(path)
    _check_tar(path)
    import webdataset as wds

    samples = iter(wds.WebDataset([str(path.resolve())], shardshuffle=False, empty_check=False))
    while True:
        try:
            sample = next(samples)
        except StopIteration:
            return
        except ValueError as error:  # a member that occurs twice
            raise UserError(f"shard {path} cannot be read ({error.args[0]}): write it again") from None
        yield _decode(sample, path)


def _check_tar(path: Path) -> None:
    # webdataset takes a tar that ends early for a complete one.
    blank = bytes(tarfile.BLOCKSIZE)
    try:
        with tarfile.open(path, "r:") as tar:
            tar.getmembers()
            tar.fileobj.seek(tar.offset)
            whole = tar.fileobj.read(2 * tarfile.BLOCKSIZE) == 2 * blank
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"shard {path} is corrupt ({error}): restore it or write it again") from None
    if not whole:
        raise UserError(f"shard {path} is corrupt (it ends early): restore it or write it again")


def _decode(sample: dict[str, Any], path: Path) -> Pair:
    key = sample["__key__"]
    where = f"sample {key} of shard {path}"
    repair = "repair or remove the sample and write the shard and its manifest again"
    field = next((f for f in IMAGE_FIELDS if f in sample), None)
    if field is None:
        raise UserError(f"{where} has no image (one of {', '.join(IMAGE_FIELDS)}): {repair}")
    try:
        with Image.open(io.BytesIO(sample[field])) as opened:
            image = on_white(opened)
    except Exception:  # Pillow's decoders raise OSError, ValueError, SyntaxError and struct.error alike.
        raise UserError(f"the image of {where} cannot be decoded: {repair}") from None
    if image.size != (IMAGE_SIZE, IMAGE_SIZE):
        width, height = image.size
        raise UserError(f"the image of {where} is {width}x{height}, not {IMAGE_SIZE}x{IMAGE_SIZE}: resize it")
    try:
        meta = json.loads(sample["json"]) if "json" in sample else {}
        caption = meta["caption"] if "json" in sample else sample["txt"].decode("utf-8")
    except (ValueError, KeyError, TypeError):
        caption = None
    if not isinstance(caption, str):
        raise UserError(f"{where} has no readable caption (json with 'caption', or txt): {repair}")
    return Pair(key, image, caption, meta)


def write_shard(path: Path, samples: Iterable[tuple[str, bytes, dict[str, Any]]]) -> Shard:
    """Write (key, lossless WebP bytes, metadata) as one WebDataset tar; the same samples give the same bytes.

    Raises:
        ValueError: a key holds a dot, at which WebDataset would split it.
    """
    count = 0
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, webp, meta in samples:
            if "." in key:
                raise ValueError(f"sample key {key!r} holds a dot")
            text = json.dumps(meta, ensure_ascii=False, separators=(",", ":")).encode()
            for name, content in ((f"{key}.webp", webp), (f"{key}.json", text)):
                member = tarfile.TarInfo(name)  # mtime, uid and gid are 0
                member.size = len(content)
                member.mode = 0o644
                tar.addfile(member, io.BytesIO(content))
            count += 1
    return Shard(path.name, count, sha256_file(path))


def read_text(folder: Path | str, split: str) -> Iterator[str]:
    """The documents of a split, in the order of the file.

    Raises:
        UserError: the manifest or a shard is missing, corrupt or not what the manifest says.
    """
    for path, shard in checked_shards(folder, split):
        count = 0
        try:
            with lzma.open(path, "rt", encoding="utf-8", newline="\n") as lines:
                for line in lines:
                    yield json.loads(line)["text"]
                    count += 1
        except (lzma.LZMAError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is corrupt after document {count} ({type(error).__name__}): {RESTORE}"
            ) from None
        if count != shard.samples:
            raise UserError(f"{path} holds {count} documents, its manifest says {shard.samples}: {RESTORE}")


def write_documents(path: Path, documents: Iterable[dict[str, str]]) -> Shard:
    """Write documents (``text``, ``source``) as xz-compressed JSON lines; same documents, same bytes."""
    count = 0
    with lzma.open(path, "wt", filters=_TEXT_FILTERS, encoding="utf-8", newline="\n") as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
            count += 1
    return Shard(path.name, count, sha256_file(path))
