"""What is taken of shards and documents, which of them is held out, and how that is said."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from typing import get_args

import numpy as np

from mmqk.shards.images import MAX_PIXELS, Fit
from mmqk.store import UserError


@dataclass(frozen=True)
class Selection:
    """What is taken of shards.

    Attributes:
        images: most images in memory: of tars altogether, of a folder by split.
        captions: most captions to learn words from.
        characters: most characters of documents to learn words from.
        val_fraction: share that is held out of tars and of files of JSON lines.
        fit: how images of tars are made square: crop, pad or stretch.
        max_pixels: larger images of tars are dropped.
        caption_field: where the captions of tars are, as for `pair_of`.
    """

    images: int = 20_000
    captions: int = 200_000
    characters: int = 100_000_000
    val_fraction: float = 0.01
    fit: Fit = "crop"
    max_pixels: int = MAX_PIXELS
    caption_field: str | None = None


def add_data_arguments(p: argparse.ArgumentParser) -> None:
    """`--shards`, `--text` and what is taken of them."""
    c = Selection()
    p.add_argument("--shards", nargs="+", default=["data/emoji"], help="folder or tars of pairs (data/emoji)")
    p.add_argument("--text", nargs="+", default=["data/text"], help="folder or JSON lines (data/text)")
    p.add_argument("--images", type=int, default=c.images, help=f"most images in memory ({c.images})")
    p.add_argument("--captions", type=int, default=c.captions, help=f"most captions read ({c.captions})")
    p.add_argument(
        "--characters", type=int, default=c.characters, help=f"most characters of --text ({c.characters})"
    )
    p.add_argument(
        "--val-fraction",
        type=float,
        default=c.val_fraction,
        help=f"held out of tars and JSON lines ({c.val_fraction})",
    )
    p.add_argument(
        "--fit", choices=get_args(Fit), default=c.fit, help="of images of tars into the square (crop)"
    )
    p.add_argument(
        "--max-pixels", type=int, default=MAX_PIXELS, help=f"of an image, larger is dropped ({MAX_PIXELS})"
    )
    p.add_argument(
        "--caption-field", metavar="NAME", help="of the json; txt: the text file (caption, else txt)"
    )


def choice_of(args: argparse.Namespace) -> Selection:
    """What `add_data_arguments` says about how much is taken.

    Raises:
        UserError: a number makes no sense.
    """
    for name in ("images", "captions", "characters", "max_pixels"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give 1 or more.")
    if not 0 < args.val_fraction < 1:
        raise UserError(f"--val-fraction is {args.val_fraction}: give a share between 0 and 1.")
    return Selection(
        images=args.images,
        captions=args.captions,
        characters=args.characters,
        val_fraction=args.val_fraction,
        fit=args.fit,
        max_pixels=args.max_pixels,
        caption_field=args.caption_field,
    )


def spread(total: int, most: int) -> np.ndarray:
    """Places of at most so many of `total` samples, ascending: one at random of each of as many equal parts.

    Always the same ones. A fixed step instead would take one vendor's images where three take turns.
    """
    if total <= most:
        return np.arange(total)
    edges = np.arange(most + 1) * total // most
    return np.random.default_rng(0).integers(edges[:-1], edges[1:])


def account(read: int, total: int, what: str) -> str:
    """``200 of 1,000 samples read``."""
    return f"{read:,} of {total:,} {what} read" if read < total else f"{read:,} {what} read"


def dropped_account(dropped: Counter[str]) -> str:
    """``, 3 dropped (no caption: 1, no image file: 2)``; empty if nothing was."""
    reasons = ", ".join(f"{reason}: {n:,}" for reason, n in sorted(dropped.items()))
    return f", {dropped.total():,} dropped ({reasons})" if dropped else ""
