"""Selects samples from shards and documents, with a held-out share, and summarizes what was read and dropped."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, fields
from typing import get_args

import numpy as np

from mmqk.shards.images import MAX_PIXELS, Fit
from mmqk.store import UserError, find_file


@dataclass(frozen=True)
class Selection:
    """The samples to use.

    Attributes:
        images: largest number of images in memory: of all tars together, or of each split of a folder.
        captions: largest number of captions for the text tokenizer.
        characters: largest number of characters of documents for the text tokenizer.
        val_fraction: held-out share of tars and of files of JSON lines.
        fit: makes images of tars square: crop, pad or stretch.
        max_pixels: larger images of tars are dropped.
        caption_field: field of the captions in tars, as for `pair_of`.
    """

    images: int = 20_000
    captions: int = 200_000
    characters: int = 100_000_000
    val_fraction: float = 0.01
    fit: Fit = "crop"
    max_pixels: int = MAX_PIXELS
    caption_field: str | None = None


def add_data_arguments(p: argparse.ArgumentParser) -> None:
    """Add `--shards`, `--text` and the fields of `Selection`."""
    c, add = Selection(), p.add_argument
    add("--shards", nargs="+", default=[str(find_file("data/emoji"))], help="folder or tars of pairs (data/emoji)")
    add("--text", nargs="+", default=[str(find_file("data/text"))], help="folder or JSON lines (data/text)")
    add("--images", type=int, default=c.images, help=f"largest number of images in memory ({c.images})")
    add("--captions", type=int, default=c.captions, help=f"largest number of captions ({c.captions})")
    add("--characters", type=int, default=c.characters, help=f"most characters of --text ({c.characters})")
    share = f"held-out share of tars and JSON lines ({c.val_fraction})"
    add("--val-fraction", type=float, default=c.val_fraction, help=share)
    add("--fit", choices=get_args(Fit), default=c.fit, help="makes images of tars square (crop)")
    add("--max-pixels", type=int, default=MAX_PIXELS, help=f"larger images are dropped ({MAX_PIXELS})")
    add("--caption-field", metavar="NAME", help="field of the json; txt: the text file (caption, else txt)")


def selection_of(args: argparse.Namespace) -> Selection:
    """Return the `Selection` of a command line with `add_data_arguments`.

    Raises:
        UserError: a number is out of range.
    """
    for name in ("images", "captions", "characters", "max_pixels"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give 1 or more.")
    if not 0 < args.val_fraction < 1:
        raise UserError(f"--val-fraction is {args.val_fraction}: give a share between 0 and 1.")
    return Selection(**{f.name: getattr(args, f.name) for f in fields(Selection)})


def spread(total: int, most: int) -> np.ndarray:
    """Return ascending indices of at most `most` of `total` samples: a random one from each of `most` equal parts.

    A pure function of the arguments. A fixed stride would select images of one vendor where those of three alternate.
    """
    if total <= most:
        return np.arange(total)
    edges = np.arange(most + 1) * total // most
    return np.random.default_rng(0).integers(edges[:-1], edges[1:])


def summary(read: int, total: int, what: str) -> str:
    """Return how much was read: ``200 of 1,000 samples read``."""
    return f"{read:,} of {total:,} {what} read" if read < total else f"{read:,} {what} read"


def dropped_summary(dropped: Counter[str]) -> str:
    """Return what was dropped: ``, 3 dropped (no caption: 1, no image file: 2)``; empty without drops."""
    reasons = ", ".join(f"{reason}: {n:,}" for reason, n in sorted(dropped.items()))
    return f", {dropped.total():,} dropped ({reasons})" if dropped else ""
