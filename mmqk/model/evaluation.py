"""Evaluation mode for a part of the code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside the context; restore each submodule's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:  # not train(): a module may override it, for example to merge its LoRA adapters
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
