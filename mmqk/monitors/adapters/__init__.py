"""What to take at the modules of a model, beyond its attention calls: a table of module names.

Without an adapter every statistic at the attention boundary is there, and the residual stream where structure shows
it. An adapter adds what lies elsewhere: q and k before QK-Norm. What it names replaces what structure finds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor, nn

SiteName = Literal["attn_in", "q_raw", "k_raw", "attn_out", "mlp_out", "resid", "final"]


@dataclass(frozen=True)
class Site:
    """One tensor of one kind of module.

    Args:
        name: attn_in, what the projections of q and k take, (B, T, D); q_raw and k_raw, what they give, before
            QK-Norm, (B, T, heads * head width); attn_out and mlp_out, sublayer outputs as added to the residual
            stream; resid, the stream after the layer; final, what the final norm takes.
        module: regular expression for the whole path of the module; its first integer is the layer's number.
        of: the module's first input, or its (first) output.
        take: the part of it that is meant, such as a third of a fused projection.
    """

    name: SiteName
    module: str
    of: Literal["input", "output"] = "output"
    take: Callable[[Tensor], Tensor] | None = None

    def tensor(self, given: Tensor | None, output: Tensor | None) -> Tensor | None:
        """The tensor meant, of a module's first input and its output."""
        found = given if self.of == "input" else output
        return self.take(found) if found is not None and self.take is not None else found


@dataclass(frozen=True)
class Adapter:
    """Sites of a family of models.

    Args:
        layer: regular expression for the class of the layers it is for, with its module; only `adapter_for` asks.
        sites: what to take.
    """

    layer: str
    sites: tuple[Site, ...]

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Site]]:
        return [(re.compile(site.module), site) for site in self.sites]

    def at(self, path: str) -> list[Site]:
        """The sites at a module."""
        return [site for pattern, site in self._patterns if pattern.fullmatch(path)]


def adapter_for(model: nn.Module) -> Adapter | None:
    """The adapter for the layers of a transformers or timm model, or None."""
    from mmqk.monitors.adapters import timm, transformers

    names = {f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()}
    for adapter in (*transformers.ADAPTERS, *timm.ADAPTERS):
        if any(re.fullmatch(adapter.layer, name) for name in names):
            return adapter
    return None
