"""Packing: which documents share a row, so that rows are full.

The lengths alone decide which lengths go together, once, by best fit on the decreasing lengths; a seed and an
epoch decide which documents of each length those are, and in which order the rows come. So every epoch has the
same number of rows, each document stands in exactly one of them, and any row can be asked for by its number.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mmqk.data.mix import random_stream


def fit(lengths_N: np.ndarray, room: int) -> list[np.ndarray]:
    """Lengths that share a row, row by row: best fit on decreasing lengths (each row filled as far as it goes).

    Args:
        lengths_N: of the documents, each 1 to room.
        room: tokens of a row.

    Returns:
        For every row the lengths in it, whose sum is at most ``room``; all of them together are ``lengths_N``.
    """
    counts = np.bincount(lengths_N, minlength=room + 1)
    if len(counts) > room + 1:
        raise ValueError(f"a document of {len(counts) - 1} tokens is longer than a row of {room}.")
    # The lengths that are left, in a form that finds the largest one up to a limit.
    left = [n for n in range(1, room + 1) if counts[n]]
    rows: list[np.ndarray] = []
    while left:
        space, row = room, []
        while left and (place := int(np.searchsorted(left, space, side="right")) - 1) >= 0:
            n = left[place]
            fits = min(int(counts[n]), space // n)
            row += [n] * fits
            counts[n] -= fits
            space -= fits * n
            if not counts[n]:
                del left[place]
        # The same combination again and again, as long as there is enough of each of its lengths.
        members, needed = np.unique(row, return_counts=True)
        times = int((counts[members] // needed).min())
        counts[members] -= times * needed
        left = [n for n in left if counts[n]] if times else left
        rows += [np.array(row)] * (times + 1)
    return rows


class Packing:
    """Rows of several documents out of N, the same for everyone who asks.

    Args:
        lengths_N: tokens of each document.
        room: tokens of a row; no document is longer.
        seed: of the order.
        stream: that tells this source from others of the seed.

    Attributes:
        padding: share of the places of all rows that no document fills.
    """

    def __init__(self, lengths_N: np.ndarray, room: int, seed: int, stream: int) -> None:
        if not len(lengths_N):
            raise ValueError("there are no samples of a kind that data.mix asks for.")
        rows = fit(lengths_N, room)
        self.seed, self.stream = seed, stream
        self._ends_R = np.cumsum([len(row) for row in rows])
        slots_N = np.concatenate(rows)
        # Slot s takes the next unused document of its length: documents by length, and slots by length.
        self._slots_by_length = np.argsort(slots_N, kind="stable")
        self._lengths_N = lengths_N
        self.padding = float(1 - lengths_N.sum() / (len(rows) * room))
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def __len__(self) -> int:
        return len(self._ends_R)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(order of the rows, document of every slot, rank of every document) of an epoch."""
        random = random_stream(self.seed, self.stream, epoch)
        shuffled_N = random.permutation(len(self._lengths_N))
        by_length = shuffled_N[np.argsort(self._lengths_N[shuffled_N], kind="stable")]
        document_of_slot, rank_N = np.empty_like(by_length), np.empty_like(by_length)
        document_of_slot[self._slots_by_length] = by_length
        rank_N[shuffled_N] = np.arange(len(shuffled_N))
        return random.permutation(len(self._ends_R)), document_of_slot, rank_N

    def row(self, nth: int) -> np.ndarray:
        """The documents of the n-th row of the endless order of epochs, those of a row in random order."""
        epoch, place = divmod(nth, len(self))
        order_R, document_of_slot, rank_N = self._epoch(epoch)
        r = int(order_R[place])
        documents = document_of_slot[self._ends_R[r - 1] if r else 0 : self._ends_R[r]]
        return documents[np.argsort(rank_N[documents])]
