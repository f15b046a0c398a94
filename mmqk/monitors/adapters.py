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

from mmqk.monitors.foreign.layers import clean

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
        layers: paths of the layers to which the sites are limited, together with the final norm beside the list of
            these layers; None for no limit. `adapter_for` sets it, so that a model's other parts are not read.
    """

    layer: str
    sites: tuple[Site, ...]
    layers: frozenset[str] | None = None

    def at(self, path: str) -> list[Site]:
        """Return the sites at the module with this path."""
        found = [site for site in self.sites if re.fullmatch(site.module, path)]
        if not found or self.layers is None:
            return found
        # Modules that have a list of layers and its final norm: model for model.layers.0 and model.norm.
        parents = {layer.rpartition(".")[0].rpartition(".")[0] for layer in self.layers}
        inside, beside = self.layer_at(path) is not None, path.rpartition(".")[0] in parents
        return [site for site in found if (beside if site.name == "final" else inside)]

    def layer_at(self, path: str) -> str | None:
        """Return the path of the layer in `layers` that has the module with this path; None if there is none."""
        while path and path not in (self.layers or ()):
            path = path.rpartition(".")[0]
        return path or None


# Layer classes of transformers and timm.
_LAYER = r"(.*\.)?layers\.\d+"
_DECODER = (
    Site("attn_in", _LAYER + r"\.self_attn\.q_proj", of="input"),
    Site("q_raw", _LAYER + r"\.self_attn\.q_proj"),
    Site("k_raw", _LAYER + r"\.self_attn\.k_proj"),
    Site("resid", _LAYER),
    Site("final", r"(.*\.)?norm", of="input"),
)


def _decoder(layer: str, attn_out: str, mlp_out: str) -> Adapter:
    sublayers = (Site("attn_out", rf"{_LAYER}\.{attn_out}"), Site("mlp_out", rf"{_LAYER}\.{mlp_out}"))
    return Adapter(rf"transformers\..*\.({layer})DecoderLayer", _DECODER + sublayers)


ADAPTERS = (
    # Pre-norm.
    _decoder("Llama|Mistral|Qwen2|Qwen3|Chameleon", "self_attn", "mlp"),
    # Post-norm: the norm is the last step before the addition.
    _decoder("Gemma2|Gemma3|Olmo2|Olmo3", "post_attention_layernorm", "post_feedforward_layernorm"),
    # Post-norm under other module names: Chameleon-34B.
    _decoder("ChameleonSwin", "input_layernorm", "post_attention_layernorm"),
    # Vision transformers of timm, which project q, k and v with one matrix.
    Adapter(
        r"timm\.models\.vision_transformer\.Block",
        (
            Site("attn_in", r"(.*\.)?blocks\.\d+\.attn\.qkv", of="input"),
            Site("q_raw", r"(.*\.)?blocks\.\d+\.attn\.qkv", take=lambda qkv: qkv.chunk(3, -1)[0]),
            Site("k_raw", r"(.*\.)?blocks\.\d+\.attn\.qkv", take=lambda qkv: qkv.chunk(3, -1)[1]),
            Site("attn_out", r"(.*\.)?blocks\.\d+\.ls1"),
            Site("mlp_out", r"(.*\.)?blocks\.\d+\.ls2"),
            Site("resid", r"(.*\.)?blocks\.\d+"),
            Site("final", r"(.*\.)?norm", of="input"),
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
