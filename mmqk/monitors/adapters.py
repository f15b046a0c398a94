"""Modules of any model: their paths and the layers that these name, the model inside its wrappers, and adapters: tables
of the tensors that a probe reads in addition to the attention calls, by module name.

Without an adapter a probe measures q, k, v and the attention logits at every attention call, and the residual stream
where `foreign.layers.Stream` detects it. An adapter adds other tensors, such as q and k before QK-Norm. A tensor at a
module is called a site (`Site`). A site that an adapter lists replaces the detected site of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

# Parts of module paths that wrappers add.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


def clean(path: str) -> str:
    """Return a module's path without the parts that wrappers add (torch.compile, Fabric, FSDP, ...)."""
    return _WRAPPERS.sub("", path).lstrip(".")


def layer_of(path: str) -> tuple[str, int] | None:
    """Return the path before its first integer, and the integer: ("model.layers", 3) for model.layers.3.self_attn;
    None if the path has no integer."""
    found = re.match(r"(?:(.*?)\.)??(\d+)(?=\.|$)", path)
    return None if found is None else (found[1] or "", int(found[2]))


def block_of(path: str) -> str:
    """Return the path up to its last integer: stages.0.blocks.1 for stages.0.blocks.1.attn; the whole path if it has
    no integer."""
    found = re.match(r"(.*\.)?\d+(?=\.|$)", path)
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
    inner = vars(module)["_modules"].get("_orig_mod")
    if inner is None and isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner = module.module
    return module if inner is None else unwrapped(inner)


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


@dataclass(frozen=True)
class Site:
    """One tensor of one kind of module.

    Args:
        name: attn_in, the input of the q and k projections, (B, T, D); q_raw and k_raw, their outputs before QK-Norm,
            (B, T, heads * head_dim); attn_out and mlp_out, sublayer outputs as added to the residual stream; resid,
            the residual stream after the layer; final, the input of the final norm.
        module: regular expression for the full path of the module; the first integer in the path is the layer number.
        of: whether to read the module's first input or its first output.
        take: selects a part of that tensor, such as one third of a fused projection.
    """

    name: Literal["attn_in", "q_raw", "k_raw", "attn_out", "mlp_out", "resid", "final"]
    module: str
    of: Literal["input", "output"] = "output"
    take: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Adapter:
    """The tensors (`Site`) that a probe reads in one family of models, such as Llama and Mistral.

    Args:
        layer: regular expression for the full name (Python module and class) of the family's layer class; only
            `adapter_for` uses it.
        sites: the tensors to read.
        layers: paths of the layers to which the sites are limited; None for no limit. `adapter_for` sets it, so that a
            model's other parts are not read.
    """

    layer: str
    sites: tuple[Site, ...]
    layers: frozenset[str] | None = None

    def at(self, path: str) -> list[Site]:
        """Return the sites at the module with this path."""
        if self.layers is not None and self.layer_at(path) is None:
            return []
        return [site for site in self.sites if re.fullmatch(site.module, path)]

    def layer_at(self, path: str) -> str | None:
        """Return the path of the layer in `layers` that has the module with this path; None if there is none."""
        while path and path not in (self.layers or ()):
            path = path.rpartition(".")[0]
        return path or None


_LLAMA = r"(.*\.)?layers\.\d+\.self_attn\."
_TIMM = r"(.*\.)?blocks\.\d+\.attn\.qkv"  # one matrix projects q, k and v
# Queries and keys before QK-Norm of layers of transformers and timm; their residual stream is detected.
ADAPTERS = (
    Adapter(
        r"transformers\..*\.(Llama|Mistral|Qwen2|Qwen3|Chameleon|ChameleonSwin|Gemma2|Gemma3|Olmo2|Olmo3)DecoderLayer",
        (
            Site("attn_in", _LLAMA + "q_proj", of="input"),
            Site("q_raw", _LLAMA + "q_proj"),
            Site("k_raw", _LLAMA + "k_proj"),
        ),
    ),
    Adapter(
        r"timm\.models\.vision_transformer\.Block",
        (
            Site("attn_in", _TIMM, of="input"),
            Site("q_raw", _TIMM, take=lambda qkv: qkv.chunk(3, -1)[0]),
            Site("k_raw", _TIMM, take=lambda qkv: qkv.chunk(3, -1)[1]),
        ),
    ),
)


def adapter_for(model: nn.Module) -> Adapter | None:
    """Return the adapter for the layers of a transformers or timm model, limited to these layers; None if there is
    none."""
    names: dict[str, str] = {}
    for path, module in model.named_modules():  # fully_shard replaces the class of a module with a subclass
        kind = next(x for x in type(module).__mro__ if not x.__module__.startswith("torch.distributed."))
        names[clean(path)] = f"{kind.__module__}.{kind.__qualname__}"
    for adapter in ADAPTERS:
        layers = frozenset(path for path, name in names.items() if re.fullmatch(adapter.layer, name))
        if layers:
            return replace(adapter, layers=layers)
    return None
