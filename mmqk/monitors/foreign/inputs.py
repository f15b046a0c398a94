"""The arguments of a call of a model: stored at the last call of the training (`LastCall`), with their token ids and
padding, and cut to the first sequences (`Inputs`).

Shapes: B batch, H heads, T tokens, S key tokens, n images, P patches of all images.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mmqk.monitors.adapters import unwrapped
from mmqk.monitors.foreign.calls import MASKED, documents_of_positions
from mmqk.monitors.foreign.isolate import ISOLATED, copied, is_object
from mmqk.store.errors import UserError

# Usual names of token ids, the most specific first.
_IDS = ("input_ids", "ids_BT", "ids", "token_ids", "tokens", "idx", "x", "inputs", "input")
# Inputs with these words in their names are not token ids.
_NOT_IDS = {"mask", "masks", "label", "labels", "target", "targets"}
# Packages whose objects are no batches: numbers, block masks, caches.
_NO_BATCH = {"builtins", "torch", "transformers", "numpy"}


class LastCall:
    """A forward pre-hook that stores the arguments of the model's last call with gradients enabled.

    Calls during evaluation are therefore not stored, and neither are those that mmqk makes itself.

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
        self.wrapped: tuple[Any, Any] | None = None  # the wrapper of `wrap`, and the forward inside it

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or ISOLATED:
            return
        self.args, self.kwargs = args, kwargs
        self.autocast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        self.traced = torch.compiler.is_compiling()
        if torch.compiler.is_compiling():
            self.args, self.kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
            self.is_copy = True
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
        if compiled is None or self.wrapped is not None:
            return

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.wrapped is not None:
                self(model, args, kwargs)
            return compiled(*args, **kwargs)

        self.wrapped, model._compiled_call_impl = (wrapper, compiled), wrapper

    def unwrap(self, model: nn.Module) -> None:
        """Undo `wrap`. If another watch has wrapped the forward since, the wrapper stays and stores nothing."""
        if self.wrapped is not None and model._compiled_call_impl is self.wrapped[0]:
            model._compiled_call_impl = self.wrapped[1]
        self.wrapped = None

    def take(self, model: nn.Module) -> Inputs | None:
        """Return and clear the arguments; None if there was no call."""
        taken = None if self.args is None or self.kwargs is None else Inputs(model, self.args, self.kwargs)
        self.args = self.kwargs = None
        return taken

    def check(self, inputs: Inputs) -> None:
        """Raise UserError if a traced call got an object that its forward may have changed."""
        objects = [type(x).__name__ for x in (*inputs.args, *inputs.kwargs.values()) if is_object(x)]
        if self.traced and objects:
            raise UserError(
                f"the compiled forward gets a {objects[0]}, which a probe would change: attach the result of "
                "torch.compile instead of the model inside it"
            )


