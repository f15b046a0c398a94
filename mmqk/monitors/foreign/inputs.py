"""Stores the batch that a model was called with, and finds its token ids, modalities and padding.

Shapes: B batch, H heads, T tokens, S key tokens.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmqk.monitors.foreign.calls import MASKED
from mmqk.monitors.foreign.isolate import copied, is_object, unwrapped
from mmqk.store.errors import UserError
from mmqk.store.tags import tag

Inputs = Mapping[str, Any]
Ranges = range | Sequence[range]
# Id ranges of each modality except text, or a function from the inputs to (B, T) modality numbers.
Modality = Mapping[str, Ranges] | Callable[[Inputs], Tensor]

# Usual names of token ids, the most specific first.
_IDS = ("input_ids", "ids_BT", "ids", "token_ids", "tokens", "idx", "x", "inputs", "input")
# Inputs with these words in their names are not token ids.
_NOT_IDS = {"mask", "masks", "label", "labels", "target", "targets"}
_WRAPPER = "_fsdp_wrapped_module"
# Packages whose objects are no batches: numbers, block masks, caches.
_NO_BATCH = {"builtins", "torch", "transformers", "numpy"}


class LastCall:
    """A forward pre-hook that stores the arguments of the model's last call with gradients enabled.

    Calls during evaluation are therefore not stored.

    A forward may edit its inputs in place, or append to a cache. So the hook stores a copy of the arguments while
    ``copying`` is true, which `Watch` sets for steps with a probe.

    torch.compile can trace the hook. A traced hook copies the tensors of every call, because another value of a flag
    would compile the model again.

    If the model is copied, for example for a moving average of its weights, the hook is copied too. Nothing reads the
    copied hook.
    """

    def __init__(self) -> None:
        self.args: tuple[Any, ...] | None = None
        self.kwargs: dict[str, Any] | None = None
        self.autocast = False
        self.copying = True
        self.is_copy = False  # whether ``args`` and ``kwargs`` are copies
        self.traced = False  # whether torch.compile traced the last call

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        self.args, self.kwargs = args, kwargs
        self.autocast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        self.traced = torch.compiler.is_compiling()
        if torch.compiler.is_compiling():
            self.args, self.kwargs, self.is_copy = _cloned(args), _cloned(kwargs), True
        else:
            self.is_copy = self.copying
            if self.copying:
                self.args, self.kwargs = copied(args, kwargs, unwrapped(module))

    def __getstate__(self) -> dict[str, Any]:
        return vars(LastCall())

    def wrap(self, model: nn.Module) -> None:
        """Wrap a forward that `Module.compile` compiled in place: a compiled forward ignores hooks that are added
        later."""
        compiled = getattr(model, "_compiled_call_impl", None)
        if compiled is None or any(wrapper.last_call is self for wrapper in _wrappers(compiled)):
            return

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self(model, args, kwargs)
            return wrapper.inner(*args, **kwargs)  # type: ignore[attr-defined]

        wrapper.last_call = self  # type: ignore[attr-defined]
        wrapper.inner = compiled  # type: ignore[attr-defined]
        model._compiled_call_impl = wrapper

    def unwrap(self, model: nn.Module) -> None:
        """Undo `wrap`, even if another watch has wrapped the forward since."""
        outer: Any = None
        for wrapper in _wrappers(getattr(model, "_compiled_call_impl", None)):
            if wrapper.last_call is not self:
                outer = wrapper
            elif outer is None:
                model._compiled_call_impl = wrapper.inner
            else:
                outer.inner = wrapper.inner

    def take(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return and clear the arguments; None if there was no call."""
        arguments = None if self.args is None or self.kwargs is None else (self.args, self.kwargs)
        self.args = self.kwargs = None
        return arguments

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise UserError if a traced call got an object that its forward may have changed."""
        objects = [type(x).__name__ for x in (*args, *kwargs.values()) if is_object(x)]
        if self.traced and objects:
            raise UserError(
                f"the compiled forward gets a {objects[0]}, which a probe would change: attach the result of "
                "torch.compile instead of the model inside it"
            )


def _cloned(value: Any) -> Any:
    """Return nested tuples, lists and dictionaries with copies of their tensors; torch.compile can trace this."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {name: _cloned(x) for name, x in value.items()}
    if type(value) is list:
        return [_cloned(x) for x in value]
    if type(value) is tuple:
        return tuple([_cloned(x) for x in value])
    return value


