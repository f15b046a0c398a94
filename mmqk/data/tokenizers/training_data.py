"""The training data of the tokenizers: images and texts of tars, of JSON lines and of folders with a manifest.

Shapes: B images, C channels (RGB), H height, W width.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from mmqk.data.shards.files import TarIndex, expand, index_tar
from mmqk.data.shards.images import MAX_PIXELS, Dropped, Fit, load_image
from mmqk.data.shards.manifest import MANIFEST, SHARE, checked_shards, default_share, fractions_of, split_of
from mmqk.data.shards.read import read_samples
from mmqk.data.shards.samples import LINE, NO_IMAGE, document_of, text_of
from mmqk.model.ranges import BELOW_ONE, check_fields, number
from mmqk.progress import track
from mmqk.store import UserError, find_file

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """The samples to use.

    Attributes:
        images: largest number of images in memory, for all tars together or for each split of a folder.
        captions: largest number of captions for the text tokenizer.
        characters: largest number of characters of documents for the text tokenizer.
        val_fraction: held-out share of the samples in tars and of the lines of JSON lines files; None for that of
            `mmqk.data.shards.manifest`.
        fit: how images are made square: crop, pad or stretch.
        max_pixels: largest number of pixels of an image; larger images are dropped.
        caption_field: field that has the caption of a sample, as for `pair_of`.
    """

    images: int = number(20_000, 1, 2**31)
    captions: int = number(200_000, 1, 2**31)
    characters: int = number(100_000_000, 1, 2**40)
    val_fraction: float | None = number(None, 1e-9, BELOW_ONE)
    fit: Fit = "crop"
    max_pixels: int = number(MAX_PIXELS, 1, 2**40)
    caption_field: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "")


def add_data_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments `--shards`, `--text` and one for each field of `Selection`."""
    c, add = Selection(), p.add_argument
    add("--shards", nargs="+", default=[str(find_file("data/emoji"))], help="folder or tars of pairs (data/emoji)")
    add("--text", nargs="+", default=[str(find_file("data/text"))], help="folder or JSON lines (data/text)")
    add("--images", type=int, default=c.images, help=f"largest number of images in memory ({c.images})")
    add("--captions", type=int, default=c.captions, help=f"largest number of captions ({c.captions})")
    add("--characters", type=int, default=c.characters, help=f"largest number of --text characters ({c.characters})")
    add_sample_arguments(p)


