"""Adapters: tables of the tensors that a probe reads in addition to the attention calls, by module name.

Without an adapter a probe measures q, k, v and the attention logits at every attention call, and the residual stream
where `foreign.layers.Stream` detects it. An adapter adds other tensors, such as q and k before QK-Norm. A tensor at a
module is called a site (`Site`). A site that an adapter lists replaces the detected site of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from mmqk.monitors.modules import clean

SiteName = Literal["attn_in", "q_raw", "k_raw", "attn_out", "mlp_out", "resid", "final"]


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

    name: SiteName
    module: str
    of: Literal["input", "output"] = "output"
    take: Callable[[Tensor], Tensor] | None = None

    def tensor(self, module_input: Tensor | None, output: Tensor | None) -> Tensor | None:
        """Return this site's tensor, given the first input and the output of its module."""
        tensor = module_input if self.of == "input" else output
        return self.take(tensor) if tensor is not None and self.take is not None else tensor


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
    types = {  # fully_shard replaces the class of a module with a subclass
        clean(path): next(x for x in type(module).__mro__ if not x.__module__.startswith("torch.distributed."))
        for path, module in model.named_modules()
    }
    names = {path: f"{kind.__module__}.{kind.__qualname__}" for path, kind in types.items()}
    for adapter in ADAPTERS:
        layers = frozenset(path for path, name in names.items() if re.fullmatch(adapter.layer, name))
        if layers:
            return replace(adapter, layers=layers)
    return None
