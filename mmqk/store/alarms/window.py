"""The base class of rules over one series, and sliding windows: median and quartiles, mean and standard deviation.

Their state is plain data. Results after a resume from this state are bit-identical.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from typing import Any


class Rule:
    """A rule over one series.

    Attributes:
        STATE: names of the attributes that form the state. Each is plain data, or an object with a `state_dict`.
        on: whether the condition held at the last value.
    """

    STATE: tuple[str, ...] = ("on",)
    on = False

    def begins(self, holds: bool) -> bool:
        """Return whether an alarm begins: the condition holds now and did not hold at the previous value."""
        began, self.on = holds and not self.on, holds
        return began

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, as plain data."""
        values = {name: getattr(self, name) for name in self.STATE}
        return {
            k: v.state_dict() if hasattr(v, "state_dict") else copy.deepcopy(v) for k, v in values.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        for name in self.STATE:
            if hasattr(value := getattr(self, name), "load_state_dict"):
                value.load_state_dict(state[name])
            else:
                setattr(self, name, copy.deepcopy(state[name]))


# Ratio of the interquartile range to the standard deviation of a normal distribution.
QUARTILES_TO_STD = 1.349


class Window:
    """The last ``size`` values, in order of arrival and in sorted order."""

    def __init__(self, size: int):
        self.size = size
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    @property
    def full(self) -> bool:
        return len(self._order) == self.size

    def push(self, value: float) -> None:
        if self.full:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(value)
        insort(self._sorted, value)

    def quantile(self, share: float) -> float:
        """Return the quantile, interpolated linearly."""
        at = share * (len(self._sorted) - 1)
        low = math.floor(at)
        high = min(low + 1, len(self._sorted) - 1)
        return self._sorted[low] + (at - low) * (self._sorted[high] - self._sorted[low])

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def spread(self) -> float:
        """Return the standard deviation, estimated from the quartiles, which a few outliers do not change."""
        return (self.quantile(0.75) - self.quantile(0.25)) / QUARTILES_TO_STD

    def state_dict(self) -> list[float]:
        return list(self._order)

    def load_state_dict(self, state: list[float]) -> None:
        self._order, self._sorted = deque(state), sorted(state)


# Recompute the sums if the square of the value that leaves the window is this many times the sum of the remaining
# squares, because subtracting the square then loses precision.
RECOMPUTE_ABOVE = 1e6


class RunningMoments:
    """Mean and sample standard deviation of the last ``size`` values.

    They are computed from running sums of the differences from a reference value, which is replaced at intervals.
    """

    def __init__(self, size: int):
        self.size = size
        self._values: deque[float] = deque()
        self._about = self._sum = self._squares = 0.0
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._values)

    def push(self, value: float) -> None:
        gone = 0.0
        if len(self._values) == self.size:
            gone = self._values.popleft() - self._about
            self._sum -= gone
            self._squares -= gone * gone
        self._values.append(value)
        self._sum += value - self._about
        self._squares += (value - self._about) ** 2
        self._pushed += 1
        # Recompute at intervals: rounding errors accumulate, and the series moves away from the reference value.
        due = self._pushed % self.size == 0 or self._pushed == 1
        if due or gone * gone > RECOMPUTE_ABOVE * self._squares:
            self._about = value
            apart = [v - value for v in self._values]
            self._sum, self._squares = math.fsum(apart), math.fsum(a * a for a in apart)

    @property
    def mean(self) -> float:
        return self._about + self._sum / len(self._values)

    @property
    def std(self) -> float:
        n = len(self._values)
        return math.sqrt(max(0.0, self._squares - self._sum**2 / n) / (n - 1)) if n > 1 else 0.0

    def state_dict(self) -> dict[str, Any]:
        sums = [self._about, self._sum, self._squares]
        return {"values": list(self._values), "sums": sums, "pushed": self._pushed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = deque(state["values"])
        self._about, self._sum, self._squares = state["sums"]
        self._pushed = state["pushed"]
