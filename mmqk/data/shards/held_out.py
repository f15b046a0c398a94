"""The share of the samples that is held out for validation if the user gives none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice

import numpy as np

from mmqk.data.shards.images import Dropped
from mmqk.data.shards.tars import TarIndex
from mmqk.store import hash_fraction

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


def default_share_of_tars(
    indexes: Iterable[TarIndex], identity: Callable[[Mapping[str, bytes]], bytes]
) -> float:
    """Return `default_share` of the samples of tars; a large set is recognized without reading its samples.

    Args:
        indexes: index of each archive; no further ones are read once they have `FEW` samples.
        identity: returns the bytes that decide the split of a sample, or raises Dropped.
    """
    small: list[TarIndex] = []
    for index in indexes:
        small.append(index)
        if sum(map(len, small)) >= FEW:
            return SHARE
    fractions = []
    for index in small:
        for _, sample in index:
            with suppress(Dropped):
                fractions.append(hash_fraction(identity(sample)))
    return default_share(fractions)


def small_set_sentence(share: float) -> str:
    """Return the sentence to print if `default_share` gave more than `SHARE`."""
    return f"the set is small: a share of {share:.2g} is held out for validation instead of {SHARE:g}"
