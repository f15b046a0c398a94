"""Numbers and names of the layers with attention in a third-party model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# Parts of module paths that wrappers add.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


def clean(path: str) -> str:
    """Return a module's path without the parts that wrappers add (torch.compile, FSDP, activation checkpointing)."""
    return _WRAPPERS.sub("", path).lstrip(".")


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
        seen: number of layers whose attention was measured in every call.
        by_hand: whether a hidden layer calls no attention function.
    """

    numbers: list[int]
    hidden: list[str]
    seen: int
    by_hand: bool = False

    @property
    def total(self) -> int:
        """Number of layers with attention, measured or not. A module with several calls counts once."""
        return self.seen + len(self.hidden)


def layer_numbers(paths: Sequence[str]) -> list[int]:
    """Return the layer number of each call: the first integer of its path.

    If a path has no integer, or two paths have the same first integer, all calls are numbered in call order.
    """
    layers = [layer_of(path) for path in paths]
    numbers = [layer[1] for layer in layers if layer is not None]
    return numbers if len(set(numbers)) == len(paths) else list(range(len(paths)))
