"""What tokenizers are trained and measured on: a folder with a manifest, or any tars of samples.

A folder has its own splits and images of one size. Of tars a share is held out by a hash of the image file,
so that copies of an image fall on one side whatever else is read, and images of any size are fitted.

Shapes: B images, C channels (RGB), H height, W width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmqk.progress import track
from mmqk.shards.images import Dropped, load_image
from mmqk.shards.manifest import MANIFEST, load_manifest, manifest_hash
from mmqk.shards.pairs import read_pairs
from mmqk.shards.samples import NO_IMAGE, NO_LISTS, interleaved_of, pair_of
from mmqk.shards.tars import TarIndex, expand, index_tar
from mmqk.shards.unread import Unread
from mmqk.store import UserError, hash_fraction, identity_hash
from mmqk.tokenizers.choice import Selection, account, dropped_account, spread
from mmqk.tokenizers.image_config import ImageTokenizerConfig

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Images:
    """Images of both splits in memory.

    Attributes:
        train_BCHW, val_BCHW: uint8, at least one image each.
        account: how many samples there were, were read and were dropped; empty if all were taken.
    """

    train_BCHW: Tensor
    val_BCHW: Tensor
    account: str


class Folder:
    """Pairs of a folder with a manifest, in order, each file compared with its hash."""

    def __init__(self, folder: Path, choice: Selection) -> None:
        self.folder, self.choice, self.name = folder, choice, str(folder)
        self.manifest = load_manifest(folder)

    def images(self, size: int) -> Images:
        """The images of both splits, or evenly spread ones of them.

        Raises:
            UserError: a split is missing or empty, a shard is damaged, or an image has another size.
        """
        train, val = (self.split_images(split, size) for split in SPLITS)
        total, taken = sum(map(self.manifest.count, SPLITS)), len(train) + len(val)
        return Images(train, val, account(taken, total, "images") if taken < total else "")

    def split_images(self, split: str, size: int) -> Tensor:
        """The images of one split, (B, 3, size, size) uint8; errors as `images`."""
        wanted: set[int] | None = None
        for place, pair in enumerate(read_pairs(self.folder, split)):
            if wanted is None:  # not earlier: reading tells of a split that is missing
                wanted = set(spread(self.manifest.count(split), self.choice.images).tolist())
                room = _room(len(wanted), size)
                count = 0
            if pair.image.size != (size, size):
                raise UserError(
                    f"Sample {pair.key} of {self.folder} is {pair.image.size}, not {size} px: resize it, or name"
                    " the tars themselves, whose images may be of any size."
                )
            if place in wanted:
                room[count] = _pixels(pair.image)
                count += 1
        if wanted is None:
            raise UserError(
                f"The {split} split of {self.folder} has no pairs: run `python -m data.build`."
            )
        return torch.from_numpy(room[:count])

    def captions(self) -> tuple[list[str], str]:
        """Captions of the train split, and an account of them, empty if all were taken."""
        found = [pair.caption for pair in read_pairs(self.folder, "train")]
        kept = [found[i] for i in spread(len(found), self.choice.captions)]
        return kept, account(len(kept), len(found), "captions") if len(kept) < len(found) else ""

    def identity(self) -> str:
        """Hash of the manifest, 10 hex digits."""
        return manifest_hash(self.folder)


class Tars:
    """Samples of tars without a manifest: pairs as img2dataset writes them, or interleaved documents."""

    def __init__(self, patterns: Sequence[str], choice: Selection) -> None:
        self.choice, self.name = choice, " ".join(patterns)
        self.paths = expand(patterns)

    @cached_property
    def indexes(self) -> list[TarIndex]:
        """Where every sample lies; a shard that is damaged or cut short is an error before any training."""
        return [index_tar(path) for path in track(self.paths, len(self.paths), "shards listed")]

    @property
    def total(self) -> int:
        """Number of samples."""
        return sum(map(len, self.indexes))

    def images(self, size: int) -> Images:
        """Images of samples spread evenly over all shards; of an interleaved document one.

        Raises:
            UserError: a shard is damaged, no image can be used, or none falls into one of the splits.
        """
        wanted = spread(self.total, self.choice.images)
        # Training images are filled in from the front, held-out ones from the back: no copy is needed.
        room, ends, dropped = _room(len(wanted), size), {"train": 0, "val": len(wanted)}, Counter[str]()
        fractions = []
        for turn, sample in self.read(wanted, "images"):
            try:
                identity, files, _ = parts_of(sample, self.choice.caption_field)
                if not files:
                    raise Dropped(NO_IMAGE)
                file = files[turn % len(files)]
                pixels = _pixels(load_image(file, size, self.choice.fit, self.choice.max_pixels))
            except Dropped as fault:
                dropped[fault.reason] += 1
                continue
            fractions.append(hash_fraction(identity))
            if fractions[-1] < self.choice.val_fraction:
                ends["val"] -= 1
                room[ends["val"]] = pixels
            else:
                room[ends["train"]] = pixels
                ends["train"] += 1
        said = account(len(wanted), self.total, "samples") + dropped_account(dropped) + self._unread()
        self._check(fractions, said)
        train, val = torch.from_numpy(room[: ends["train"]]), torch.from_numpy(room[ends["val"] :])
        return Images(train, val, said)

    def captions(self) -> tuple[list[str], str]:
        """Texts of training samples spread evenly over all shards, and an account of them.

        Raises:
            UserError: a shard is damaged, or there is not one text.
        """
        wanted = spread(self.total, self.choice.captions)
        found: list[str] = []
        dropped = Counter[str]()
        for _, sample in self.read(wanted, "captions"):
            try:
                identity, _, texts = parts_of(sample, self.choice.caption_field)
            except Dropped as fault:
                dropped[fault.reason] += 1
                continue
            if hash_fraction(identity) >= self.choice.val_fraction:
                found.extend(texts)
        said = account(len(wanted), self.total, "samples") + dropped_account(dropped) + self._unread()
        if not found:
            raise UserError(f"{self.name} has no captions to learn from ({said}): check the shards.")
        return found, said

    def read(self, wanted: np.ndarray, what: str) -> Iterator[tuple[int, Mapping[str, bytes]]]:
        """Samples by their places, ascending, over all shards end to end; each with its number among them."""
        first = np.cumsum([0, *map(len, self.indexes)])
        shards = np.searchsorted(first, wanted, side="right") - 1
        places = zip(shards.tolist(), (wanted - first[shards]).tolist(), strict=True)
        for turn, (shard, place) in enumerate(track(places, len(wanted), f"samples read for {what}")):
            yield turn, self.indexes[shard].read(place)

    def identity(self) -> str:
        """Hash of the shards' names, lengths and numbers of samples (not of their content), 10 hex digits."""
        shards = [[index.path.name, index.length, len(index)] for index in self.indexes]
        return identity_hash({"shards": shards})

    def _unread(self) -> str:
        """``, 2 files not read (in no sample: the name has no dot: 2)``; empty if all files are of samples."""
        unread = Unread()
        for index in self.indexes:
            unread.take(index.unread)
        reasons = ", ".join(f"{reason}: {n:,}" for reason, n in sorted(unread.counts.items()))
        return f", {unread.total:,} files not read ({reasons})" if reasons else ""

    def _check(self, fractions: list[float], said: str) -> None:
        share = self.choice.val_fraction
        if not fractions:
            raise UserError(f"{self.name} has no image that can be used ({said}): check the shards.")
        least, greatest = min(fractions), max(fractions)
        if least < share <= greatest:
            return
        what = "held out" if least >= share else "left to train on"
        enough = float(f"{1.05 * least:.3g}")  # above the least fraction, whatever the rounding
        better = f" or --val-fraction {enough:g}" if enough <= greatest else ""
        raise UserError(
            f"Of {len(fractions):,} images of {self.name} none is {what} at a share of {share:g}:"
            f" give more images{better}."
        )


