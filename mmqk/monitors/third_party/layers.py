"""Finds the numbers and names of the layers with attention in a third-party model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

_ATTENTION = re.compile("attention|attn", re.IGNORECASE)


def layer_of(path: str) -> tuple[str, int] | None:
    """Return the path before its first integer, and the integer: ("model.layers", 3) for model.layers.3.self_attn;
    None if the path has no integer."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:i]), int(part)
    return None


def block_of(path: str) -> str:
    """Return the path up to its last integer: stages.0.blocks.1 for stages.0.blocks.1.attn; the whole path if it has
    no integer."""
    parts = path.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=len(parts) - 1)
    return ".".join(parts[: last + 1])


@dataclass(frozen=True)
class Layers:
    """The layers with attention.

    Attributes:
        numbers: layer numbers of the measured calls, in call order.
        hidden: names of layers whose attention was not measured, such as "layers.3". If only a part of a layer's
            attention was measured, the full path of the module that was not measured.
        total: number of layers with attention, measured or not.
    """

    numbers: list[int]
    hidden: list[str]
    total: int


def layer_numbers(paths: Sequence[str]) -> list[int]:
    """Return the layer number of each call: the first integer of its path.

    If a path has no integer, or two paths have the same first integer, all calls are numbered in call order.
    """
    layers = [layer_of(path) for path in paths]
    numbers = [layer[1] for layer in layers if layer is not None]
    return numbers if len(set(numbers)) == len(paths) else list(range(len(paths)))


def find_layers(
    measured: Sequence[str],
    not_measured: Collection[str],
    calls: Collection[str],
    modules: Mapping[str, nn.Module],
    attention_types: set[type[nn.Module]],
    softmaxes: Collection[str],
    products: Collection[str],
) -> Layers:
    """Return the layers that have attention, and those whose attention was not measured.

    A layer has attention that was not measured in two cases: one of its calls was not measured, or one of its modules
    made no attention call but seems to compute attention. Such a module has the type of a module that made a call, or
    "attention" in the name of its class, or it computes token-by-token products or softmaxes.

    Args:
        measured: paths of the modules whose calls were measured, one for each call.
        not_measured: paths of the calls that were not measured, except calls over the tokens of other inputs.
        calls: paths of all calls.
        modules: modules that ran, by path.
        attention_types: types of the modules that made attention calls.
        softmaxes: paths of modules that computed a softmax of square matrices outside an attention call.
        products: paths of modules that computed a token-by-token matrix as a product of two activations.
    """
    blocks = {block_of(path) for path in calls}
    hidden = {*not_measured, *softmaxes}
    for path, module in modules.items():
        is_attention = type(module) in attention_types or isinstance(module, nn.MultiheadAttention)
        is_named = _ATTENTION.search(type(module).__name__) and block_of(path) not in blocks
        if (is_attention or path in products or is_named) and not any(
            _within(path, call) or _within(call, path) for call in calls
        ):
            hidden.add(path)
    outermost = {path for path in hidden if not any(_within(path, p) for p in hidden - {path, ""})}
    measured_blocks = {block_of(path) for path in measured}
    places = {path if block_of(path) in measured_blocks else block_of(path) for path in outermost}
    names = [place or "the model" for place in sorted(places, key=_sort_key)]
    return Layers(layer_numbers(measured), names, len(measured) + len(names))


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + ".") or not outer


def _sort_key(path: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
