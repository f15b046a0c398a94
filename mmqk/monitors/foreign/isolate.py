"""The context in which a probe runs a third-party model: it restores the model's state afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from mmqk.model.transformer import evaluation_mode
from mmqk.monitors.foreign.state import State


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


@contextmanager
def isolated(
    root: nn.Module,
    device: torch.device,
    inputs: Mapping[str, Any],
    full_precision: bool = True,
    autocast: bool = False,
) -> Iterator[State]:
    """Inside the context the model runs eagerly, in evaluation mode and without gradients.

    The context restores each submodule's mode, the `State` of the model and its inputs, and the random state of torch
    (CPU and ``device``), Python and NumPy. PyTorch's fused inference path is off, since it hides the attention call.

    Args:
        inputs: inputs of the call, by name.
        full_precision: disable autocast, even if the model enters autocast itself.
        autocast: whether the training call used autocast. If it did, autocast is enabled again unless
            ``full_precision`` is true.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if full_precision:
            stack.enter_context(_no_autocast(device))
        elif autocast and not torch.is_autocast_enabled(device.type):
            low = {p.dtype for p in root.parameters()} & {torch.bfloat16, torch.float16}
            stack.enter_context(torch.autocast(device.type, dtype=min(low, key=str, default=torch.bfloat16)))
        devices = [] if device.type == "cpu" else [device]
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"))
        stack.callback(random.setstate, random.getstate())
        if (numpy := sys.modules.get("numpy")) is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if any(
            getattr(module, "gradient_checkpointing", False) and module.training for module in root.modules()
        ):
            _disable_cache(root, stack)
        stack.enter_context(evaluation_mode(root))
        state = State(root, inputs)
        stack.callback(state.restore)
        yield state
        for module in root.modules():
            # FSDP2 keeps the root's weights gathered for the backward pass, but a probe has no backward pass.
            reshard = getattr(module, "reshard", None)
            if reshard is not None and hasattr(module, "unshard"):
                reshard()


def _disable_cache(root: nn.Module, stack: ExitStack) -> None:
    """Disable the KV cache, as gradient checkpointing does. With a cache, transformers ignores the borders of packed
    documents."""
    for module in root.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            stack.callback(setattr, config, "use_cache", config.use_cache)
            config.use_cache = False


@contextmanager
def _no_autocast(device: torch.device) -> Iterator[None]:
    """Disable autocast, even if the model or a trainer that replaced the model's forward enables it."""
    enter = torch.autocast.__enter__

    def enter_disabled(self: Any) -> Any:
        enabled, self._enabled = self._enabled, False
        try:
            return enter(self)
        finally:
            self._enabled = enabled

    torch.autocast.__enter__ = enter_disabled  # type: ignore[method-assign]
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
