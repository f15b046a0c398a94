"""Layer numbers and names for the attention calls of a third-party model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

_ATTENTION = re.compile("attention|attn", re.IGNORECASE)


def layer_of(path: str) -> tuple[str, int] | None:
    """Path before its first integer, and the integer: ("model.layers", 3) of model.layers.3.self_attn; or None."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:i]), int(part)
    return None


def block_of(path: str) -> str:
    """Path up to its last integer: stages.0.blocks.1 of stages.0.blocks.1.attn; the path if it has no integer."""
    parts = path.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=len(parts) - 1)
    return ".".join(parts[: last + 1])


@dataclass(frozen=True)
class Layers:
    """The layers with attention.

    Attributes:
        numbers: layer numbers of the measured calls, in call order.
        hidden: names of layers without measured attention, such as "layers.3"; if another call of the layer was
            measured, the path of the module.
        of: number of layers with attention, measured or not.
    """

    numbers: list[int]
    hidden: list[str]
    of: int


def number(paths: Sequence[str]) -> list[int]:
    """The layer number of each call: the first integer of its path; if two are equal, the position in call order."""
    places = [layer_of(path) for path in paths]
    numbers = [place[1] for place in places if place is not None]
    return numbers if len(set(numbers)) == len(paths) else list(range(len(paths)))


def find_layers(
    measured: Sequence[str],
    unread: Collection[str],
    called: Collection[str],
    ran: Mapping[str, nn.Module],
    kinds: set[type[nn.Module]],
    softmaxes: Collection[str],
    products: Collection[str],
) -> Layers:
    """The layers that have attention, and those whose attention was not measured.

    A layer has unmeasured attention if a call in it was left out, or if it ran without a call a module that has the
    type of one that made a call, is named attention, or computes token-by-token products or softmaxes.

    Args:
        measured: paths of the modules whose calls were measured, one for each call.
        unread: paths of calls over the watched tokens that were not measured.
        called: paths of all calls.
        ran: modules that ran, by path.
        kinds: types of the modules that made attention calls.
        softmaxes: paths of modules that computed a softmax of square matrices outside a call.
        products: paths of modules that multiplied two activations to a matrix of token by token.
    """
    blocks = {block_of(path) for path in called}
    hidden = {*unread, *softmaxes}
    for path, module in ran.items():
        like = type(module) in kinds or isinstance(module, nn.MultiheadAttention) or path in products
        named = _ATTENTION.search(type(module).__name__) and block_of(path) not in blocks
        if (like or named) and not any(_within(path, c) or _within(c, path) for c in called):
            hidden.add(path)
    outermost = {path for path in hidden if not any(_within(path, p) for p in hidden - {path, ""})}
    partly = {block_of(path) for path in measured}
    places = {path if block_of(path) in partly else block_of(path) for path in outermost}
    names = [place or "the model" for place in sorted(places, key=_as_numbers)]
    return Layers(number(measured), names, len(measured) + len(names))


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + ".") or not outer


def _as_numbers(path: str) -> list[tuple[int, str]]:
    """Sort key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
