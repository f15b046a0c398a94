"""Numbers, names, scripted attention and weight matrices of the layers of a third-party model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmqk.monitors.formulas.weights import matrix_sizes
from mmqk.monitors.record import Probe
from mmqk.store import UserError, tag

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


_PRODUCTS = ("aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum")


def is_scripted(module: nn.Module) -> bool:
    """Return whether a module is scripted and computes attention, or its forward names or holds a scripted function
    that does."""
    if isinstance(module, torch.jit.ScriptModule):
        return _has_attention(module)
    forward = getattr(type(module).forward, "__wrapped__", type(module).forward)
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    functions = [names.get(name) for name in code.co_names] if code is not None else []
    functions += [value for name, value in vars(module).items() if not name.startswith("_")]
    return any(isinstance(function, torch.jit.ScriptFunction) and _has_attention(function) for function in functions)


def _has_attention(scripted: Any) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = str(scripted.inlined_graph)
    except RuntimeError:  # a module without forward
        return False
    return "scaled_dot_product_attention" in graph or (
        "aten::softmax" in graph and sum(graph.count(product) for product in _PRODUCTS) > 1
    )


def add_matrices(probe: Probe, root: nn.Module, calls: Sequence[tuple[int, str]]) -> None:
    """Add norm, spectral norm and stable rank of every matrix of every layer.

    A tag is, for example, ``self_attn_q_proj_norm/layer03``.

    A matrix is a parameter with two axes that is not an embedding. Its name in the tag is its path in the layer.

    Args:
        probe: gets the values.
        root: the model.
        calls: layer number and path of the module of each attention call.

    Raises:
        UserError: a layer has no matrix, or its matrices are sharded over ranks.
    """
    tags: list[str] = []
    values: list[Tensor] = []
    for layer, prefix in _prefixes(calls):
        matrices = list(_matrices(root.get_submodule(prefix)))
        if not matrices or any(isinstance(weight, DTensor) for _, weight in matrices):
            raise UserError(
                f"matrices: {prefix or 'the model'} holds no whole weight matrix, as with FSDP: call attach "
                "without matrices"
            )
        for name, weight in matrices:
            tags += [tag(f"{name}_{size}", layer=layer) for size in ("norm", "spectral", "stable_rank")]
            values += matrix_sizes(weight)
    if values:
        probe.add_values(tags, torch.stack(values))


def _prefixes(calls: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the number and path of each layer: the call's path up to its first integer if these paths all differ,
    else up to its last integer."""
    layers = [layer_of(path) for _, path in calls]
    whole = [f"{layer[0]}.{layer[1]}".lstrip(".") for layer in layers if layer is not None]
    if len(set(whole)) < len(calls):
        whole = [block_of(path) for _, path in calls]
    return [(number, prefix) for (number, _), prefix in zip(calls, whole, strict=True)]


def _matrices(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in layer.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim == 2 and weight.is_floating_point() and not isinstance(module, nn.Embedding):
                full = clean(f"{path}.{name}".strip(".")).replace(".", "_")
                yield full.removesuffix("_weight"), weight
