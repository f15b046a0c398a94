"""What tests of shipped grids share: resolved runs, lengths of captions."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from mmqk.config import RunConfig, resolve
from mmqk.data.shards.manifest import read_pairs
from mmqk.data.tokenizers.files import TextTokenizer
from mmqk.lab.grid import Grid, load_grid
from mmqk.store import flatten

ROOT = Path(__file__).parents[3]


@cache
def resolved(path: str, seed: int) -> tuple[Grid, dict[str, RunConfig]]:
    """Return a grid of the repository, and the run of each of its arms with this seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        grid = load_grid(path)
        return grid, {job.arm: resolve(list(job.args)) for job in grid.jobs if job.seed == seed}


def unequal(a: RunConfig, b: RunConfig) -> set[str]:
    """Return the fields in which two whole configurations differ. If a mapping is empty in one of them, only the
    fields inside the mapping count."""
    flat_a, flat_b = flatten(a.nested()), flatten(b.nested())
    absent = object()
    return {
        name
        for name in flat_a.keys() | flat_b.keys()
        if flat_a.get(name, absent) != flat_b.get(name, absent) and {} not in (flat_a.get(name), flat_b.get(name))
    }


@cache
def caption_lengths() -> list[int]:
    text = TextTokenizer.load(ROOT / "data/tokenizers")
    return [len(text.encode(pair.caption)) for pair in read_pairs(ROOT / "data/emoji", "train")]


def mean_caption(room: int) -> float:
    """Return the mean number of tokens of a caption in the shipped pairs, cut to ``room`` tokens."""
    return sum(min(n, room) for n in caption_lengths()) / len(caption_lengths())


def targets_of_a_row(seq_len: int) -> dict[str, float]:
    """Return the mean number of targets in a row of the mix of three pairs and one text, from the captions and the
    layout of a row alone: of text, of images, and of text if the images are removed.

    A text row has a target for each of its tokens except ``<bos>``. A pair has targets for its caption, three special
    tokens and an image of 64 codes. A caption alone is followed by one special token.
    """
    beside, alone = mean_caption(seq_len - 68), mean_caption(seq_len - 2)
    of_text = 0.25 * (seq_len - 1)
    return {"text": 0.75 * (beside + 3) + of_text, "image": 0.75 * 64, "captions": 0.75 * (alone + 1) + of_text}
