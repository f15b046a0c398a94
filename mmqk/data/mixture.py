"""Which kind of row is at each place of the order, and which items of that kind it has.

A *slot cycle* of 240 places contains every kind in its exact proportion, evenly spread; each cycle has a new order.
In any stretch of consecutive samples, the count of each kind differs from its expected count by only a few. The n-th
draw of a kind is the n-th item of the shuffled epochs of that kind, so a change of one weight does not change the
order within a kind. `Epochs` has one item in each row, `Packing` several documents. All are pure functions of their
arguments and a number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

CYCLE = 240
_MASK = 2**64 - 1
KINDS = ("pair", "text", "image", "interleaved", "tokens", "dial")
SLOTS = ("image_first", "caption_first", *KINDS[1:])


class Draw(NamedTuple):
    """One place of the order: ``slot`` names the kind of row, ``nth`` is its number among rows of that kind."""

    slot: str
    nth: int


def kind_of(slot: str) -> str:
    """Return the kind in ``data.mix`` that a slot belongs to."""
    return "pair" if slot in SLOTS[:2] else slot


def source_of(kind: str) -> str:
    """Return the kind of documents that rows of a kind are made of: image rows are made of pairs."""
    return "pair" if kind == "image" else kind


def random_stream(*key: int) -> np.random.Generator:
    """Return a random generator that depends on its key only."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def mixed(*key: int) -> int:
    """Return a number of 64 bits that depends on every integer of the key: splitmix64 (Steele et al., 2014) of each,
    chained."""
    value = 0
    for part in key:
        value = (value + part + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


def permuted(place: int, n: int, *key: int) -> int:
    """Return the image of ``place`` under a permutation of 0 to n - 1 that the key chooses, in constant memory.

    It is a Feistel network of four rounds over the next even number of bits, walked along its cycle until the image is
    below n (Black and Rogaway, 2002).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = place >> half, place & low
        for turn in range(4):
            left, right = right, left ^ (mixed(*key, turn, right) & low)
        place = left << half | right
        if place < n:
            return place


def apportion(weights: dict[str, float], places: int) -> dict[str, int]:
    """Return the number of places of each key, in proportion to its weight (largest-remainder method)."""
    total = sum(weights.values())
    exact = {k: w / total * places for k, w in weights.items()}
    counts = {k: int(v) for k, v in exact.items()}
    by_remainder = sorted(exact, key=lambda k: exact[k] - counts[k], reverse=True)
    for k in by_remainder[: places - sum(counts.values())]:
        counts[k] += 1
    return counts


class IndexedCache:
    """Caches the last results of ``_make``; a copy in another process starts with an empty cache."""

    _make: Callable[..., Any]
    _cached = 2  # number of results

    @cached_property
    def _kept(self) -> Callable[..., Any]:
        return lru_cache(maxsize=self._cached)(self._make)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}


class Mixture(IndexedCache):
    """The order of the kinds of samples in a run.

    Args:
        weights: relative weight of each kind of `KINDS`, at least 0; kinds left out have weight 0.
        image_first: share of pairs in which the image comes before its caption.
        seed: seed of the order.

    Attributes:
        counts: places of each slot in a cycle.

    Raises:
        ValueError: an unknown kind, no positive weight, or a weight too small for the cycle.
    """

    _cached = 64

    def __init__(self, weights: dict[str, float], image_first: float, seed: int):
        for kind in weights:
            if kind not in KINDS:
                raise ValueError(f"data.mix has the kind '{kind}': use {', '.join(KINDS)}.")
        if sum(weights.values()) <= 0:
            raise ValueError("data.mix has no positive weight: give at least one kind a weight above 0.")
        pair = weights.get("pair", 0.0)
        by_slot = {"image_first": pair * image_first, "caption_first": pair * (1 - image_first)}
        by_slot |= {kind: weights.get(kind, 0.0) for kind in KINDS[1:]}
        counts = apportion(by_slot, CYCLE)
        for slot, weight in by_slot.items():
            if weight > 0 and counts[slot] == 0:
                if slot in SLOTS[:2] and any(counts[other] for other in SLOTS[:2]):
                    raise ValueError(
                        f"data.image_first_prob {image_first} gives '{slot}' less than one row in {CYCLE}: set it to"
                        " 0 or 1, or farther from both."
                    )
                raise ValueError(
                    f"data.mix gives '{slot}' less than one row in {CYCLE}: raise its weight or set it to 0."
                )
        self.seed, self.counts = seed, counts
        self._counts = np.array([counts[s] for s in SLOTS])
        self._slots = np.repeat(np.arange(len(SLOTS)), self._counts)
        self._kth = np.concatenate([np.arange(n) for n in self._counts])

    def _make(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        # Place the k-th of the c samples of a kind at random within the k-th of c equal parts of the cycle.
        due = (self._kth + random_stream(self.seed, 0, cycle).random(CYCLE)) / self._counts[self._slots]
        slots = self._slots[np.argsort(due, kind="stable")]
        # Both orders of a pair draw from the same stream of pairs.
        source = np.where(slots <= 1, 0, slots)
        nth = np.empty(CYCLE, dtype=np.int64)
        for s in np.unique(source):
            places = np.flatnonzero(source == s)
            nth[places] = cycle * len(places) + np.arange(len(places))
        return slots, nth

    def draw(self, index: int) -> Draw:
        """Return the draw at place ``index`` of the run's order (from 0)."""
        slots, nth = self._kept(index // CYCLE)
        place = index % CYCLE
        return Draw(SLOTS[slots[place]], int(nth[place]))


# From this number of items on, the order of an epoch is computed item by item, in constant memory.
LARGE = 2**22


class Epochs(IndexedCache):
    """Endless epochs over ``n`` items, each epoch in a new order; ``item(nth)`` returns one draw as (epoch, item)."""

    def __init__(self, n: int, seed: int, stream: int):
        self.n, self.seed, self.stream = n, seed, stream

    def _make(self, epoch: int) -> np.ndarray:
        return random_stream(self.seed, self.stream, epoch).permutation(self.n)

    def __len__(self) -> int:
        return self.n

    def items(self, nth: int) -> list[int]:
        """Return a list with the one item of row ``nth``."""
        return [self.item(nth)[1]]

    def item(self, nth: int) -> tuple[int, int]:
        epoch, place = divmod(nth, self.n)
        if self.n >= LARGE:
            return epoch, permuted(place, self.n, self.seed, self.stream, epoch)
        return epoch, int(self._kept(epoch)[place])


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
