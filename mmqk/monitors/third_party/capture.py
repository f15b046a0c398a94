"""Intercepts the attention calls and modules of a third-party model while its forward runs.

`Capture` is a TorchFunctionMode: torch passes it every torch function of the forward. It recognizes attention calls
by their function (scaled_dot_product_attention, flex_attention, `nn.MultiheadAttention`) or operator (flash_attn,
torch's varlen_attn). transformers' attention functions are patched during the forward, and global module hooks give
the path of the running module. Attention built from matmul and softmax cannot be measured; its modules are reported.
"""

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

# Path parts of wrappers.
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
    """A module's path without the parts of wrappers."""
    return _WRAPPED.sub("", path).lstrip(".")


def first_tensor(value: Any) -> Tensor | None:
    """The tensor, or the first one of a tuple, list or mapping."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        value = next((x for x in value if isinstance(x, Tensor)), None)
    return value if isinstance(value, Tensor) else None


class Capture(TorchFunctionMode):
    """Passes each attention call, embedding and module of a forward to a `Boundary`.

    Args:
        root: the model.
        rows: number of sequences in the batch, to read packed calls, which have no batch axis.
        boundary: gets attention calls before they run, the ids that embeddings read, and modules after they ran.
        origins: origins of this forward's tensors.

    Attributes:
        stream: the residual stream.
        ran: modules that ran on the main side's tokens, by path.
        softmaxes: paths of modules that computed a softmax of square matrices outside an attention call.
        products: paths of modules that multiplied two activations to a matrix of token by token.
        kinds: types of the modules that made attention calls.
        crossed: as products, but for two activations of different origins: cross-attention.
    """

    def __init__(self, root: nn.Module, rows: int, boundary: Boundary, origins: Origins):
        super().__init__()
        innermost = {clean(name): module for name, module in root.named_modules()}
        self.paths = {module: path for path, module in innermost.items()}
        self.rows, self.tokens, self.boundary = rows, boundary.modality_BT.shape[1], boundary
        self.origins = origins
        self.stream = Stream(
            origins, lambda x: boundary.is_stream(x, origins.of(x)), lambda: boundary.main_calls
        )
        self.crossed: set[str] = set()
        self.ran: dict[str, nn.Module] = {}
        self.softmaxes: set[str] = set()
        self.products: set[str] = set()
        self.kinds: set[type[nn.Module]] = set()
        self._stack: list[tuple[str, nn.Module, Tensor | None]] = [("", root, None)]
        self._inside = False  # inside an attention call that was passed on already
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
            path, origin = self._stack[-1][0], self.origins.of(args[0])
            if square and path not in self.crossed and self.boundary.may_be_main(origin):
                self.softmaxes.add(path)
        reader = self._readers[func] if func in self._readers else self._remember(func)
        if reader is not None:
            call, origin = self._read(reader, self._over(args, kwargs), *args, **kwargs)
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
            self.boundary.see_ids(args[0], self.origins.of(args[0]))
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
        elif self.boundary.may_be_main(one):
            self.products.add(self._stack[-1][0])

    def _of_two_tokens(self, args: Any, out: Any) -> list[Tensor]:
        """The factors of a product that may be attention logits: two activations give a matrix of token by token."""
        operands = [x for arg in args for x in (arg if isinstance(arg, tuple | list) else (arg,))]
        if self.tokens < 2 or not isinstance(out, Tensor):
            return []
        factors = [
            x for x in operands if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.ndim >= 3
        ]
        is_logits = len(factors) >= 2 and factors[-2].shape[-1] > 1 and list(out.shape).count(self.tokens) >= 2
        return factors if is_logits else []

    def _remember(self, func: Any) -> Callable[..., Call] | None:
        """The function of `calls` that reads this torch function; None if it is no attention."""
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

    def _read(
        self,
        reader: Callable[..., Call],
        over: tuple[Origin | None, Origin | None],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Call | None, Origin | None]:
        """Read a call and pass it to the boundary; returns it (None if unread) and the origin of its output."""
        path, module, _ = self._stack[-1]
        self.kinds.add(type(module))
        try:
            call = reader(self.rows, *args, **kwargs)
        except Unread as unread:
            return None, self._pass_on(path, unread, over)
        return call, self._pass_on(path, call, over)

    def _pass_on(
        self, path: str, call: Call | Unread, over: tuple[Origin | None, Origin | None]
    ) -> Origin | None:
        """Pass a call to the boundary; returns the origin of its output."""
        number = self.boundary.see_call(path, call, over)
        return None if over[0] is None else Origin(over[0].inputs, number)

    def _over(self, args: Any, kwargs: Any) -> tuple[Origin | None, Origin | None]:
        """Origins of queries and keys; if neither is known, the origin of the surrounding module's input."""
        operands = [*args[:2], *(kwargs[name] for name in ("query", "key", "q", "k") if name in kwargs)]
        q, k = (self.origins.of(x) for x in operands[:2])
        if q is None and k is None:
            around = (self.origins.of(x) for _, _, x in reversed(self._stack) if x is not None)
            q = k = next((origin for origin in around if origin is not None and origin.inputs), None)
        return q, k

    def _torch_module(self, args: Any, kwargs: Any) -> Any:
        """`nn.MultiheadAttention`, whose function calls the fused kernel only if the weights are not requested."""
        fused = F.scaled_dot_product_attention
        over, origins = self._over(args, kwargs), []

        def read_and_run(*a: Any, **k: Any) -> Any:
            origins.append(self._read(calls.of_sdpa, over, *a, **k)[1])
            return fused(*a, **k)

        with ExitStack() as stack:
            _replace(stack, F, "scaled_dot_product_attention", read_and_run)
            out = F.multi_head_attention_forward(*args, **{**kwargs, "need_weights": False})
        if kwargs.get("need_weights", True):
            out = F.multi_head_attention_forward(*args, **kwargs)
        self.origins.put(out, origins[0] if origins else over[0])
        return out

    # Modules

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if module in self.paths:
            path, module_input = self.paths[module], first_tensor(args)
            self._stack.append((path, module, module_input))
            self.stream.enter(path, module_input)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self.paths.get(module)
        if path is None:
            return
        _, _, module_input = self._stack.pop()
        origin, first_output = self.origins.of(module_input), first_tensor(output)
        if self.boundary.may_be_main(origin):
            self.ran[path] = module
        for x in flat(output):
            # An autograd.Function or scripted code made it, which torch does not pass to a TorchFunctionMode.
            if self.origins.of(x) is None and origin is not None and origin.inputs:
                self.origins.put(x, origin)
        self.stream.leave(path, module, module_input, first_output)
        if self.boundary.may_be_main(self.origins.of(first_output)):
            self.boundary.see_module(path, module_input, first_output)

    # transformers

    def dense(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an ``eager_attention_forward``: read its calls, with the weights that it returns."""

        def wrapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
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
                self.origins.put(out, self._pass_on(path, call, over))
            finally:
                self._inside = False
            return out

        return wrapped

    def flash(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Replace transformers' flash-attention function, which refuses fp32 and unpads the batch."""

        def wrapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.paths.get(module, self._stack[-1][0])
            self.kinds.add(type(module))
            self._inside, over = True, self._over(args, kwargs)
            try:
                call = calls_flash.of_transformers_flash(self.rows, module, *args, **kwargs)
                origin, out = self._pass_on(path, call, over), (call.output().transpose(1, 2), None)
            except Unread as unread:
                origin = self._pass_on(path, unread, over)
                out = forward(module, *args, **kwargs)
            finally:
                self._inside = False
            self.origins.put(out, origin)
            return out

        return wrapped


def _refused(call: Call) -> bool:
    return call.q_BHTK.dtype not in (torch.float16, torch.bfloat16)


def _named(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the function's parameters."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as error:
        raise Unread(str(error)) from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    if not {"module", "query", "key", "value"} <= named.keys():
        raise Unread(f"its attention function takes {', '.join(named)}, not module, query, key and value")
    named.setdefault("attention_mask", None)
    return named


@contextmanager
def watching(capture: Capture) -> Iterator[None]:
    """Pass every torch function, module and transformers attention call inside the context to ``capture``."""
    with ExitStack() as stack:
        hook = nn_module.register_module_forward_pre_hook(capture._enter_module)
        stack.callback(hook.remove)
        stack.callback(nn_module.register_module_forward_hook(capture._leave_module, always_call=True).remove)
        _patch_transformers(capture, stack)
        _patch_flex(stack)
        stack.enter_context(capture)
        yield


def _patch_transformers(capture: Capture, stack: ExitStack) -> None:
    """Wrap the eager attention function of each modeling file, and the flash entries of transformers' table."""
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
    """Run flex_attention uncompiled, without its warning; some versions would compile an eager wrapper."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    switch = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if hasattr(flex, switch):
        _replace(stack, flex, switch, True)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set the attribute until the stack closes."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