class Inputs:
    """The arguments of one call of a model.

    Args:
        model: the object that is called.
        args, kwargs: the arguments.

    Attributes:
        root: the model without the wrappers of torch.compile and DDP.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        self.model, self.root, self.args, self.kwargs = model, unwrapped(model), args, kwargs

    @cached_property
    def named(self) -> dict[str, Any]:
        """The arguments by the names of the forward's parameters."""
        try:
            return by_name(self._forward, self.args, self.kwargs)
        except (TypeError, ValueError):
            return {**{f"argument{i}": arg for i, arg in enumerate(self.args)}, **self.kwargs}

    def takes(self, name: str) -> bool:
        """Return whether the call could have an argument of this name."""
        try:
            return name in by_name(self._forward, (), {**self.named, name: None})
        except (TypeError, ValueError):
            return False

    @property
    def _forward(self) -> Callable[..., Any]:
        module = self.root
        while (inner := vars(module)["_modules"].get("_fsdp_wrapped_module")) is not None:
            module = unwrapped(inner)
        return module.forward

    @cached_property
    def ids(self) -> tuple[str, Tensor] | None:
        """Name and tensor (B, T) of the token ids: the input with a usual name, else the only integer matrix; or
        None."""
        matrices = [
            (name, x)
            for name, x in named_tensors(self.named)
            if x.ndim == 2 and not x.is_floating_point() and x.dtype != torch.bool
        ]
        usual = [(name, x) for of in _IDS for name, x in matrices if name == of]
        others = [(name, x) for name, x in matrices if not _NOT_IDS & set(name.split("_"))]
        return usual[0] if usual else others[0] if len(others) == 1 else None

    @cached_property
    def rows(self) -> int:
        """B: the number of rows of the token ids, else of the first tensor with at least two axes, else the length of
        the first list of tensors."""
        if self.ids is not None:
            return len(self.ids[1])
        rows = next((len(x) for _, x in named_tensors(self.named) if x.ndim > 1), None)
        return next(map(len, _lists(self.named)), 0) if rows is None else rows

    def copied(self) -> Inputs:
        """Return a copy (`mmqk.monitors.foreign.isolate.copied`)."""
        return Inputs(self.model, *copied(self.args, self.kwargs, self.root))

    def first(self, rows: int, dtype: torch.dtype | None = None) -> Inputs:
        """Return the arguments with at most the first ``rows`` of B sequences and the images that they contain.

        A tensor is sliced on its first axis if that axis has B entries. An integer tensor with three axes (positions in
        height, width and time) is sliced on its second axis. Tensors of images that are not listed by sequence are
        sliced after the last image of the sequences (`_vision_entries`).

        Args:
            rows: number of sequences.
            dtype: replaces the dtype of half-precision tensors.

        Raises:
            UncuttableError: the images cannot be assigned to the sequences.
        """
        entries = {} if rows >= self.rows else _vision_entries(self, rows)
        args, kwargs = _cut((self.args, dict(self.kwargs)), self.rows, min(rows, self.rows), dtype, entries)
        return Inputs(self.model, args, kwargs)

    def padding(self, source: Collection[str] | None) -> Tensor | None:
        """Return the mask (B, T) of the padding of the inputs ``source``; None if there is none.

        The mask is decoder_attention_mask for decoder_input_ids and labels, attention_mask for the token ids, and
        NAME_attention_mask for another input NAME or NAME_ids. A mask with an entry for each pair of tokens is reduced
        to tokens (`tokens_of_pairs`).
        """
        name = "attention_mask"
        if source is not None and len(source) == 1:
            (of,) = source
            if of == "labels" or of.startswith("decoder_"):
                name = "decoder_attention_mask"
            elif self.ids is not None and self.ids[0] != of:
                name = f"{of.removesuffix('_ids')}_attention_mask"
        mask = dict(named_tensors(self.named)).get(name)
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
        return valid_BT.expand(self.rows, -1) if self.ids is not None and len(valid_BT) == 1 else valid_BT

    def documents(self, shape: torch.Size) -> Tensor | None:
        """Return the number of each token's packed document, (B, T); None if the inputs do not tell documents apart.

        The input document_BT or document_ids has these numbers. Without it, a position id (position_ids) below the
        previous one starts a document, as in transformers.
        """
        tensors = dict(named_tensors(self.named))
        document_BT = tensors.get("document_BT", tensors.get("document_ids"))
        position_BT = tensors.get("position_ids")
        if document_BT is None and position_BT is not None and position_BT.ndim == 2:
            document_BT = documents_of_positions(position_BT)
        if document_BT is None or document_BT.shape not in (shape, (1, shape[1])) or not document_BT.any():
            return None
        return document_BT.expand(shape)


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of the function's parameters; raises TypeError if they do not fit."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of nested mappings, sequences, dataclasses and other objects, with its innermost name."""
    if isinstance(value, Tensor):
        yield name, value
    for key, part in _parts(value).items():
        yield from named_tensors(part, name if isinstance(key, int) else str(key))


