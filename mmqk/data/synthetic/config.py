"""The configuration of the dial, the feasible ranges of its fields, and the parent of each token."""

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
_INNER, _TIE = 0, 1  # transitions and ties have different random token orders


@dataclass(frozen=True)
class DialConfig:
    """Statistics of a synthetic source. All dictionaries have the same modalities; only ``grid`` and ``target_noise``
    may leave some out.

    ``entropy`` changes only the entropy gap between modalities: unigrams, shares and lags do not change. The mean
    entropy of two modalities does not change either if one gains as many nats as the other loses. Modalities with
    equal values have equal statistics over disjoint tokens, so their gap is exactly 0.

    Args:
        vocabulary: number of ids of each modality; the order of names is the order of modalities in a document.
        skew: Zipf exponent of each unigram: p(rank r) ∝ r^-skew; 0 is uniform.
        entropy: entropy of a token given its parent, nats.
        tokens: number of tokens of each modality in a document.
        lag: distance from a token to its parent. With 1 the parent is the previous token; with 2 or more the model
            needs attention. The first ``lag`` tokens of a chain have no parent: they are roots. If the lag is at
            least ``tokens``, all tokens are roots and independent.
        grid: number of columns of a grid that is read row by row: the parent is ``lag`` rows above or, in the first
            ``lag`` rows, ``lag`` columns to the left. A modality with 0, or without an entry, is a chain.
        target_noise: fraction of the targets of a modality that are replaced by a token drawn from its unigram. The
            model predicts the replaced token, but it reads the original one at the next position. So the floor
            rises and the inputs do not change. A modality without an entry has no noise.
        mutual_information: mutual information of each modality and the modality before it, nats per document. All
            of it is between their tied roots.
        order: order of the modalities: forward, backward, or both (each in a random half of the documents).
        language: seed of the random token orders of the transitions, independent of the seed of the run.

    Raises:
        ValueError: infeasible values; the message has the feasible interval.
    """

    vocabulary: dict[str, int] = number(lambda: {"text": 128, "image": 128}, 2, 2**20)
    skew: dict[str, float] = number(lambda: {"text": 0.7, "image": 0.7}, 0.0, 10.0)
    entropy: dict[str, float] = number(lambda: {"text": 2.75, "image": 2.75}, -_SLACK, 14.0)
    tokens: dict[str, int] = number(lambda: {"text": 48, "image": 48}, 1, 2**20)
    lag: dict[str, int] = number(lambda: {"text": 4, "image": 4}, 1, 2**20)
    grid: dict[str, int] = number(dict, 0, 2**20)
    target_noise: dict[str, float] = number(dict, 0.0, 1.0)
    mutual_information: float = number(0.0, -_SLACK, 2e7)
    order: Literal["forward", "backward", "both"] = "both"
    language: int = number(0, 0, MOST_SEED)

    def __post_init__(self) -> None:
        check_fields(self, "data.dial")
        names = tuple(self.vocabulary)
        if not names:
            raise ValueError("data.dial.vocabulary is empty: give the number of ids of at least 1 modality.")
        try:
            for m in names:
                tag("loss", m)
        except ValueError as error:
            raise ValueError(f"data.dial.vocabulary has an invalid name: {error}.") from None
        for name in ("skew", "entropy", "tokens", "lag"):
            if set(getattr(self, name)) != set(names):
                raise ValueError(
                    f"data.dial.{name} has {_listed(getattr(self, name))} and data.dial.vocabulary has"
                    f" {_listed(names)}: use the same modalities in both."
                )
        for name in ("grid", "target_noise"):
            if not set(getattr(self, name)) <= set(names):
                raise ValueError(
                    f"data.dial.{name} has {_listed(getattr(self, name))} and data.dial.vocabulary has"
                    f" {_listed(names)}: use no other modalities."
                )
        for m in names:
            width = self.grid.get(m, 0)
            if width and self.tokens[m] % width:
                raise ValueError(
                    f"data.dial.grid.{m} is {width}: give 0 (a chain) or a divisor of data.dial.tokens.{m}, which is"
                    f" {self.tokens[m]}."
                )
        for m in names:
            low, high = self.entropy_interval(m)
            given = f"with vocabulary {self.vocabulary[m]} and skew {self.skew[m]:g} "
            _check(f"entropy.{m}", self.entropy[m], low, high, given)
        most, given = self.greatest_mutual_information()
        _check("mutual_information", self.mutual_information, 0.0, most, given)

    @property
    def names(self) -> tuple[str, ...]:
        """Modalities in the order of the configuration."""
        return tuple(self.vocabulary)

    def unigram(self, m: str) -> tuple[int, float]:
        """Return the vocabulary and skew of a modality."""
        return self.vocabulary[m], float(self.skew[m])

    def inner(self, m: str) -> Coupling:
        """Return the coupling of parents and children inside a modality."""
        return coupling(self.unigram(m), self.unigram(m), self.language, _INNER)

    def tie(self, before: str, after: str) -> Coupling:
        """Return the coupling of the roots of two consecutive modalities."""
        return coupling(self.unigram(before), self.unigram(after), self.language, _TIE)

    def entropy_interval(self, m: str) -> tuple[float, float]:
        """Return the least and greatest feasible ``entropy`` of a modality, nats."""
        high = unigram_entropy(zipf(*self.unigram(m)))
        low = high - self.inner(m).greatest
        return (low if low > 1e-5 else 0.0), high  # for uniform vocabularies low is 0 up to rounding

    def greatest_mutual_information(self) -> tuple[float, str]:
        """Return the greatest feasible ``mutual_information``, nats, and a phrase with the ties that limit it."""
        best, given = math.inf, ""
        for before, after in pairwise(self.names):
            ties = self.ties(before, after)
            if (most := ties * self.tie(before, after).greatest) < best:
                best, given = most, f"with {ties} {'tie' if ties == 1 else 'ties'} of {before} and {after} "
        return (best, given) if given else (0.0, "with a single modality ")

    def ties(self, before: str, after: str) -> int:
        """Return the number of tied roots of two consecutive modalities."""
        return min(len(self.levels(m)[0].child) for m in (before, after))

    def levels(self, m: str) -> list[Level]:
        """Return the forest of a modality."""
        return forest(self.tokens[m], self.lag[m], self.grid.get(m, 0))


def _check(name: str, value: float, low: float, high: float, given: str) -> None:
    # The printed bounds are rounded inwards, so that each is feasible.
    if not low - _SLACK <= value <= high + _SLACK:
        bounds = f"{_inside(low, math.ceil)} and {_inside(high, math.floor)} nats"
        raise ValueError(f"data.dial.{name} is {value}: {given}give a value between {bounds}.")


def _inside(bound: float, towards: Callable[[float], int]) -> str:
    return f"{towards(bound * 1e4) / 1e4:.4f}".rstrip("0").rstrip(".")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "no modality"


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
