"""The context in which a probe runs a third-party model: it restores the model's state afterwards.

State is what a pass can change: buffers, plain attributes of the modules (counters, lists, tensors, objects), random
generators among them, and the model's inputs, such as a cache of keys. State outside these is not seen: class
attributes, global variables, closures, iterators, ``__slots__``, and what the forward writes into parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmqk.model.transformer import evaluation_mode

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_OF_MODULE = vars(nn.Module()).keys()  # attributes of every module: its mode, parameters, buffers, hooks
# Packages whose objects are machinery of the training loop, and hold no state of a model. The standard library is
# treated alike, with the exception of plain namespaces.
_MACHINERY = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed"} | (
    sys.stdlib_module_names - {"types", "argparse"}
)
_DEEPEST = 3  # objects inside objects: a cache, its layer, the state of the layer


class State:
    """The saved state of a model and of the inputs of one call.

    Args:
        root: the model.
        inputs: inputs of the call, by name.

    Attributes:
        changed: names of inputs and of attributes (with the path of the module) that had changed when `restore` ran.
            Buffers are not listed.
    """

    def __init__(self, root: nn.Module, inputs: Mapping[str, Any]):
        self.changed: set[str] = set()
        self._restore: list[tuple[str, Callable[[], bool]]] = []
        # Objects that are saved already or left out. A reference keeps their ids from being used again.
        self._seen: dict[int, Any] = {id(p): p for p in root.parameters()}
        for path, module in root.named_modules():
            self._save("", module._buffers)
            # The first forward of transformers installs hooks and sets an attribute; restore both or neither.
            for hooks in [x for name, x in vars(module).items() if name in _OF_MODULE and "hooks" in name]:
                if isinstance(hooks, dict):
                    self._entries("", hooks, dict(hooks))
            own = [kind for kind in type(module).__mro__[:-1] if not kind.__module__.startswith("torch.")]
            if own:  # the modules of torch, such as the wrapper of FSDP, have no state of a model in attributes
                prefix, self._seen[id(module)] = f"{path}." if path else "", module
                saved = {name: x for name, x in vars(module).items() if name not in _OF_MODULE}
                self._entries(prefix, vars(module), saved, each=True)
                for name, value in saved.items():
                    self._save(prefix + name, value)
        for name, value in inputs.items():
            self._save(f"input {name}", value)

    def restore(self) -> None:
        """Give every saved object its saved content."""
        with torch.no_grad():
            for name, restore in self._restore:
                if restore() and name:
                    self.changed.add(name)

    def _save(self, name: str, x: Any, depth: int = 0) -> None:
        """Save one object and all that it holds."""
        if isinstance(x, _PLAIN) or id(x) in self._seen:
            return
        self._seen[id(x)] = x
        parts: Any = ()
        if isinstance(x, Tensor):
            self._tensor(name, x)
        elif isinstance(x, torch.Generator):
            self._getter(name, x.get_state, x.set_state)
        elif isinstance(x, random.Random):
            self._getter(name, x.getstate, x.setstate)
        elif type(x).__module__.startswith("numpy"):
            self._numpy(name, x)
        elif isinstance(x, dict):
            self._entries(name, x, dict(x))
            parts = list(x.values())
        elif isinstance(x, list | deque | set):
            self._contents(name, x)
            parts = () if isinstance(x, set) else list(x)
        elif isinstance(x, tuple):
            parts = x
        elif depth < _DEEPEST and type(x).__module__.partition(".")[0] not in _MACHINERY and hasattr(x, "__dict__"):
            depth += 1
            self._entries(name, vars(x), dict(vars(x)))
            parts = list(vars(x).values())
        for part in parts:
            self._save(name, part, depth)

    def _tensor(self, name: str, x: Tensor) -> None:
        # The model may hold the parameters of another model, and activations of the step.
        if isinstance(x, nn.Parameter) or x.grad_fn is not None or x.is_meta:
            return
        version, saved = None if x.is_inference() else x._version, x.clone()

        def restore() -> bool:
            if torch.equal(x, saved) if version is None else x._version == version:
                return False
            with torch.inference_mode(version is None):
                x.copy_(saved)
            return True

        self._restore.append((name, restore))

    def _getter(self, name: str, get: Callable[[], Any], set_: Callable[[Any], Any]) -> None:
        saved = get()
        before = saved if isinstance(saved, Tensor) else pickle.dumps(saved)

        def restore() -> bool:
            now = get()
            if torch.equal(now, saved) if isinstance(now, Tensor) else pickle.dumps(now) == before:
                return False
            set_(saved)
            return True

        self._restore.append((name, restore))

    def _numpy(self, name: str, x: Any) -> None:
        if isinstance(x, sys.modules["numpy"].ndarray):
            self._getter(name, x.copy, lambda saved: x.__setitem__(..., saved))
        elif hasattr(x, "get_state"):  # a RandomState
            self._getter(name, x.get_state, x.set_state)
        elif (bits := getattr(x, "bit_generator", None)) is not None:
            self._getter(name, lambda: bits.state, lambda saved: setattr(bits, "state", saved))

    def _entries(self, name: str, x: dict[Any, Any], saved: dict[Any, Any], each: bool = False) -> None:
        """Save the entries of a dictionary; with ``each``, an entry that changes is listed as name + key."""

        def restore() -> bool:
            now = {key: value for key, value in x.items() if not (each and key in _OF_MODULE)}
            added, kept = now.keys() - saved.keys(), [key for key in saved if now.get(key, self) is not saved[key]]
            # A number or a string may be replaced by an equal one.
            pairs = ((key, now.get(key), saved[key]) for key in kept)
            equal = {key for key, a, b in pairs if isinstance(a, _PLAIN) and type(a) is type(b) and a == b}
            unlike = [*added, *(key for key in kept if key not in equal)]
            for key in added:
                del x[key]
            x.update((key, saved[key]) for key in kept)
            if each:
                self.changed.update(f"{name}{key}" for key in unlike)
            return bool(unlike) and not each

        self._restore.append((name, restore))

    def _contents(self, name: str, x: Any) -> None:
        saved, is_set = x.copy(), isinstance(x, set)

        def restore() -> bool:
            if len(x) == len(saved) and (x == saved if is_set else all(map(operator.is_, x, saved))):
                return False
            x.clear()
            (x.update if is_set else x.extend)(saved)
            return True

        self._restore.append((name, restore))


def is_object(x: Any) -> bool:
    """Return whether a value is an object of its own kind, such as a cache of keys: no tensor or container."""
    is_known = isinstance(x, (*_PLAIN, Tensor, Mapping, list, tuple, set)) or dataclasses.is_dataclass(x)
    return not is_known and hasattr(x, "__dict__") and type(x).__module__.partition(".")[0] not in _MACHINERY


class _CopyingTensors(TorchFunctionMode):
    """Lets `copy.deepcopy` copy the values of every tensor, also of one that is part of a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def copied(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], root: nn.Module
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a copy of the arguments of a model: tensors, containers and objects such as a cache of keys.

    The model's own modules and parameters are not copied, nor is an object that cannot be copied.
    """
    memo = {id(x): x for x in (*root.modules(), *root.parameters(), *root.buffers())}

    def copy_of(x: Any) -> Any:
        try:
            return copy.deepcopy(x, memo)
        except Exception:  # a lock, an open file, a stream
            return x

    with _CopyingTensors():
        return tuple(map(copy_of, args)), {name: copy_of(x) for name, x in kwargs.items()}


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
        if any(getattr(module, "gradient_checkpointing", False) and module.training for module in root.modules()):
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
