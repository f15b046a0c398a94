"""Finds attention in scripted code (torch.jit), whose functions a TorchFunctionMode does not get."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

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
