"""Packing: choose which documents share a row, so that rows have little padding.

The combination of lengths in each row depends only on the lengths of the documents. Seed and epoch choose the
documents of these lengths, and the order of the rows. So every epoch has the same number of rows, each document is in
exactly one row, and any row can be computed from its number.
"""

from __future__ import annotations

import numpy as np

from mmqk.data.mixture import IndexedCache, random_stream

# A combination of lengths is used for at most 1 / VARIETY of the rows that it could fill. A larger number gives more
# varied rows.
VARIETY = 16


def fit(lengths_N: np.ndarray, room: int) -> list[np.ndarray]:
    """Choose the document lengths of each row: random lengths while the row has much room, then best fit.

    Best fit alone (Ding et al., 2404.10830) would join documents of equal length, which are similar: two in three
    rows of the shipped pairs would have captions of one length.

    Args:
        lengths_N: lengths of the documents, each from 1 to room.
        room: tokens of a row.

    Returns:
        The document lengths in each row, with a sum of at most ``room``. Each length of ``lengths_N`` is in
        exactly one row. The result is a pure function of the arguments.
    """
    counts = np.bincount(lengths_N, minlength=room + 1)
    random = random_stream(0)
    rows: list[np.ndarray] = []
    while len(left := np.flatnonzero(counts)):
        row = _combination(left, np.cumsum(counts[left]), counts, room, random)
        members, needed = np.array(list(row)), np.array(list(row.values()))
        times = max(1, int((counts[members] // needed).min()) // VARIETY)
        counts[members] -= times * needed
        rows += [np.repeat(members, needed)] * times
    return rows


def _combination(
    left: np.ndarray, places: np.ndarray, counts: np.ndarray, room: int, random: np.random.Generator
) -> dict[int, int]:
    """Return the number of documents of each length in one row.

    ``counts`` has the number of unused documents of each length, ``left`` the lengths with an unused document, and
    ``places`` the cumulative counts of these lengths.
    """
    row: dict[int, int] = {}
    space = room
    while space >= 2 * left[-1]:
        n = int(left[np.searchsorted(places, random.integers(places[-1]), side="right")])
        if row.get(n, 0) == counts[n]:
            break
        row[n] = row.get(n, 0) + 1
        space -= n
    place = len(left)
    while (place := min(place, int(np.searchsorted(left, space, side="right"))) - 1) >= 0:
        n = int(left[place])
        fits = min(int(counts[n]) - row.get(n, 0), space // n)
        if fits > 0:
            row[n] = row.get(n, 0) + fits
            space -= fits * n
    return row


class Packing(IndexedCache):
    """Rows that pack N documents, at least one. The rows are a pure function of the arguments.

    Args:
        lengths_N: tokens of each document.
        room: tokens of a row; no document is longer.
        seed: seed of the order.
        stream: random stream of this source under the seed.

    Attributes:
        padding: fraction of all positions that no document fills.
    """

    def __init__(self, lengths_N: np.ndarray, room: int, seed: int, stream: int) -> None:
        rows = fit(lengths_N, room)
        self.seed, self.stream = seed, stream
        self._ends_R = np.cumsum([len(row) for row in rows])
        slots_N = np.concatenate(rows)
        # A slot takes the next unused document of its length, so slots and documents are sorted by length.
        self._slots_by_length = np.argsort(slots_N, kind="stable")
        self._lengths_N = lengths_N
        self.padding = float(1 - lengths_N.sum() / (len(rows) * room))
        super().__init__(2)

    def __len__(self) -> int:
        return len(self._ends_R)

    def _make(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (order of the rows, document of every slot, random rank of every document) of an epoch."""
        random = random_stream(self.seed, self.stream, epoch)
        shuffled_N = random.permutation(len(self._lengths_N))
        by_length = shuffled_N[np.argsort(self._lengths_N[shuffled_N], kind="stable")]
        document_of_slot, rank_N = np.empty_like(by_length), np.empty_like(by_length)
        document_of_slot[self._slots_by_length] = by_length
        rank_N[shuffled_N] = np.arange(len(shuffled_N))
        return random.permutation(len(self._ends_R)), document_of_slot, rank_N

    def items(self, nth: int) -> list[int]:
        """Return the documents of row ``nth`` of the endless order, in random order within the row."""
        epoch, place = divmod(nth, len(self))
        order_R, document_of_slot, rank_N = self._kept(epoch)
        r = int(order_R[place])
        documents = document_of_slot[self._ends_R[r - 1] if r else 0 : self._ends_R[r]]
        return documents[np.argsort(rank_N[documents])].tolist()
