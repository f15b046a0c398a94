"""The statistics of a dialled source, what can be had together, and which token is whose parent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from mmqk.data.synthetic.coupling import Coupling, coupling, unigram_entropy, zipf
from mmqk.ranges import MOST_SEED, check_fields, number
from mmqk.store import tag

_SLACK = 1e-9  # nats; a bound that the user computed may differ in the last digits
_INNER, _TIE = 0, 1  # roles of token orders: children of a parent and partners of a root follow unlike orders


@dataclass(frozen=True)
class DialConfig:
    """Statistics of a synthetic source. Every field by modality names the same modalities.

    To move the entropy gap and nothing else, move ``entropy``: unigrams, shares and the lag at which attention is
    useful stay, and so does the mean where one modality gains what the other loses. Modalities of equal numbers are
    copies of each other over disjoint tokens: a gap of exactly 0.

    Args:
        vocabulary: tokens of each modality; the order of names is the order of modalities in a document.
        skew: Zipf exponent of each unigram: p(rank r) ∝ r^-skew; 0 is uniform.
        entropy: of a token given its parent, nats.
        tokens: of each modality in a document.
        lag: distance from a token to its parent. 1: the token before says it; from 2 on attention must fetch it.
            The first ``lag`` tokens of a modality are roots; from ``tokens`` on all are: independent tokens.
        grid: 0 is a chain; a width is a grid of that many columns, read row by row, in which the parent stands
            ``lag`` rows above, or in the first rows ``lag`` columns to the left. Modalities left out are chains.
        mutual_information: of each modality and the one before it, nats a document; it lies in ties of their roots.
        order: of the modalities: forward, backward, or both: either for half of the documents, by chance.
        language: which random token orders the transitions follow; all seeds of a run share them.

    Raises:
        ValueError: numbers that cannot be had together, with the interval that can.
    """

    vocabulary: dict[str, int] = number(lambda: {"text": 128, "image": 128}, 2, 2**20)
    skew: dict[str, float] = number(lambda: {"text": 0.7, "image": 0.7}, 0.0, 10.0)
    entropy: dict[str, float] = number(lambda: {"text": 2.75, "image": 2.75}, -_SLACK, 14.0)
    tokens: dict[str, int] = number(lambda: {"text": 48, "image": 48}, 1, 2**20)
    lag: dict[str, int] = number(lambda: {"text": 4, "image": 4}, 1, 2**20)
    grid: dict[str, int] = number(dict, 0, 2**20)
    mutual_information: float = number(0.0, -_SLACK, 2e7)
    order: Literal["forward", "backward", "both"] = "both"
    language: int = number(0, 0, MOST_SEED)

    def __post_init__(self) -> None:
        check_fields(self, "data.dial")
        names = tuple(self.vocabulary)
        if not names:
            raise ValueError(
                "data.dial.vocabulary is empty: give the number of tokens of at least 1 modality."
            )
        try:
            for m in names:
                tag("loss", m)
        except ValueError as error:
            raise ValueError(f"data.dial.vocabulary cannot have such a modality: {error}.") from None
        for name in ("skew", "entropy", "tokens", "lag"):
            if set(getattr(self, name)) != set(names):
                raise ValueError(
                    f"data.dial.{name} has {_listed(getattr(self, name))} and data.dial.vocabulary has"
                    f" {_listed(names)}: give both the same modalities."
                )
        if not set(self.grid) <= set(names):
            raise ValueError(
                f"data.dial.grid has {_listed(self.grid)} and data.dial.vocabulary has {_listed(names)}:"
                " give it no other modalities."
            )
        for m in names:
            width = self.grid.get(m, 0)
            if width and self.tokens[m] % width:
                raise ValueError(
                    f"data.dial.grid.{m} is {width}: it lies between 0 (a chain) and {self.tokens[m]} and divides"
                    f" data.dial.tokens.{m}, which is {self.tokens[m]}."
                )
        for m in names:
            low, high = self.entropy_interval(m)
            given = f"with vocabulary {self.vocabulary[m]} and skew {self.skew[m]:g} "
            _within(f"entropy.{m}", self.entropy[m], low, high, given, " nats")
        most, given = self.greatest_mutual_information()
        _within("mutual_information", self.mutual_information, 0.0, most, given, " nats")

    @property
    def names(self) -> tuple[str, ...]:
        """Modalities in the order of the configuration."""
        return tuple(self.vocabulary)

    def unigram(self, m: str) -> tuple[int, float]:
        """Vocabulary and skew of a modality."""
        return self.vocabulary[m], float(self.skew[m])

    def inner(self, m: str) -> Coupling:
        """The coupling of parents and children inside a modality."""
        return coupling(self.unigram(m), self.unigram(m), self.language, _INNER)

    def tie(self, before: str, after: str) -> Coupling:
        """The coupling of the roots of two consecutive modalities."""
        return coupling(self.unigram(before), self.unigram(after), self.language, _TIE)

    def entropy_interval(self, m: str) -> tuple[float, float]:
        """Least and greatest feasible ``entropy`` of a modality, nats."""
        high = unigram_entropy(zipf(*self.unigram(m)))
        low = high - self.inner(m).greatest
        return (low if low > 1e-5 else 0.0), high  # what rounding leaves of 0 in uniform vocabularies

    def greatest_mutual_information(self) -> tuple[float, str]:
        """The greatest feasible ``mutual_information``, nats, and what makes it so in words."""
        best, given = math.inf, ""
        for before, after in pairwise(self.names):
            ties = self.ties(before, after)
            if (most := ties * self.tie(before, after).greatest) < best:
                best, given = most, f"with {ties} {'tie' if ties == 1 else 'ties'} of {before} and {after} "
        return (best, given) if given else (0.0, "with a single modality ")

    def ties(self, before: str, after: str) -> int:
        """Tied roots of two consecutive modalities."""
        return min(len(self.levels(m)[0].child) for m in (before, after))

    def levels(self, m: str) -> list[Level]:
        """The forest of a modality."""
        return forest(self.tokens[m], self.lag[m], self.grid.get(m, 0))


def _within(name: str, value: float, low: float, high: float, given: str, unit: str = "") -> None:
    # Bounds are printed a little inside of what is feasible, so that each works as it is printed.
    if not low - _SLACK <= value <= high + _SLACK:
        bounds = f"{_inside(low, math.ceil)} and {_inside(high, math.floor)}{unit}"
        raise ValueError(f"data.dial.{name} is {value}: {given}it lies between {bounds}.")


def _inside(bound: float, towards: Callable[[float], int]) -> str:
    return f"{towards(bound * 1e4) / 1e4:.4f}".rstrip("0").rstrip(".")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "no modality"


class Level(NamedTuple):
    """Tokens of one depth of a forest and their parents, as places within the modality; roots have none."""

    child: np.ndarray
    parent: np.ndarray


@lru_cache(maxsize=64)
def forest(tokens: int, lag: int, width: int) -> list[Level]:
    """Parents of a modality's tokens, by depth; roots first.

    A grid takes the parent above wherever there is one. All but its first rows then have one distance, ``lag`` times
    the width: how useful attention is does not vary from token to token, as it would if half of the parents stood to
    the left, one place before their child. The first rows pass one root's information on to every column.
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
