"""The base class of rules over one series. It stores whether the alarm is on, and provides the state for
checkpoints."""

from __future__ import annotations

import copy
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
