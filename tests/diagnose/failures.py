"""Failures of tiny runs for the tests of experiments; ``data.patch`` names `bad_sequences`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

BAD = range(150 * 4, 190 * 4)  # sequences of steps 151 to 190 of a run with batches of 4


def bad_sequences(rows, step, order):
    """Replace the tokens of the sequences `BAD` by random tokens, in whatever step they are read."""
    size, bad = sum(order.builder.layout.vocab_sizes.values()), _bad(order)
    return [
        replace(row, ids=np.random.default_rng(row.ids.sum()).integers(size, size=len(row.ids)))
        if row.ids.tobytes() in bad
        else row
        for row in rows
    ]


@lru_cache(maxsize=1)
def _bad(order):
    return {order.row(number).ids.tobytes() for number in BAD}