Source = Folder | Tars


def open_source(shards: Sequence[str | Path] | str | Path, choice: Selection | None = None) -> Source:
    """A folder with a manifest, or patterns of tars.

    Raises:
        UserError: a pattern names no file, or the folder has no manifest.
    """
    names = [str(s) for s in ([shards] if isinstance(shards, str | Path) else shards)]
    choice = choice or Selection()
    if len(names) != 1 or names[0].endswith(".tar") or set("{*?[") & set(names[0]):
        return Tars(names, choice)
    folder = Path(names[0])
    if not (folder / MANIFEST).exists() and any(folder.glob("*.tar")):
        raise UserError(f"{folder} has no {MANIFEST}: name its files, such as '{folder / '*.tar'}'.")
    return Folder(folder, choice)


def parts_of(sample: Mapping[str, bytes], caption_field: str | None) -> tuple[bytes, list[bytes], list[str]]:
    """Identity, image files and texts of a pair or of an interleaved document.

    The identity decides the split, by the rule of `python -m mmqk.data.tokenize`: what is held out here is
    held out there.

    Raises:
        Dropped: it is neither.
    """
    try:
        image, caption = pair_of(sample, caption_field)
        return image, [image], [caption]
    except Dropped as fault:
        try:
            places = interleaved_of(sample)
        except Dropped as other:
            raise (fault if other.reason == NO_LISTS else other) from None
    files = [place for place in places if isinstance(place, bytes)]
    return sample["json"], files, [place for place in places if isinstance(place, str)]


def images_at_once(config: ImageTokenizerConfig) -> int:
    """Images to encode or decode in one go, as memory goes: 256 of 64 px, or 2**25 distances to codes."""
    pixels = 256 * 64**2 // config.image_size**2
    distances = 2**25 // (config.grid**2 * config.codes)
    return max(1, min(pixels, distances))


def _pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).transpose(2, 0, 1)


def _room(images: int, size: int) -> np.ndarray:
    try:
        return np.empty((images, 3, size, size), dtype=np.uint8)
    except MemoryError:
        needed = images * 3 * size**2 / 1e9
        raise UserError(
            f"{images:,} images of {size} px take {needed:.0f} GB: give a lower --images."
        ) from None