def add_sample_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments for reading the samples of tars and of JSON lines."""
    c, add = Selection(), p.add_argument
    share = f"share of samples in tars and of JSON lines to hold out, chosen by a hash ({SHARE}; more of a small set)"
    add("--val-fraction", type=float, help=share)
    add("--fit", choices=get_args(Fit), default=c.fit, help="how images of tars are made square (crop)")
    add("--max-pixels", type=int, default=MAX_PIXELS, help=f"drop images with more pixels ({MAX_PIXELS})")
    field = "JSON field of the caption, or txt for the text file (default: field caption, or else the text file)"
    add("--caption-field", metavar="NAME", help=field)


def selection_of(args: argparse.Namespace) -> Selection:
    """Return the `Selection` of a command line that has the arguments of `add_data_arguments`.

    Raises:
        UserError: a number is out of range.
    """
    with flags_named():
        return Selection(**{f.name: getattr(args, f.name) for f in fields(Selection)})


@contextmanager
def flags_named() -> Iterator[None]:
    """Turn the error of a field, whose message begins with the name of the field, into one of the flag."""
    try:
        yield
    except ValueError as error:
        name, _, why = str(error).partition(" ")
        raise UserError(f"--{name.replace('_', '-')} {why}") from error


def spread(total: int, most: int) -> np.ndarray:
    """Return ascending indices of at most `most` of `total` samples: a random one from each of `most` equal parts.

    The indices depend only on the arguments. A fixed stride could select images of one vendor only, if the images of
    three vendors alternate.
    """
    if total <= most:
        return np.arange(total)
    edges = np.arange(most + 1) * total // most
    return np.random.default_rng(0).integers(edges[:-1], edges[1:])


def _summary(read: int, total: int, dropped: Counter[str]) -> str:
    """Return a summary, ``200 of 1,000 samples read, 3 dropped (no caption: 1, no image file: 2)``; "" for all."""
    if read == total and not dropped:
        return ""
    text = f"{read:,} of {total:,} samples read" if read < total else f"{read:,} samples read"
    return text + _dropped(dropped)


def _dropped(counts: Counter[str]) -> str:
    reasons = ", ".join(f"{reason}: {n:,}" for reason, n in sorted(counts.items()))
    return f", {counts.total():,} dropped ({reasons})" if counts else ""


@dataclass(frozen=True)
class Images:
    """Images of both splits in memory.

    Attributes:
        train_BCHW, val_BCHW: uint8, at least one image each.
        summary: how many samples were read and dropped; empty if all were used.
    """

    train_BCHW: Tensor
    val_BCHW: Tensor
    summary: str


class Source:
    """Samples of a folder with a manifest, of tars (pairs as img2dataset writes them, or interleaved documents), or of
    JSON lines.

    Args:
        given: the folder, or paths or patterns of files; an empty name for none.
        selection: the samples to use.

    Attributes:
        name: all names as one text.
        folder: the folder, if it has a manifest.
        paths: otherwise the files.

    Raises:
        UserError: a pattern names no file, or the folder has no manifest.
    """

    def __init__(self, given: Sequence[str | Path] | str | Path, selection: Selection | None = None) -> None:
        names = [str(name) for name in ([given] if isinstance(given, str | Path) else given)]
        self.selection, self.name = selection or Selection(), " ".join(names)
        self.folder = Path(self.name) if self.name and (Path(self.name) / MANIFEST).exists() else None
        self.paths = expand(names) if self.name and self.folder is None else []

    @cached_property
    def indexes(self) -> dict[str, list[TarIndex]]:
        """The index of every shard by split, or by "" if a hash decides the split of a sample.

        Raises:
            UserError: a shard is missing, damaged, or differs from its manifest.
        """
        if (folder := self.folder) is None:
            paths = {"": self.paths}
        else:
            paths = {split: [path for path, _ in checked_shards(folder, split)] for split in ("train", "val")}
        return {
            split: [index_tar(path) for path in track(files, len(files), "shards listed")]
            for split, files in paths.items()
        }

    @cached_property
    def val_fraction(self) -> float:
        """The held-out share of the samples of tars."""
        if (given := self.selection.val_fraction) is not None:
            return given
        samples = itertools.chain.from_iterable(self.indexes[""])
        return default_share(fractions_of(samples, "", self.selection.caption_field))

    def images(self, size: int) -> Images:
        """Return the images of samples spread evenly over all shards; one image per interleaved document.

        Raises:
            UserError: a shard is damaged, no image can be used, or one of the splits gets no image.
        """
        import torch  # takes seconds, which --help does not need

        most, dropped = self.selection.images, Counter[str]()
        n = sum(min(most, sum(map(len, indexes))) for indexes in self.indexes.values())
        pixels_BCHW = np.empty((n, 3, size, size), dtype=np.uint8)
        # Training images fill the array from the front and held-out images from the back: no copy of them is needed.
        train, val = 0, n
        for turn, split, places in self._read(self.indexes, most, "images", dropped):
            files = [place for place in places if isinstance(place, bytes)]
            try:
                if not files:
                    raise Dropped(NO_IMAGE)
                file = files[turn % len(files)]
                image = load_image(file, size, self.selection.fit, self.selection.max_pixels)
            except Dropped as fault:
                dropped[fault.reason] += 1
                continue
            val -= split == "val"
            pixels_BCHW[val if split == "val" else train] = np.asarray(image).transpose(2, 0, 1)
            train += split == "train"
        total = sum(map(len, itertools.chain(*self.indexes.values())))
        read = _summary(n, total, dropped)
        if not train and val == n:
            raise UserError(f"{self.name} has no image that can be used ({read or 'no samples'}): check the shards.")
        if not train or val == n:
            where = "in the train split" if not train else "held out"
            share = f" at a share of {self.val_fraction:g}" if self.folder is None else ""
            raise UserError(
                f"None of the {train + n - val:,} images of {self.name} is {where}{share}: give more images, or"
                " another --val-fraction."
            )
        held_out_BCHW = np.ascontiguousarray(pixels_BCHW[val:][::-1])
        return Images(torch.from_numpy(pixels_BCHW[:train]), torch.from_numpy(held_out_BCHW), read)

    def captions(self) -> tuple[list[str], str]:
        """Return the texts of training samples spread evenly over all shards, and a summary that is empty if all
        samples were used.

        Raises:
            UserError: a shard is damaged, or no sample has a text.
        """
        indexes = {split: shards for split, shards in self.indexes.items() if split != "val"}
        dropped, most, total = Counter[str](), self.selection.captions, sum(map(len, *indexes.values()))
        samples = self._read(indexes, most, "captions", dropped)
        captions = [p for _, split, places in samples if split == "train" for p in places if isinstance(p, str)]
        read = _summary(min(most, total), total, dropped)
        if not captions:
            raise UserError(f"{self.name} has no captions ({read or 'no samples'}): check the shards.")
        return captions, read

    def documents(self) -> tuple[list[str], str]:
        """Return the texts of the train split of a folder or of JSON lines, and a summary of how many were read.

        The summary is empty if all documents were read. If the texts have more characters than the limit,
        only the beginning of each file is read, so that it is not decompressed to its end.

        Raises:
            UserError: a file is missing, damaged or truncated, or has no text.
        """
        left, dropped, share = self.selection.characters, Counter[str](), self.selection.val_fraction
        paths = self.paths
        if self.folder is not None:
            paths, share = [path for path, _ in checked_shards(self.folder, "train")], 0.0
        elif share is None:
            samples = itertools.chain.from_iterable(read_samples(path, "text") for path in paths)
            share = default_share(fractions_of(samples, "text"))
        cut, texts = 0, list[str]()
        for place, path in enumerate(paths):
            budget, taken = left // (len(paths) - place), 0
            for _, sample in read_samples(path, "text"):
                try:
                    text = text_of(sample[LINE])
                except Dropped as fault:
                    dropped[fault.reason] += 1
                    continue
                if split_of(text.encode(), share) == "val":
                    continue
                if taken >= budget:
                    cut += 1
                    break
                texts.append(text)
                taken += len(text)
            left -= taken
        read = f"{len(texts):,} documents read"
        if cut:
            read += f", only the beginning of {cut:,} of {len(paths):,} files (--characters)"
        read += _dropped(dropped)
        if paths and not texts:
            raise UserError(f'{self.name} has no documents ({read}): give JSON lines with a field "text".')
        return texts, read if cut or dropped else ""

    def _read(
        self, by_split: dict[str, list[TarIndex]], most: int, what: str, dropped: Counter[str]
    ) -> Iterator[tuple[int, str, list[bytes | str]]]:
        """Yield the number, the split, and the images and texts of at most ``most`` samples of each split."""
        for split, indexes in by_split.items():
            first = np.cumsum([0, *map(len, indexes)])
            places = spread(int(first[-1]), most)
            shards = np.searchsorted(first, places, side="right") - 1
            pairs = list(zip(shards.tolist(), (places - first[shards]).tolist(), strict=True))
            for turn, (shard, place) in enumerate(track(pairs, len(pairs), f"samples read for {what}")):
                sample = indexes[shard].read(place)
                try:
                    identity, parts = document_of(sample, "", self.selection.caption_field)
                except Dropped as fault:
                    dropped[fault.reason] += 1
                    continue
                yield turn, split or split_of(identity, self.val_fraction), parts
