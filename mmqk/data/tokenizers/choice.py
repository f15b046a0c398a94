"""Select samples of shards and documents, and summarize how many were read and dropped."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, fields
from typing import get_args

import numpy as np

from mmqk.data.shards.held_out import SHARE
from mmqk.data.shards.images import MAX_PIXELS, Fit
from mmqk.store import UserError, find_file


@dataclass(frozen=True)
class Selection:
    """The samples to use.

    Attributes:
        images: largest number of images in memory, for all tars together or for each split of a folder.
        captions: largest number of captions for the text tokenizer.
        characters: largest number of characters of documents for the text tokenizer.
        val_fraction: held-out share of the samples in tars and of the lines of JSON lines files; None for that of
            `mmqk.data.shards.held_out`.
        fit: how images of tars are made square: crop, pad or stretch.
        max_pixels: largest number of pixels of an image in a tar; larger images are dropped.
        caption_field: field that has the caption of a sample in a tar, as for `pair_of`.
    """

    images: int = 20_000
    captions: int = 200_000
    characters: int = 100_000_000
    val_fraction: float | None = None
    fit: Fit = "crop"
    max_pixels: int = MAX_PIXELS
    caption_field: str | None = None


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
    for name in ("images", "captions", "characters", "max_pixels"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give 1 or more.")
    if args.val_fraction is not None and not 0 < args.val_fraction < 1:
        raise UserError(f"--val-fraction is {args.val_fraction}: give a share between 0 and 1.")
    return Selection(**{f.name: getattr(args, f.name) for f in fields(Selection)})


def spread(total: int, most: int) -> np.ndarray:
    """Return ascending indices of at most `most` of `total` samples: a random one from each of `most` equal parts.

    The indices depend only on the arguments. A fixed stride could select images of one vendor only, if the images of
    three vendors alternate.
    """
    if total <= most:
        return np.arange(total)
    edges = np.arange(most + 1) * total // most
    return np.random.default_rng(0).integers(edges[:-1], edges[1:])


def summary(read: int, total: int, what: str) -> str:
    """Return how many samples were read: ``200 of 1,000 samples read``."""
    return f"{read:,} of {total:,} {what} read" if read < total else f"{read:,} {what} read"


def dropped_summary(dropped: Counter[str]) -> str:
    """Return how many samples were dropped: ``, 3 dropped (no caption: 1, no image file: 2)``; empty for none."""
    reasons = ", ".join(f"{reason}: {n:,}" for reason, n in sorted(dropped.items()))
    return f", {dropped.total():,} dropped ({reasons})" if dropped else ""
