"""Read samples to train and measure tokenizers, from a folder with a manifest or from any tars of samples.

A manifest lists the splits of its folder, whose images must have the size of the tokenizer. For tars, a hash of the
image file decides whether a sample is held out, so that copies of an image fall into one split. Images of tars are
fitted to the size of the tokenizer.

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

from mmqk.data.shards.held_out import default_share_of_tars
from mmqk.data.shards.images import Dropped, load_image
from mmqk.data.shards.manifest import MANIFEST, load_manifest, manifest_hash
from mmqk.data.shards.pairs import read_pairs
from mmqk.data.shards.samples import NO_IMAGE, NO_LISTS, Unread, interleaved_of, pair_of
from mmqk.data.shards.tars import TarIndex, expand, index_tar
from mmqk.data.tokenizers.choice import Selection, dropped_summary, spread, summary
from mmqk.data.tokenizers.files import ImageTokenizerConfig
from mmqk.progress import track
from mmqk.store import UserError, hash_fraction, identity_hash

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Images:
    """Images of both splits in memory.

    Attributes:
        train_BCHW, val_BCHW: uint8, at least one image each.
        summary: how many samples were read and dropped; empty if all images of a folder were used.
    """

    train_BCHW: Tensor
    val_BCHW: Tensor
    summary: str


class PairFolder:
    """Pairs of a folder with a manifest, in order; each file is compared with its hash in the manifest."""

    def __init__(self, folder: Path, selection: Selection) -> None:
        self.folder, self.selection, self.name = folder, selection, str(folder)
        self.manifest = load_manifest(folder)

    def images(self, size: int) -> Images:
        """Return the images of both splits, or an evenly spread sample of them.

        Raises:
            UserError: a split is missing or empty, a shard is damaged, or an image is not `size` x `size` pixels.
        """
        train, val = (self.split_images(split, size) for split in SPLITS)
        total, read = sum(map(self.manifest.count, SPLITS)), len(train) + len(val)
        return Images(train, val, summary(read, total, "images") if read < total else "")

    def split_images(self, split: str, size: int) -> Tensor:
        """Return the images of one split, (B, 3, size, size) uint8; raises the errors of `images`."""
        chosen: set[int] | None = None
        for place, pair in enumerate(read_pairs(self.folder, split)):
            if chosen is None:  # inside the loop, because manifest.count raises a KeyError for a missing split
                chosen = set(spread(self.manifest.count(split), self.selection.images).tolist())
                pixels = _empty(len(chosen), size)
                count = 0
            if pair.image.size != (size, size):
                raise UserError(
                    f"Sample {pair.key} of {self.folder} is {pair.image.size}, not {size} px: resize it, or give the"
                    " tar files, whose images may have any size."
                )
            if place in chosen:
                pixels[count] = _pixels(pair.image)
                count += 1
        if chosen is None:
            raise UserError(f"The {split} split of {self.folder} has no pairs: run `python -m data.build`.")
        return torch.from_numpy(pixels[:count])

    def captions(self) -> tuple[list[str], str]:
        """Return the captions of the train split, and a summary that is empty if all captions were used."""
        captions = [pair.caption for pair in read_pairs(self.folder, "train")]
        n, selected = len(captions), [captions[i] for i in spread(len(captions), self.selection.captions)]
        return selected, summary(len(selected), n, "captions") if len(selected) < n else ""

    def identity(self) -> str:
        """Return the hash of the manifest, 10 hex digits."""
        return manifest_hash(self.folder)


class Tars:
    """Samples of tars without a manifest: pairs as img2dataset writes them, or interleaved documents."""

    def __init__(self, patterns: Sequence[str], selection: Selection) -> None:
        self.selection, self.name = selection, " ".join(patterns)
        self.paths = expand(patterns)

    @cached_property
    def indexes(self) -> list[TarIndex]:
        """The index of every shard; a damaged shard is an error before any training."""
        return [index_tar(path) for path in track(self.paths, len(self.paths), "shards listed")]

    @property
    def total(self) -> int:
        """Number of samples."""
        return sum(map(len, self.indexes))

    @cached_property
    def val_fraction(self) -> float:
        """The held-out share of the samples."""
        if (given := self.selection.val_fraction) is not None:
            return given
        field = self.selection.caption_field
        return default_share_of_tars(self.indexes, lambda sample: parts_of(sample, field)[0])

    def images(self, size: int) -> Images:
        """Return the images of samples spread evenly over all shards; one image per interleaved document.

        Raises:
            UserError: a shard is damaged, no image can be used, or one of the splits gets no image.
        """
        indices = spread(self.total, self.selection.images)
        # Training images fill the array from the front and held-out images from the back, so no copy is needed.
        pixels, n_train, val_start = _empty(len(indices), size), 0, len(indices)
        fractions, dropped = [], Counter[str]()
        for turn, sample in self.read(indices, "images"):
            try:
                identity, files, _ = parts_of(sample, self.selection.caption_field)
                if not files:
                    raise Dropped(NO_IMAGE)
                file = files[turn % len(files)]
                image = _pixels(load_image(file, size, self.selection.fit, self.selection.max_pixels))
            except Dropped as fault:
                dropped[fault.reason] += 1
                continue
            fractions.append(hash_fraction(identity))
            if fractions[-1] < self.val_fraction:
                val_start -= 1
                pixels[val_start] = image
            else:
                pixels[n_train] = image
                n_train += 1
        read = self._summary(len(indices), dropped)
        self._check(fractions, read)
        return Images(torch.from_numpy(pixels[:n_train]), torch.from_numpy(pixels[val_start:]), read)

    def captions(self) -> tuple[list[str], str]:
        """Return the texts of training samples spread evenly over all shards, and a summary.

        Raises:
            UserError: a shard is damaged, or no sample has a text.
        """
        indices = spread(self.total, self.selection.captions)
        captions: list[str] = []
        dropped = Counter[str]()
        for _, sample in self.read(indices, "captions"):
            try:
                identity, _, texts = parts_of(sample, self.selection.caption_field)
            except Dropped as fault:
                dropped[fault.reason] += 1
                continue
            if hash_fraction(identity) >= self.val_fraction:
                captions.extend(texts)
        read = self._summary(len(indices), dropped)
        if not captions:
            raise UserError(f"{self.name} has no captions ({read}): check the shards.")
        return captions, read

    def read(self, indices: np.ndarray, what: str) -> Iterator[tuple[int, Mapping[str, bytes]]]:
        """Yield the samples at ascending `indices` over all shards, each with its position in `indices`."""
        first = np.cumsum([0, *map(len, self.indexes)])
        shards = np.searchsorted(first, indices, side="right") - 1
        places = zip(shards.tolist(), (indices - first[shards]).tolist(), strict=True)
        for turn, (shard, place) in enumerate(track(places, len(indices), f"samples read for {what}")):
            yield turn, self.indexes[shard].read(place)

    def identity(self) -> str:
        """Return the hash of the names, lengths and sample counts of the shards, but not of their content. The hash
        has 10 hex digits."""
        shards = [[index.path.name, index.length, len(index)] for index in self.indexes]
        return identity_hash({"shards": shards})

    def _summary(self, read: int, dropped: Counter[str]) -> str:
        """Return a summary such as ``9 samples read, 1 dropped (...), 2 files not read (in no sample: ...)``."""
        text = summary(read, self.total, "samples") + dropped_summary(dropped)
        unread = Unread()
        for index in self.indexes:
            unread.take(index.unread)
        reasons = ", ".join(f"{reason}: {n:,}" for reason, n in sorted(unread.counts.items()))
        return text + (f", {unread.total:,} files not read ({reasons})" if reasons else "")

    def _check(self, fractions: list[float], read: str) -> None:
        """Raise UserError if a split has no image."""
        share = self.val_fraction
        if not fractions:
            raise UserError(f"{self.name} has no image that can be used ({read}): check the shards.")
        least, greatest = min(fractions), max(fractions)
        if least < share <= greatest:
            return
        split = "held out" if least >= share else "in the train split"
        enough = float(f"{1.05 * least:.3g}")  # still above the smallest fraction after the rounding
        better = f" or --val-fraction {enough:g}" if enough <= greatest else ""
        raise UserError(
            f"None of the {len(fractions):,} images of {self.name} is {split} at a share of {share:g}:"
            f" give more images{better}."
        )


Source = PairFolder | Tars


def open_source(shards: Sequence[str | Path] | str | Path, selection: Selection | None = None) -> Source:
    """Open a folder with a manifest, or tars that are given by path or pattern.

    Raises:
        UserError: a pattern names no file, or the folder has no manifest.
    """
    names = [str(s) for s in ([shards] if isinstance(shards, str | Path) else shards)]
    selection = selection or Selection()
    if len(names) != 1 or not Path(names[0]).is_dir():
        return Tars(names, selection)
    folder = Path(names[0])
    if not (folder / MANIFEST).exists() and any(folder.glob("*.tar")):
        raise UserError(f"{folder} has no {MANIFEST}: name its files, such as '{folder / '*.tar'}'.")
    return PairFolder(folder, selection)


def parts_of(sample: Mapping[str, bytes], caption_field: str | None) -> tuple[bytes, list[bytes], list[str]]:
    """Return the identity, image files and texts of a pair or of an interleaved document.

    The identity decides the split by the rule of `python -m mmqk.data.tokenize`, which holds out the same samples.

    Raises:
        Dropped: the sample is neither a pair nor an interleaved document.
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
    """Return the number of images to encode or decode at once, which bounds memory.

    Together these images have at most as many pixels as 256 images of 64 px, and at most 2**25 distances to codes.
    """
    pixels = 256 * 64**2 // config.image_size**2
    distances = 2**25 // (config.grid**2 * config.codes)
    return max(1, min(pixels, distances))


def _pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).transpose(2, 0, 1)


def _empty(images: int, size: int) -> np.ndarray:
    try:
        return np.empty((images, 3, size, size), dtype=np.uint8)
    except MemoryError:
        needed = images * 3 * size**2 / 1e9
        raise UserError(f"{images:,} images of {size} px need {needed:.0f} GB: give a lower --images.") from None
