"""The interface of all effects: a value with an interval at any confidence level."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

CONFIDENCE = 0.95


class WithInterval(ABC):
    """A number with an interval; `low` and `high` are the ends of the 95 % interval.

    Attributes:
        error: standard error; NaN if there is no interval.
    """

    error: float

    @property
    def has_interval(self) -> bool:
        """Whether there are enough runs for an interval."""
        return math.isfinite(self.error)

    @abstractmethod
    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the interval at confidence 1 - alpha; (NaN, NaN) if there is none."""

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval; NaN if there is no interval."""
        return self.interval(1 - CONFIDENCE)[0]

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval; NaN if there is no interval."""
        return self.interval(1 - CONFIDENCE)[1]
