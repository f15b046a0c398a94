"""Numbers and names for the attention calls of a model that somebody else wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

_ATTENTION = re.compile("attention|attn", re.IGNORECASE)


def layer_of(path: str) -> tuple[str, int] | None:
    """Path up to its first integer, and that: ("model.layers", 3) of model.layers.3.self_attn; None without one."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:i]), int(part)
    return None


@dataclass(frozen=True)
class Layers:
    """What was found.

    Attributes:
        numbers: of the calls that could be measured, in their order.
        hidden: names of layers whose attention ran unseen, such as "layers.3".
        of: how many layers have attention, seen or not.
    """

    numbers: list[int]
    hidden: list[str]
    of: int


def number(paths: Sequence[str]) -> list[int]:
    """The layer of each call: the first integer of its path, or by order where that says the same of two."""
    places = [layer_of(path) for path in paths]
    found = [place[1] for place in places if place is not None]
    return found if len(set(found)) == len(paths) else list(range(len(paths)))


def find_layers(
    measured: Sequence[str],
    told: Iterable[str],
    ran: Mapping[str, nn.Module],
    kinds: set[type[nn.Module]],
    softmaxes: Iterable[str],
) -> Layers:
    """Which layers have attention, and which of these was not seen.

    Args:
        measured: paths of the modules whose calls could be measured, one for each call.
        told: those of all calls.
        ran: modules that ran, by path.
        kinds: types of the modules that made calls.
        softmaxes: paths of modules that took a softmax of square matrices outside of a call.
    """
    seen = {layer_of(path) or (path, -1) for path in told}
    like = [
        path
        for path, module in ran.items()
        if type(module) in kinds
        or isinstance(module, nn.MultiheadAttention)
        or _ATTENTION.search(type(module).__name__)
    ]
    hidden = {place for path in like if (place := layer_of(path)) is not None and place not in seen}
    hidden |= {place for path in softmaxes if (place := layer_of(path) or (path, -1)) not in seen}
    names = [container if n < 0 else f"{container}.{n}".lstrip(".") for container, n in sorted(hidden)]
    return Layers(number(measured), names, len(measured) + len(hidden))
