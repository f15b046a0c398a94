"""Adapters for model families."""

from __future__ import annotations

import re

from torch import nn

from mmqk.monitors.adapters.adapter import Adapter, Site
from mmqk.monitors.adapters.families import ADAPTERS

__all__ = ["Adapter", "Site", "adapter_for"]


def adapter_for(model: nn.Module) -> Adapter | None:
    """Return the adapter for the layer class of a transformers or timm model, or None if there is none."""
    names = {f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()}
    fitting = (a for a in ADAPTERS if any(re.fullmatch(a.layer, name) for name in names))
    return next(fitting, None)
