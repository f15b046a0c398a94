"""Modules of any model: their paths and the layers that these name, the model inside its wrappers, and the tensors in
what modules get and return."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Parts of module paths that wrappers add.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


def clean(path: str) -> str:
    """Return a module's path without the parts that wrappers add (torch.compile, Fabric, FSDP, ...)."""
    return _WRAPPERS.sub("", path).lstrip(".")


_FIRST_NUMBER = re.compile(r"(?:(.*?)\.)??(\d+)(?=\.|$)")
_NUMBERED = re.compile(r"(.*\.)?\d+(?=\.|$)")  # a path up to its last integer


def layer_of(path: str) -> tuple[str, int] | None:
    """Return the path before its first integer, and the integer: ("model.layers", 3) for model.layers.3.self_attn;
    None if the path has no integer."""
    found = _FIRST_NUMBER.match(path)
    return None if found is None else (found[1] or "", int(found[2]))


def block_of(path: str) -> str:
    """Return the path up to its last integer: stages.0.blocks.1 for stages.0.blocks.1.attn; the whole path if it has
    no integer."""
    found = _NUMBERED.match(path)
    return path if found is None else found[0]


def layer_numbers(paths: Sequence[str]) -> list[int]:
    """Return the layer number of each call: the first integer of its path.

    If a path has no integer, or two paths have the same first integer, all calls are numbered in call order.
    """
    layers = [layer_of(path) for path in paths]
    numbers = [layer[1] for layer in layers if layer is not None]
    return numbers if len(set(numbers)) == len(paths) else list(range(len(paths)))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DistributedDataParallel and DataParallel. The wrapper of FSDP1 stays,
    because it gathers the weights."""
    while True:
        inner = vars(module)["_modules"].get("_orig_mod")
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)
