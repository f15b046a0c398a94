"""Adapters for model families, and the search for the one that fits a model."""

from __future__ import annotations

import re

from torch import nn

from mmqk.monitors.adapters import timm, transformers
from mmqk.monitors.adapters.adapter import Adapter, Site

__all__ = ["Adapter", "Site", "adapter_for"]


def adapter_for(model: nn.Module) -> Adapter | None:
    """The adapter for the layers of a transformers or timm model, or None."""
    names = {f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()}
    for adapter in (*transformers.ADAPTERS, *timm.ADAPTERS):
        if any(re.fullmatch(adapter.layer, name) for name in names):
            return adapter
    return None