def _wrappers(compiled: Any) -> Iterator[Any]:
    """Yield the wrappers that `LastCall.wrap` put around a compiled forward, outermost first."""
    while hasattr(compiled, "last_call"):
        yield compiled
        compiled = compiled.inner


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of the function's parameters; raises TypeError if they do not fit."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named


def named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the model by name."""
    module = unwrapped(model)
    while (inner := vars(module)["_modules"].get(_WRAPPER)) is not None:
        module = unwrapped(inner)
    try:
        return by_name(module.forward, args, kwargs)
    except (TypeError, ValueError):
        return {**{f"argument{i}": arg for i, arg in enumerate(args)}, **kwargs}


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of nested mappings, sequences, dataclasses and other objects, with its innermost name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping) or hasattr(value, "_fields"):
        for key, part in (value if isinstance(value, Mapping) else value._asdict()).items():
            yield from tensors(part, str(key))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part, name)
    else:
        for key, part in fields_of(value).items():
            yield from tensors(part, key)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a user's class that are or may contain tensors, such as those of a batch;
    empty for other values."""
    kind = type(value)
    if isinstance(value, type | nn.Module) or kind.__module__.partition(".")[0] in _NO_BATCH:
        return {}
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    names = [*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))]
    parts = {name: getattr(value, name) for name in names if name not in ("__dict__", "__weakref__")}
    containers = (Tensor, Mapping, tuple, list)
    return {
        name: part
        for name, part in parts.items()
        if isinstance(part, containers) or (dataclasses.is_dataclass(part) and not isinstance(part, type))
    }


def find_ids(inputs: Inputs) -> tuple[str, Tensor] | None:
    """Return the name and tensor (B, T) of the token ids: the input with a usual name, else the only integer
    matrix."""
    matrices = [
        (name, x)
        for name, x in tensors(inputs)
        if x.ndim == 2 and not x.is_floating_point() and x.dtype != torch.bool
    ]
    for usual in _IDS:
        for name, x in matrices:
            if name == usual:
                return name, x
    others = [(name, x) for name, x in matrices if not _NOT_IDS & set(name.split("_"))]
    return others[0] if len(others) == 1 else None


class Modalities:
    """Maps tokens to modalities.

    Args:
        modality: ``{"image": range(a, b)}``, the id range or ranges of each modality. Other ids are text; with ``{}``
            all ids are text. It may also be a function that gets the model's inputs by name and returns (B, T), the
            modality number of each token over which attention runs. A token with a number outside 0 to M - 1 has no
            modality.
        names: if ``modality`` is a function, the names of modalities 0 to M - 1; else ignored.

    Attributes:
        names: the M names.
        ranges: id ranges by modality; None if ``modality`` is a function.

    Raises:
        UserError: a range overlaps another, is empty or has a step other than 1, or a name is not a valid tag.
    """

    def __init__(self, modality: Modality, names: Sequence[str] = ("text", "image")):
        self.function = modality if callable(modality) else None
        if isinstance(names, str) or len(set(names)) < max(1, len(names)):
            raise UserError(f"names is {names!r}: give one or more different names, such as ('text', 'image')")
        self.ranges: dict[str, list[range]] | None = None
        if callable(modality):
            self.names = tuple(names)
        elif isinstance(modality, Mapping):
            ranges: dict[str, list[range]] = {"text": []}
            for name, ids in modality.items():
                ranges[str(name)] = list(ids) if isinstance(ids, list | tuple) else [ids]  # type: ignore[list-item]
            self.ranges = ranges
            self.names = tuple(ranges)
            _check_ranges(ranges)
        else:
            raise UserError(
                f'modality is {modality!r}: give ranges of ids, such as {{"image": range(4, 8196)}}, or a function'
            )
        for name in self.names:
            try:
                tag("q_norm", name)
            except ValueError as error:
                raise UserError(f"modality: {error}") from error

    def of(self, inputs: Inputs) -> Tensor:
        """Return the modality numbers, (B, T)."""
        if self.function is not None:
            modality_BT = self.function(inputs)
            if not isinstance(modality_BT, Tensor) or modality_BT.ndim != 2:
                is_tensor = isinstance(modality_BT, Tensor)
                returned = f"shape {tuple(modality_BT.shape)}" if is_tensor else type(modality_BT).__name__
                raise UserError(f"the modality function returned {returned}: return modality numbers (B, T)")
            return modality_BT.long()
        ids = find_ids(inputs)
        if ids is None:
            raise UserError(
                f"modality has id ranges, but the model's inputs ({', '.join(inputs)}) have no token ids: "
                "pass a function from the inputs to modality numbers (B, T)"
            )
        return self.of_ids(ids[1])

    def of_ids(self, ids: Tensor) -> Tensor:
        """Return the modality numbers of ids of any shape, by the ranges."""
        assert self.ranges is not None
        number = torch.zeros_like(ids, dtype=torch.long)
        for m, name in enumerate(self.names):
            for part in self.ranges[name]:
                number = torch.where((ids >= part.start) & (ids < part.stop), m, number)
        return number


