"""Attention calls and modules, seen while a model's forward runs."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode

from mmqk.monitors.third_party import calls, calls_flash
from mmqk.monitors.third_party.boundary import Boundary
from mmqk.monitors.third_party.calls import Call, Unread
from mmqk.monitors.third_party.origins import Origin, Origins, flat
from mmqk.monitors.third_party.stream import Stream

# Of wrappers, which are no part of a module's place in the model.
_WRAPPED = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
_OPERATORS: dict[str, Callable[..., Call]] = {
    "aten::scaled_dot_product_attention": calls.of_sdpa,
    "flash_attn::_flash_attn_forward": calls_flash.of_flash,
    "flash_attn::_flash_attn_varlen_forward": calls_flash.of_flash_varlen,
    "torch_attn::_varlen_attn": calls_flash.of_torch_varlen,
}
_SOFTMAX = {
    torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax, torch._softmax,
    torch.log_softmax, F.log_softmax, Tensor.log_softmax, torch.special.log_softmax,
}  # fmt: skip
_PRODUCT = {
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm,
    torch.einsum,
}  # fmt: skip


def clean(path: str) -> str:
    """A module's path without those of wrappers around it."""
    return _WRAPPED.sub("", path).lstrip(".")


def first_tensor(value: Any) -> Tensor | None:
    """The tensor, or the first one of a tuple, list or mapping."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        value = next((x for x in value if isinstance(x, Tensor)), None)
    return value if isinstance(value, Tensor) else None


class Capture(TorchFunctionMode):
    """Tells of every attention call and every module that runs.

    Args:
        root: the model.
        rows: sequences of the batch, to read calls without an axis for them.
        seen: told of attention calls before they run, of what embeddings take, and of modules when they are done.
        origins: of the tensors of this forward.

    Attributes:
        stream: the residual stream.
        ran: paths of the modules that ran.
        softmaxes: paths of modules that took a softmax of square matrices outside an attention call.
        products: paths of modules that multiplied activations to one number for each two tokens.
        kinds: types of the modules that made attention calls.
        crossed: paths of modules that multiplied activations of different origins so.
    """

    def __init__(self, root: nn.Module, rows: int, seen: Boundary, origins: Origins):
        super().__init__()
        innermost = {clean(name): module for name, module in root.named_modules()}
        self.paths = {module: path for path, module in innermost.items()}
        self.rows, self.tokens, self.seen = rows, seen.modality_BT.shape[1], seen
        self.origins = origins
        self.stream = Stream(origins, lambda x: seen.is_stream(x, origins.of(x)), lambda: seen.own_calls)
        self.crossed: set[str] = set()
        self.ran: dict[str, nn.Module] = {}
        self.softmaxes: set[str] = set()
        self.products: set[str] = set()
        self.kinds: set[type[nn.Module]] = set()
        self._stack: list[tuple[str, nn.Module, Tensor | None]] = [("", root, None)]
        self._inside = False  # of a call that was told already
        self._readers: dict[Any, Callable[..., Call] | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._torch_module(args, kwargs)
        if func in _SOFTMAX and args and isinstance(args[0], Tensor):
            shape = args[0].shape
            square = len(shape) >= 3 and shape[-1] == shape[-2] > 1
            if square and self._stack[-1][0] not in self.crossed and self.seen.ours(self.origins.of(args[0])):
                self.softmaxes.add(self._stack[-1][0])
        reader = self._readers[func] if func in self._readers else self._remember(func)
        if reader is not None:
            call, origin = self._tell(reader, self._over(args, kwargs), *args, **kwargs)
            if (
                call is not None
                and reader in (calls_flash.of_flash, calls_flash.of_flash_varlen)
                and _refused(call)
            ):
                lse_BHT = call.q_BHTK.new_zeros(call.q_BHTK.shape[:3])
                out_BTHK = call.output().transpose(1, 2)
                out = out_BTHK.reshape(args[0].shape[:-1] + out_BTHK.shape[-1:]), lse_BHT, None, None
            else:
                out = func(*args, **kwargs)
            self.origins.put(out, origin)
            return out
        if func is F.embedding:
            self.seen.see_ids(args[0], self.origins.of(args[0]))
        before = self.stream.before(func, args)
        out = func(*args, **kwargs)
        self.origins.see(func, args, kwargs, out)
        self.stream.see(func, args, kwargs, out, before)
        if func in _PRODUCT:
            self._product(args, out)
        return out

    def _product(self, args: Any, out: Any) -> None:
        factors = self._of_two_tokens(args, out)
        if not factors:
            return
        one, other = (self.origins.of(x) for x in factors[-2:])
        if one and other and one.inputs and other.inputs and one.inputs != other.inputs:
            self.crossed.add(self._stack[-1][0])
        elif self.seen.ours(one):
            self.products.add(self._stack[-1][0])

    def _of_two_tokens(self, args: Any, out: Any) -> list[Tensor]:
        """Factors of a product that may be logits: of two activations, no outer product, two axes of all tokens."""
        given = [x for arg in args for x in (arg if isinstance(arg, tuple | list) else (arg,))]
        if self.tokens < 2 or not isinstance(out, Tensor):
            return []
        factors = [
            x for x in given if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.ndim >= 3
        ]
        two = len(factors) >= 2 and factors[-2].shape[-1] > 1 and list(out.shape).count(self.tokens) >= 2
        return factors if two else []

    def _remember(self, func: Any) -> Callable[..., Call] | None:
        name = getattr(func, "_qualified_op_name", "") or ""
        if isinstance(func, torch._ops.OpOverload):
            name = func._schema.name
        reader = _OPERATORS.get(name)
        if func is F.scaled_dot_product_attention:
            reader = calls.of_sdpa
        elif isinstance(func, torch._ops.HigherOrderOperator) and func.name() == "flex_attention":
            reader = calls.of_flex
        self._readers[func] = reader
        return reader

    def _tell(
        self,
        reader: Callable[..., Call],
        over: tuple[Origin | None, Origin | None],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Call | None, Origin | None]:
        """The call, and the origin of what it gives."""
        path, module, _ = self._stack[-1]
        self.kinds.add(type(module))
        try:
            call = reader(self.rows, *args, **kwargs)
        except Unread as unread:
            return None, self._told(path, unread, over)
        return call, self._told(path, call, over)

    def _told(
        self, path: str, call: Call | Unread, over: tuple[Origin | None, Origin | None]
    ) -> Origin | None:
        number = self.seen.see_call(path, call, over)
        return None if over[0] is None else Origin(over[0].inputs, number)

    def _over(self, args: Any, kwargs: Any) -> tuple[Origin | None, Origin | None]:
        """Origins of queries and keys: those of the module around where torch's functions made neither."""
        given = [*args[:2], *(kwargs[name] for name in ("query", "key", "q", "k") if name in kwargs)]
        q, k = (self.origins.of(x) for x in given[:2])
        if q is None and k is None:
            around = (self.origins.of(x) for _, _, x in reversed(self._stack) if x is not None)
            q = k = next((origin for origin in around if origin is not None and origin.inputs), None)
        return q, k

    def _torch_module(self, args: Any, kwargs: Any) -> Any:
        """PyTorch's own module: its Python function ends in the fused call unless the weights are asked for."""
        fused = F.scaled_dot_product_attention
        over, origins = self._over(args, kwargs), []

        def told(*a: Any, **k: Any) -> Any:
            origins.append(self._tell(calls.of_sdpa, over, *a, **k)[1])
            return fused(*a, **k)

        with ExitStack() as stack:
            _replace(stack, F, "scaled_dot_product_attention", told)
            out = F.multi_head_attention_forward(*args, **{**kwargs, "need_weights": False})
        if kwargs.get("need_weights", True):
            out = F.multi_head_attention_forward(*args, **kwargs)
        self.origins.put(out, origins[0] if origins else over[0])
        return out

    # Modules

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if module in self.paths:
            path, given = self.paths[module], first_tensor(args)
            self._stack.append((path, module, given))
            self.stream.enter(path, given)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self.paths.get(module)
        if path is None:
            return
        _, _, given = self._stack.pop()
        origin, made = self.origins.of(given), first_tensor(output)
        if self.seen.ours(origin):
            self.ran[path] = module
        for x in flat(output):
            # Made out of sight: by an autograd.Function, by scripted code.
            if self.origins.of(x) is None and origin is not None and origin.inputs:
                self.origins.put(x, origin)
        self.stream.leave(path, module, given, made)
        if self.seen.ours(self.origins.of(made)):
            self.seen.see_module(path, given, made)

    # transformers

    def dense(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Of an ``eager_attention_forward``: told with the weights that it gives."""

        def told(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.paths.get(module, self._stack[-1][0])
            self.kinds.add(type(module))
            self._inside, over = True, self._over(args, kwargs)
            try:
                out = forward(module, *args, **kwargs)
                try:
                    named = _named(forward, (module, *args), kwargs)
                    call: Call | Unread = calls.of_transformers(self.rows, **named)
                    weights = out[1] if isinstance(out, tuple) and len(out) > 1 else None
                    if isinstance(call, Call):
                        call.weights_BHTS = weights
                except Unread as unread:
                    call = unread
                self.origins.put(out, self._told(path, call, over))
            finally:
                self._inside = False
            return out

        return told

    def flash(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """In place of a flash-attention interface, which refuses fp32 and takes padding apart."""

        def told(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.paths.get(module, self._stack[-1][0])
            self.kinds.add(type(module))
            self._inside, over = True, self._over(args, kwargs)
            try:
                call = calls_flash.of_transformers_flash(self.rows, module, *args, **kwargs)
                origin, out = self._told(path, call, over), (call.output().transpose(1, 2), None)
            except Unread as unread:
                origin, out = self._told(path, unread, over), forward(module, *args, **kwargs)
            finally:
                self._inside = False
            self.origins.put(out, origin)
            return out

        return told


def _refused(call: Call) -> bool:
    return call.q_BHTK.dtype not in (torch.float16, torch.bfloat16)


def _named(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names that the function has for them, whatever their order."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as error:
        raise Unread(str(error)) from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    if not {"module", "query", "key", "value"} <= named.keys():
        raise Unread(f"an attention function with the arguments {', '.join(named)}")
    named.setdefault("attention_mask", None)
    return named


@contextmanager
def watching(capture: Capture) -> Iterator[None]:
    """Everything within is told to ``capture``."""
    with ExitStack() as stack:
        hook = nn_module.register_module_forward_pre_hook(capture._enter_module)
        stack.callback(hook.remove)
        stack.callback(nn_module.register_module_forward_hook(capture._leave_module, always_call=True).remove)
        _patch_transformers(capture, stack)
        _patch_flex(stack)
        stack.enter_context(capture)
        yield


def _patch_transformers(capture: Capture, stack: ExitStack) -> None:
    """Their dense attention is a function of each modeling file; their flash-attention an entry of a table."""
    kinds = {kind for module in capture.paths for kind in type(module).__mro__}
    for name in {kind.__module__ for kind in kinds}:
        forward = getattr(sys.modules.get(name), "eager_attention_forward", None)
        if callable(forward):
            _replace(stack, sys.modules[name], "eager_attention_forward", capture.dense(forward))
    table = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    if table is not None:
        entries = getattr(table, "_global_mapping", table)
        for key in [key for key in entries if "flash" in key and "|" not in key]:
            stack.callback(entries.__setitem__, key, entries[key])
            entries[key] = capture.flash(entries[key])


def _patch_flex(stack: ExitStack) -> None:
    """Uncompiled, on purpose: it warns of that, and some versions compile an eager wrapper of their own."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    switch = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if hasattr(flex, switch):
        _replace(stack, flex, switch, True)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Until the stack closes."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