def _parts(value: Any) -> dict[Any, Any]:
    """Return the parts of a mapping or sequence, or the attributes of an object of a user's class that are or may
    contain tensors, such as those of a batch; empty for other values."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return value._asdict() if hasattr(value, "_fields") else dict(enumerate(value))  # type: ignore[union-attr]
    kind = type(value)
    if isinstance(value, type | nn.Module | Tensor) or kind.__module__.partition(".")[0] in _NO_BATCH:
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


def valid_tokens(mask: Tensor | None, like_BT: Tensor) -> Tensor:
    """Return (B, T) bool: False at padding; all True without a mask of this shape."""
    if mask is None or mask.shape != like_BT.shape:
        return torch.ones_like(like_BT, dtype=torch.bool)
    return visible_of(mask.to(like_BT.device))


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


class UncuttableError(Exception):
    """Raised for a batch whose images cannot be assigned to its sequences; the message gives the reason."""


def _lists(value: Any) -> Iterator[list[Tensor]]:
    """Yield the nested lists that contain only tensors."""
    parts = _parts(value).values()
    if isinstance(value, list) and parts and all(isinstance(x, Tensor) for x in parts):
        yield value
    else:
        for part in parts:
            yield from _lists(part)


def _vision_entries(inputs: Inputs, rows: int) -> dict[int, int]:
    """Return the number of first entries to keep of each tensor that lists images or patches of the whole batch, by
    the tensor's `id`.

    Images are in the order of their tokens. Where a grid gives the patches of each image (``image_grid_thw``), a
    token stands for the same number of patches in all images; without a grid all images have equally many tokens.
    """
    ids, named, entries = inputs.ids, list(named_tensors(inputs.named)), dict[int, int]()
    config = getattr(inputs.root, "config", None)
    for kind in ("image", "video"):
        fields = [getattr(config, f"{kind}_token_{end}", None) for end in ("id", "index")]
        token = next((x for x in fields if x is not None), None)
        if ids is None or token is None:
            continue
        counts_B = (ids[1] == token).sum(1)
        total, kept = int(counts_B.sum()), int(counts_B[:rows].sum())
        pixels = "pixel_values_videos" if kind == "video" else "pixel_values"
        names = {pixels, f"{kind}_sizes", f"{kind}_grid_thw"} | ({"second_per_grid_ts"} if kind == "video" else set())
        own = {name: x for name, x in named if name in names}
        grid, values = own.get(f"{kind}_grid_thw"), own.get(pixels)
        if grid is not None:
            ends = [0, *grid.prod(-1).cumsum(0).tolist()]  # patches up to each image
            patches, rest = divmod(kept * ends[-1], max(total, 1))
            if not total or rest or patches not in ends:
                raise UncuttableError(f"{kind}_grid_thw does not fit the {kind} tokens of its {len(ids[1])} rows")
            for x in own.values():
                entries[id(x)] = patches if len(x) == ends[-1] and x is not grid else ends.index(patches)
        elif values is not None and not (values.ndim >= 5 and len(values) == len(ids[1])):  # not listed by row
            per_image, rest = divmod(total, len(values))
            if rest or not per_image or (counts_B % per_image).any():
                raise UncuttableError(f"its {len(values)} {kind}s cannot be assigned to {len(ids[1])} rows")
            entries |= {id(x): kept // per_image for x in own.values() if len(x) == len(values)}
    return entries


def _cut(value: Any, B: int, rows: int, dtype: torch.dtype | None, entries: Mapping[int, int]) -> Any:
    if isinstance(value, Tensor):
        low = value.dtype in (torch.float16, torch.bfloat16)
        if (kept := entries.get(id(value))) is not None:
            if not kept:
                return None  # the sequences have no images: as if the model was called with text alone
            value = value[:kept]
        elif rows < B and value.ndim == 3 and not value.is_floating_point() and value.shape[1] == B and len(value) <= 4:
            value = value[:, :rows]
        elif rows < B and value.ndim and len(value) == B:
            value = value[:rows]
        return value.to(dtype) if low and dtype is not None else value
    if hasattr(value, "batch_select_indices"):  # a cache of transformers
        if rows < B:
            value = copy.deepcopy(value)
            value.batch_select_indices(torch.arange(rows))
        return value
    if type(value).__name__ == "BlockMask":
        return value[:rows] if value.shape[0] == B > rows else value
    is_list = isinstance(value, list) and len(value) == B and all(isinstance(x, Tensor) for x in value)
    if is_list and any(x.shape[:1] != (B,) for x in value):
        value, B = value[:rows], rows  # one tensor for each sequence
    parts = _parts(value)
    cut = {key: _cut(part, B, rows, dtype, entries) for key, part in parts.items()}
    changed = {key: part for key, part in cut.items() if part is not parts[key]}
    if not changed:
        return value
    if isinstance(value, tuple | list):
        return type(value)(*cut.values()) if hasattr(value, "_fields") else type(value)(cut.values())
    value = copy.copy(value)
    for key, part in changed.items():
        if isinstance(value, Mapping):
            value[key] = part  # type: ignore[index]
        else:
            object.__setattr__(value, key, part)  # also of a frozen dataclass
    return value