def _check_ranges(ranges: Mapping[str, list[range]]) -> None:
    if len(ranges) < 2 and ranges["text"]:
        raise UserError(
            'modality has only text: give the ids of another modality, such as {"image": range(4, 8196)}, or {} if '
            "all ids are text"
        )
    for name, parts in ranges.items():
        if any(not isinstance(part, range) or part.step != 1 or part.start < 0 or not part for part in parts):
            raise UserError(
                f"modality: {name} is {parts}: give ranges of ids from 0 up, not empty and with step 1, or pass a "
                "function from the model's inputs to modality numbers (B, T)"
            )
        if not parts and name != "text":
            raise UserError(f"modality: {name} has no ids: give a range of ids")
    spans = sorted((part.start, part.stop, name) for name, parts in ranges.items() for part in parts)
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise UserError(
                f"modality: ids {start} to {end - 1} are both {one} and {other}: give ranges that do not overlap"
            )


def padding_mask(inputs: Inputs, source: Collection[str] | None) -> Tensor | None:
    """Return the mask (B, T) of the padding of the inputs ``source``; None if there is none.

    The mask is decoder_attention_mask for decoder_input_ids and labels, attention_mask for the token ids, and
    NAME_attention_mask for another input NAME or NAME_ids. A mask with an entry for each pair of tokens is reduced to
    tokens (`tokens_of_pairs`).
    """
    name, ids = "attention_mask", find_ids(inputs)
    if source is not None and len(source) == 1:
        (of,) = source
        if of == "labels" or of.startswith("decoder_"):
            name = "decoder_attention_mask"
        elif ids is not None and ids[0] != of:
            name = f"{of.removesuffix('_ids')}_attention_mask"
    mask = dict(tensors(inputs)).get(name)
    if mask is None or mask.ndim not in (3, 4):
        return mask
    visible_BTS = visible_of(mask).any(1) if mask.ndim == 4 else visible_of(mask)
    if visible_BTS.shape[1] == 1:
        valid_BT = visible_BTS[:, 0]
    elif visible_BTS.shape[1] != visible_BTS.shape[2]:
        return mask
    else:
        valid_BT, is_unclear = tokens_of_pairs(visible_BTS)
        if is_unclear:
            warnings.warn(
                f"mmqk: {name} has shape {tuple(mask.shape)}, and no other token sees some tokens, which may be "
                "padding but are counted: in the modality function, return -1 for padding",
                stacklevel=8,
            )
    return valid_BT.expand(len(ids[1]), -1) if ids is not None and len(valid_BT) == 1 else valid_BT


def visible_of(mask: Tensor) -> Tensor:
    """Return True where a mask of 1 and 0, or of 0 and large negative numbers, lets tokens be seen."""
    is_additive = mask.is_floating_point() and not (mask > 0).any()
    return mask > (MASKED if is_additive else 0)


def tokens_of_pairs(visible_BTS: Tensor) -> tuple[Tensor, bool]:
    """Return which tokens are no padding (B, T), and whether the mask may have padding that it does not tell apart.

    A token that no token sees, or that sees only itself and is seen only by itself, is padding. A token that only
    itself sees may be padding or the last token of a document. It is unclear if a later token sees earlier ones.
    """
    T = visible_BTS.shape[1]
    itself = torch.eye(T, dtype=torch.bool, device=visible_BTS.device)
    seen_BT = (visible_BTS & ~itself).any(1)
    sees_BT = (visible_BTS & ~itself).any(2)
    valid_BT = seen_BT | (visible_BTS & itself).any(1) & sees_BT
    position_S = torch.arange(T, device=visible_BTS.device)
    first_BT = torch.where(visible_BTS, position_S, T).amin(2)  # first key that a query sees
    later_BT = torch.full_like(first_BT, T)  # smallest one of all later queries
    later_BT[:, :-1] = first_BT.flip(1).cummin(1).values.flip(1)[:, 1:]
    return valid_BT, bool((valid_BT & ~seen_BT & (later_BT < position_S)).any())
