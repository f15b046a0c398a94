"""The splits of shards: a manifest, as in data/, lists the files of each split, and a share is held out of any other
samples. A sample of shards with a manifest that cannot be used is an error."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmqk.data.shards.files import base_name, index_tar, is_remote, shard_names
from mmqk.data.shards.images import Dropped, load_image, open_image
from mmqk.data.shards.read import read_lines
from mmqk.data.shards.samples import document_of, json_of, pair_of, printable, text_of
from mmqk.store import DamagedFile, UserError, check_regular, hash_fraction, identity_hash, read_json, write_json

MANIFEST = "manifest.json"
IMAGE_SIZE = 64  # pixels
RESTORE = "restore it with git, or rebuild with python -m data.build"


@dataclass(frozen=True)
class Shard:
    """One file: its name in the folder, the number of samples (documents) in it, and its sha256."""

    file: str
    samples: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A folder's shards by split, in the order in which they are read, and free-form metadata on their origin."""

    splits: dict[str, tuple[Shard, ...]]
    about: dict[str, Any]


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str, record: str, advice: str) -> None:
    """Compare a file with the sha256 in a record.

    Raises:
        UserError: they differ. OSError: the file cannot be read.
    """
    if (digest := sha256_file(path)) != expected:
        raise UserError(f"{path} differs from {record} (sha256 {digest[:10]}, expected {expected[:10]}): {advice}")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into ``folder``."""
    splits = {split: [asdict(shard) for shard in shards] for split, shards in manifest.splits.items()}
    write_json(folder / MANIFEST, {**manifest.about, "splits": splits})


def load_manifest(folder: Path | str) -> Manifest:
    """Read ``manifest.json``.

    Raises:
        UserError: the file is missing, or is not a manifest.
    """
    path = Path(folder) / MANIFEST
    record = read_json(path, advice=RESTORE)
    if record is None:
        raise UserError(f"{path} is missing: {RESTORE}; your own shards become a token folder with mmqk data tokenize")
    try:
        splits = {
            split: tuple(Shard(s["file"], int(s["samples"]), s["sha256"]) for s in shards)
            for split, shards in record.pop("splits").items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(path, f"it is not a manifest: {error!r}", RESTORE) from None
    return Manifest(splits, record)


def manifest_hash(folder: Path | str) -> str:
    """Return the hash of a folder's samples: 10 hex digits over split, file, count and sha256 of every shard."""
    manifest = load_manifest(folder)
    return identity_hash({split: [asdict(s) for s in shards] for split, shards in manifest.splits.items()})


def checked_shards(folder: Path | str, split: str) -> list[tuple[Path, Shard]]:
    """Return the files of a split, after a comparison with the manifest.

    Raises:
        UserError: the manifest lacks the split, or a shard is missing or differs from the manifest.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    if split not in manifest.splits:
        splits = ", ".join(manifest.splits)
        raise UserError(f"{folder / MANIFEST} has no split {split!r}: choose one of {splits}")
    shards = []
    for shard in manifest.splits[split]:
        path = folder / shard.file
        check_regular(path)
        if not path.is_file():
            raise UserError(f"shard {path} is missing: {RESTORE}")
        try:
            check_sha256(path, shard.sha256, "its manifest", RESTORE)
        except OSError as error:
            raise UserError(f"shard {path} cannot be read ({error.strerror}): {RESTORE}") from None
        shards.append((path, shard))
    return shards


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


SHARE = 0.01
# Of a small set, this many samples are held out (a batch), but at most a third of the set.
LEAST = 16
# A set of this many samples is not small: SHARE holds out 40 of them on average, and fewer than LEAST of one set in
# 200,000.
FEW = 4000


def split_of(identity: bytes, val_fraction: float) -> str:
    """Return the split of a sample; equal content falls into the same split in every shard."""
    return "val" if hash_fraction(identity) < val_fraction else "train"


def default_share(fractions: Iterable[float]) -> float:
    """Return the share to hold out of samples whose `hash_fraction` is given: `SHARE`, or more for a small set.

    A sample is held out if its fraction is below the share, so equal samples stay in one split. At most half of the
    set is held out if samples are not all equal. Only the first `FEW` fractions are read.
    """
    few = list(islice(fractions, FEW))
    if len(few) < 2 or len(few) == FEW:
        return SHARE
    values, counts = np.unique(few, return_counts=True)
    held_out = np.cumsum(counts)  # with a share just above each value
    last = int(np.searchsorted(held_out, min(LEAST, max(1, len(few) // 3))))
    if last and held_out[last] > len(few) / 2:  # many samples are equal
        last -= 1
    return SHARE if held_out[last] == len(few) else max(SHARE, float(np.nextafter(values[last], 1)))


def fractions_of(
    samples: Iterable[tuple[str, Mapping[str, bytes]]], kind: str, caption_field: str | None = None
) -> Iterator[float]:
    """Yield the `hash_fraction` of each usable sample; the arguments are those of `document_of`."""
    for _, sample in samples:
        with suppress(Dropped):
            yield hash_fraction(document_of(sample, kind, caption_field)[0])


def small_set_sentence(share: float) -> str:
    """Return the sentence to print if `default_share` gave more than `SHARE`."""
    return f"the set is small: a share of {share:.2g} is held out for validation instead of {SHARE:g}"


def split_shards(pattern: str, val_fraction: float | None) -> tuple[list[str], list[str]]:
    """Return the names of the training shards and of the held-out shards.

    A manifest lists both. Of a pattern, a shard is held out if `hash_fraction` of its file name is below
    ``val_fraction`` (by default 0.01); if none is, the one with the smallest fraction.
    """
    folder = Path(pattern)
    if not is_remote(pattern) and (folder / MANIFEST).exists():
        splits = load_manifest(folder).splits
        train, val = ([str(folder / shard.file) for shard in splits.get(split, ())] for split in ("train", "val"))
        if not train or not val:
            raise UserError(f"{folder / MANIFEST} lists no shard of the splits train and val: write it again")
        return train, val
    names = shard_names(pattern)
    if len(names) < 2:
        raise UserError(
            f"{pattern} names one shard, but training and validation need one each: split it into several tars, or"
            " make a token folder with mmqk data tokenize"
        )
    fractions = [hash_fraction(base_name(name).encode()) for name in names]
    share = max(val_fraction or SHARE, float(np.nextafter(min(fractions), 1)))
    train = [name for name, fraction in zip(names, fractions, strict=True) if fraction >= share]
    if not train:
        raise UserError(
            f"{pattern} names {len(names)} shards, all of which are held out by the hash of their file names: lower"
            " data.val_fraction, or give them different names"
        )
    return train, [name for name, fraction in zip(names, fractions, strict=True) if fraction < share]


def stream_hash(pattern: str) -> str:
    """Return the identity of the shards (10 hex digits): the hash of the manifest, or of the names of the shards and
    of the sizes of local ones. No shard is read."""
    if not is_remote(pattern) and (Path(pattern) / MANIFEST).exists():
        return manifest_hash(pattern)
    sizes = [[base_name(name), None if is_remote(name) else os.stat(name).st_size] for name in shard_names(pattern)]
    return identity_hash({"shards": sizes})
