"""The context in which a probe runs a third-party model: it restores the model's state afterwards.

State is what a pass can change: buffers and plain attributes of the modules (counters, lists, tensors, objects),
random generators among them. State outside these is not seen: class attributes, global variables, closures,
iterators, ``__slots__``, and what the forward writes into parameters. The inputs of a pass are a copy (`copied`).
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mmqk.model.transformer import evaluation_mode
from mmqk.monitors.adapters import device_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_OF_MODULE = vars(nn.Module()).keys()  # attributes of every module: its mode, parameters, buffers, hooks
# Packages whose objects are machinery of the training loop, and hold no state of a model. The standard library is
# treated alike, with the exception of plain namespaces.
_MACHINERY = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed"} | (
    sys.stdlib_module_names - {"types", "argparse"}
)
ISOLATED: list[nn.Module] = []  # the models that run in `isolated` now
_DEEPEST = 3  # objects inside objects: a cache, its layer, the state of the layer


class State:
    """The saved state of a model.

    Attributes:
        changed: names of the attributes (with the path of the module) that had changed when `restore` ran. Buffers
            are not listed.
    """

    def __init__(self, root: nn.Module):
        self.changed: set[str] = set()
        self._attributes: list[tuple[str, nn.Module, dict[str, Any]]] = []
        self._contents: list[tuple[str, Callable[[], bool]]] = []  # results of `_restorer_of`
        # Objects that are saved already or left out. A reference keeps their ids from being used again.
        self._seen: dict[int, Any] = {id(x): x for x in (*root.parameters(), *root.modules())}
        for path, module in root.named_modules():
            self._save("", module._buffers)
            # The first forward of transformers installs hooks and sets an attribute; restore both or neither.
            for name, hooks in vars(module).items():
                if name in _OF_MODULE and "hooks" in name and isinstance(hooks, dict):
                    self._contents.append(("", _restorer(partial(dict, hooks), partial(_refill, hooks))))
            # The modules of torch, such as the wrapper of FSDP, have no state of a model in attributes.
            if any(not kind.__module__.startswith("torch.") for kind in type(module).__mro__[:-1]):
                prefix, saved = f"{path}." if path else "", _attributes(module)
                self._attributes.append((prefix, module, saved))
                for name, value in saved.items():
                    self._save(prefix + name, value)

    def restore(self) -> None:
        """Give every saved object its saved content."""
        with torch.no_grad():
            self.changed.update([name for name, restore in self._contents if restore() and name])
        for prefix, module, saved in self._attributes:
            now = _attributes(module)
            unlike = [name for name in {**now, **saved} if not _same(now.get(name, self), saved.get(name, self))]
            self.changed.update(prefix + name for name in unlike)
            for name in now.keys() - saved.keys():
                del vars(module)[name]
            vars(module).update(saved)

    def _save(self, name: str, x: Any, depth: int = 0) -> None:
        """Save one object and all that it holds."""
        if isinstance(x, _PLAIN) or id(x) in self._seen:
            return
        self._seen[id(x)] = x
        restore = _restorer_of(x)
        if restore is None and depth < _DEEPEST and _has_state(x) and not isinstance(x, Tensor | tuple):
            x, depth = vars(x), depth + 1
            restore = _restorer_of(x)
        if restore is not None:
            self._contents.append((name, restore))
        parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | deque | tuple) else ()
        for part in list(parts):
            self._save(name, part, depth)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in vars(module).items() if name not in _OF_MODULE}


def _refill(x: Any, saved: Any) -> None:
    x.clear()
    (x.extend if hasattr(x, "extend") else x.update)(saved)


def _restorer_of(x: Any) -> Callable[[], bool] | None:
    """Return a function that gives an object its present content back and returns whether it had changed; None if
    the object has no content that can be saved."""
    if isinstance(x, Tensor):
        # The model may hold the parameters of another model, and activations of the step.
        return None if isinstance(x, nn.Parameter) or x.grad_fn is not None or x.is_meta else _restorer_of_tensor(x)
    if isinstance(x, dict | list | deque | set):
        kind = next((kind for kind in (dict, set) if isinstance(x, kind)), list)
        return _restorer(partial(kind, x), partial(_refill, x))
    if isinstance(x, random.Random):
        return _restorer(x.getstate, x.setstate)
    if isinstance(x, torch.Generator) or type(x).__name__ == "RandomState":
        return _restorer(x.get_state, x.set_state)
    if type(x).__module__.startswith("numpy") and hasattr(x, "bit_generator"):
        bits = x.bit_generator
        return _restorer(lambda: tuple(bits.state.items()), lambda saved: setattr(bits, "state", dict(saved)))
    return _restorer(x.copy, partial(x.__setitem__, ...)) if type(x).__name__ == "ndarray" else None


def _restorer(get: Callable[[], Any], put: Callable[[Any], Any]) -> Callable[[], bool]:
    saved = get()

    def restore() -> bool:
        if _same_content(get(), saved):
            return False
        put(saved)
        return True

    return restore


def _restorer_of_tensor(x: Tensor) -> Callable[[], bool]:
    version, saved = None if x.is_inference() else x._version, x.clone()

    def restore() -> bool:
        if torch.equal(x, saved) if version is None else x._version == version:
            return False
        with torch.inference_mode(version is None):
            x.copy_(saved)
        return True

    return restore


def _same(a: Any, b: Any) -> bool:
    """Return whether two parts are one object, or equal numbers or strings."""
    return a is b or (isinstance(a, _PLAIN) and type(a) is type(b) and a == b)


def _same_content(now: Any, saved: Any) -> bool:
    if isinstance(saved, dict):
        return now.keys() == saved.keys() and all(_same(now[key], x) for key, x in saved.items())
    if isinstance(saved, list):
        return len(now) == len(saved) and all(map(_same, now, saved))
    if isinstance(saved, Tensor):  # the state of a torch.Generator
        return torch.equal(now, saved)
    return now == saved if isinstance(saved, set) else pickle.dumps(now) == pickle.dumps(saved)


def _has_state(x: Any) -> bool:
    return hasattr(x, "__dict__") and type(x).__module__.partition(".")[0] not in _MACHINERY


def is_object(x: Any) -> bool:
    """Return whether a value is an object of its own kind, such as a cache of keys: no tensor or container."""
    is_known = isinstance(x, (*_PLAIN, Tensor, Mapping, list, tuple, set)) or dataclasses.is_dataclass(x)
    return not is_known and _has_state(x)


class _CopyingTensors(TorchFunctionMode):
    """Lets `copy.deepcopy` copy the values of every tensor, also of one that is part of a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def copied(args: tuple[Any, ...], kwargs: Mapping[str, Any], root: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a copy of the arguments of a model: tensors, containers and objects such as a cache of keys.

    The model's own modules and parameters are not copied, nor is an object in a container that cannot be copied.
    """
    memo = {id(x): x for x in (*root.modules(), *root.parameters(), *root.buffers())}

    def copy_of(x: Any) -> Any:
        try:
            return copy.deepcopy(x, memo)
        except Exception:  # a lock, an open file, a stream
            return x

    with _CopyingTensors():
        return tree_map(copy_of, (args, dict(kwargs)))


@contextmanager
def isolated(root: nn.Module, full_precision: bool | None = None, autocast: bool = False) -> Iterator[State]:
    """Inside the context the model runs eagerly, in evaluation mode and without gradients.

    The context restores each submodule's mode, the `State` of the model, and the random state of torch (CPU and
    the model's device), Python and NumPy. PyTorch's fused inference path is off, since it hides the attention call.

    Args:
        full_precision: disable autocast, even if the model enters autocast itself; by default if all weights are in
            fp32.
        autocast: whether the training call used autocast. If it did, autocast is enabled again unless
            ``full_precision`` is true.
    """
    device = device_of(root)
    if full_precision is None:
        full_precision = all(p.dtype == torch.float32 for p in root.parameters() if p.is_floating_point())
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.clear_autocast_cache()  # it may hold other values of the weights, and afterwards ones without gradients
        stack.callback(torch.clear_autocast_cache)
        ISOLATED.append(root)
        stack.callback(ISOLATED.pop)
        if full_precision:
            _disable_autocast(device, stack)
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
        if any(getattr(module, "gradient_checkpointing", False) and module.training for module in root.modules()):
            # Checkpointing disables the KV cache. With one, transformers ignores the borders of packed documents.
            for config in [getattr(module, "config", None) for module in root.modules()]:
                if getattr(config, "use_cache", None):
                    replace(stack, config, "use_cache", False)
        stack.enter_context(evaluation_mode(root))
        state = State(root)
        stack.callback(state.restore)
        yield state
        for module in root.modules():
            # FSDP2 keeps the root's weights gathered for the backward pass, but a probe has no backward pass.
            if hasattr(module, "unshard") and hasattr(module, "reshard"):
                module.reshard()  # type: ignore[operator]


def _disable_autocast(device: torch.device, stack: ExitStack) -> None:
    """Disable autocast, even if the model or a trainer that replaced the model's forward enables it."""
    enter = torch.autocast.__enter__

    def enter_disabled(self: Any) -> Any:
        enabled, self._enabled = self._enabled, False
        try:
            return enter(self)
        finally:
            self._enabled = enabled

    replace(stack, torch.autocast, "__enter__", enter_disabled)
    stack.enter_context(torch.autocast(device.type, enabled=False))


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute, and restore it when the stack closes."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
