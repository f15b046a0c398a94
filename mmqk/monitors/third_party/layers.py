"""Numbers and names for the attention calls of a model that somebody else wrote."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
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


def block_of(path: str) -> str:
    """Path up to its last integer: stages.0.blocks.1 of stages.0.blocks.1.attn; all of it where there is none."""
    parts = path.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=len(parts) - 1)
    return ".".join(parts[: last + 1])


@dataclass(frozen=True)
class Layers:
    """What was found.

    Attributes:
        numbers: of the calls that could be measured, in their order.
        hidden: names of layers whose attention is not among these, such as "layers.3"; of the module where another of
            the same layer is.
        of: how many there are, measured or not.
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
    unread: Collection[str],
    told: Collection[str],
    ran: Mapping[str, nn.Module],
    kinds: set[type[nn.Module]],
    softmaxes: Collection[str],
    products: Collection[str],
) -> Layers:
    """Which layers have attention, and which of these was not measured.

    Args:
        measured: paths of the modules whose calls could be measured, one for each call.
        unread: those of calls among the tokens that could not be.
        told: those of all calls.
        ran: modules that ran, by path.
        kinds: types of the modules that made calls.
        softmaxes: paths of modules that took a softmax of square matrices outside a call.
        products: paths of modules that multiplied what every token gives with what every token gives.
    """
    blocks = {block_of(path) for path in told}
    hidden = {*unread, *softmaxes}
    for path, module in ran.items():
        like = type(module) in kinds or isinstance(module, nn.MultiheadAttention) or path in products
        called = _ATTENTION.search(type(module).__name__) and block_of(path) not in blocks
        if (like or called) and not any(_within(path, t) or _within(t, path) for t in told):
            hidden.add(path)
    outermost = {path for path in hidden if not any(_within(path, p) for p in hidden - {path, ""})}
    partly = {block_of(path) for path in measured}
    places = {path if block_of(path) in partly else block_of(path) for path in outermost}
    names = [place or "the model" for place in sorted(places, key=_as_numbers)]
    return Layers(number(measured), names, len(measured) + len(names))


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + ".") or not outer


def _as_numbers(path: str) -> list[tuple[int, str]]:
    """To sort layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
