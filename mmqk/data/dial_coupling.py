"""The parts of the dial: pairs of tokens with a chosen mutual information and exact marginals, and parents of tokens.

The distribution of a pair of tokens (a, b) with unigrams π_a and π_b is J = ρ N + (1−ρ) π_a π_bᵀ. N is the
north-west-corner (quantile) coupling: the tokens of each unigram are intervals of [0, 1) in a fixed random order, and
N(i, j) is the length of the overlap of the intervals of a = i and b = j. J has the marginals π_a and π_b for every ρ,
and its mutual information grows from 0 at ρ = 0 to that of N at ρ = 1.

Probabilities are whole multiples of 2⁻⁵², so sums, intervals and marginals are exact in float64.
Shapes: V vocabulary, S segments (pairs with N(i, j) > 0), N (in names such as ``place_N``) number of drawn pairs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mmqk.data.mixture import random_stream

UNITS = 2**52  # sum of the probabilities of a unigram
_ORDERS = 102  # random stream of the token orders; the order of samples uses other streams


@lru_cache(maxsize=32)
def zipf(vocabulary: int, skew: float) -> np.ndarray:
    """Return the unigram p(id) ∝ (id + 1)^−skew in whole units of 2⁻⁵², at least one per id: units_V, int64."""
    weight_V = (np.arange(vocabulary) + 1.0) ** -skew
    units_V = np.maximum(1, np.floor(weight_V / weight_V.sum() * UNITS).astype(np.int64))
    left = int(UNITS - units_V.sum())
    # Rounding leaves some units over. Give one each to the first ids, so that equal probabilities stay as equal as
    # possible; otherwise an entropy of 0 is not feasible.
    units_V[: max(0, left) % vocabulary] += 1
    units_V[0] += UNITS - units_V.sum()
    units_V.flags.writeable = False
    return units_V


def unigram_entropy(units_V: np.ndarray) -> float:
    """Return the entropy of a unigram, nats."""
    p_V = units_V / UNITS
    return float(-(p_V * np.log(p_V)).sum())


class Coupling:
    """The coupling N of two unigrams with given orders of the intervals.

    Args:
        units_a_V, units_b_V: unigrams in whole units (see `zipf`).
        order_a_V, order_b_V: token ids in the order of their intervals.

    Attributes:
        low_a_V, high_a_V, low_b_V, high_b_V: the interval of each token id, exact.
        transitions: number of pairs with N > 0, at most V_a + V_b − 1.
        greatest: mutual information of N, nats.
    """

    def __init__(self, units_a_V: np.ndarray, units_b_V: np.ndarray, order_a_V: np.ndarray, order_b_V: np.ndarray):
        ends_a_V, self.low_a_V, self.high_a_V = _intervals(units_a_V, order_a_V)
        ends_b_V, self.low_b_V, self.high_b_V = _intervals(units_b_V, order_b_V)
        # The last interval has no end, so that it contains numbers that were rounded to 1.
        self._inner_b_V, self._order_b_V = ends_b_V[:-1] / UNITS, order_b_V
        ends_S = np.union1d(ends_a_V, ends_b_V)
        a_S = order_a_V[np.searchsorted(ends_a_V, ends_S)]
        b_S = order_b_V[np.searchsorted(ends_b_V, ends_S)]
        self._coupled_S = np.diff(ends_S, prepend=0) / UNITS
        self._product_S = units_a_V[a_S] / UNITS * (units_b_V[b_S] / UNITS)
        # Do not count overlaps of a few units: they come from rounding, between tokens of equal probability.
        self.transitions = int((self._coupled_S > (len(units_a_V) + len(units_b_V)) / UNITS).sum())
        self.greatest = self.information(1.0)

    def information(self, rho: float) -> float:
        """Return the mutual information of J, nats; convex and increasing in ρ, 0 at ρ = 0."""
        # All pairs with N = 0 have the same ratio J / (π_a π_b) = 1 − ρ, so a sum over all V² pairs is not needed.
        ratio_S = rho * self._coupled_S / self._product_S + (1 - rho)
        outside = (1 - rho) * (1 - self._product_S.sum())
        rest = outside * np.log1p(-rho) if rho < 1 else 0.0
        return float((self._product_S * ratio_S * np.log(ratio_S)).sum() + rest)

    def draw_b(self, place_N: np.ndarray) -> np.ndarray:
        """Return, for each number of ``place_N``, the token of b whose interval contains it. The numbers are in
        [0, 1)."""
        return self._order_b_V[np.searchsorted(self._inner_b_V, place_N, side="right")]

    def solve(self, information: float) -> float:
        """Return the ρ with this mutual information (between 0 and ``greatest``, nats), exact to the last bit."""
        if information <= 0:
            return 0.0
        if information >= self.greatest:
            return 1.0
        low, high = 0.0, 1.0
        while low < (middle := (low + high) / 2) < high:
            low, high = (middle, high) if self.information(middle) < information else (low, middle)
        return high


def _intervals(units_V: np.ndarray, order_V: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ends_V = np.cumsum(units_V[order_V])
    low_V, high_V = np.empty(len(units_V)), np.empty(len(units_V))
    high_V[order_V] = ends_V / UNITS
    low_V[order_V] = (ends_V - units_V[order_V]) / UNITS
    return ends_V, low_V, high_V


@lru_cache(maxsize=8)
def coupling(a: tuple[int, float], b: tuple[int, float], language: int, role: int) -> Coupling:
    """Return the coupling of two unigrams, each (vocabulary, skew), in the random token orders of (language, role).

    Equal arguments give equal orders, so modalities with equal vocabulary, skew and entropy have equal statistics.
    """
    orders = (random_stream(language, _ORDERS, role, side).permutation(v) for side, (v, _) in enumerate((a, b)))
    return Coupling(zipf(*a), zipf(*b), *orders)


class Edge:
    """The joint distribution J of a parent token and its child.

    Args:
        coupling: the coupling N, with its unigrams.
        information: mutual information of J, nats, between 0 and ``coupling.greatest``.
    """

    def __init__(self, coupling: Coupling, information: float):
        self.coupling, self.rho = coupling, coupling.solve(information)
        self.information = coupling.information(self.rho)
        # Half a unit less than the parent's interval, so that rounding cannot move a number out of this interval.
        self._width_V = coupling.high_a_V - coupling.low_a_V - 0.5 / UNITS

    def noisy(self, share: float) -> Edge:
        """Return the distribution in which a fraction ``share`` of the tokens on one side is drawn anew from its
        unigram: the same coupling with (1 − share) ρ."""
        return Edge(self.coupling, self.coupling.information((1 - share) * self.rho)) if share else self

    def draw(self, parent_N: np.ndarray, uniform_N: np.ndarray) -> np.ndarray:
        """Return a child of each parent, drawn with one uniform random number in [0, 1) per parent."""
        if self.rho == 0:
            return self.coupling.draw_b(uniform_N)
        place_N = uniform_N * (1 / self.rho)
        place_N *= self._width_V[parent_N]
        place_N += self.coupling.low_a_V[parent_N]
        if self.rho < 1:
            free_N = (uniform_N - self.rho) * (1 / (1 - self.rho))
            place_N = np.where(free_N < 0, place_N, free_N)
        return self.coupling.draw_b(place_N)

    def gain(self, a_N: np.ndarray, b_N: np.ndarray) -> np.ndarray:
        """Return log(J(a, b) / (π_a π_b)), nats: the information that one token of a pair gives about the other.

        It is −inf for an impossible pair.
        """
        c = self.coupling
        low_a_N, high_a_N = c.low_a_V[a_N], c.high_a_V[a_N]
        low_b_N, high_b_N = c.low_b_V[b_N], c.high_b_V[b_N]
        common_N = np.minimum(high_a_N, high_b_N) - np.maximum(low_a_N, low_b_N)
        np.maximum(common_N, 0, out=common_N)
        common_N *= self.rho
        common_N /= high_a_N - low_a_N
        common_N /= high_b_N - low_b_N
        common_N += 1 - self.rho
        with np.errstate(divide="ignore"):
            return np.log(common_N, out=common_N)


class Level(NamedTuple):
    """Tokens of one depth of a forest and their parents, as positions within the modality; a root has parent -1."""

    child: np.ndarray
    parent: np.ndarray


@lru_cache(maxsize=64)
def forest(tokens: int, lag: int, width: int) -> list[Level]:
    """Return the parents of the tokens of a modality, by depth; roots first.

    In a grid the parent is ``lag`` rows above, so that every token has the same distance to its parent. In the first
    ``lag`` rows the parents are to the left, which connects the columns.
    """
    place = np.arange(tokens)
    if width:
        row, column = np.divmod(place, width)
        parent = np.where(row >= lag, place - lag * width, np.where(column >= lag, place - lag, -1))
    else:
        parent = np.where(place >= lag, place - lag, -1)
    depth = np.zeros(tokens, dtype=np.int64)
    for t in np.flatnonzero(parent >= 0):
        depth[t] = depth[parent[t]] + 1
    return [Level(place[depth == d], parent[depth == d]) for d in range(depth.max() + 1)]
