"""Intercepts the attention calls and modules of a third-party model during a forward pass.

`Capture` is a TorchFunctionMode: it gets every torch function of the pass. It recognizes attention calls by their
function (scaled_dot_product_attention, flex_attention, `nn.MultiheadAttention`) or operator (flash_attn, torch's
varlen_attn). The attention functions of transformers and the dense attention of mmqk's own model are patched during
the pass, and global module hooks track the running module. `ByHand` reads attention written with matmul and softmax;
modules whose attention is written in another way are reported.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode

from mmqk.monitors.adapters import block_of, clean, layer_numbers, tensors_in
from mmqk.monitors.foreign import calls
from mmqk.monitors.foreign.calls import Call, NotMeasured
from mmqk.monitors.foreign.inputs import by_name
from mmqk.monitors.foreign.isolate import replace
from mmqk.monitors.foreign.layers import Layers, Stream
from mmqk.monitors.foreign.measurement import CallOrigins, Measurement
from mmqk.monitors.foreign.trace import PRODUCT, SOFTMAX, ByHand, Layout, Origin, Origins


class Capture(TorchFunctionMode):
    """Passes each attention call, embedding and module of a forward pass to a `Measurement`.

    Args:
        root: the model.
        rows: number of sequences in the batch, needed to read packed calls, which have no batch axis.
        measurement: gets each attention call after it ran, the ids of each embedding, and each module after it ran.
        origins: origins of the tensors of this forward pass.

    Attributes:
        stream: the residual stream.
        modules: modules that ran on the main side's tokens, by path.
        softmaxes: paths of modules that computed a softmax of square matrices outside an attention call.
        products: paths of modules that computed a token-by-token matrix as a product of two activations.
        cross_products: paths of modules that multiplied two activations of different origins, as in cross-attention.
        attention_types: types of the modules that made attention calls.
    """

    def __init__(self, root: nn.Module, rows: int, measurement: Measurement, origins: Origins):
        super().__init__()
        self.root = root
        innermost = {clean(name): module for name, module in root.named_modules()}
        self.paths = {module: path for path, module in innermost.items()}
        self.rows, self.tokens, self.measurement = rows, measurement.modality_BT.shape[1], measurement
        self.origins = origins
        self.stream = Stream(origins, lambda x: measurement.is_stream(x, origins.of(x)), lambda: measurement.main_calls)
        self.layout = Layout(rows)
        self.by_hand = ByHand(self.layout, origins)
        self.modules: dict[str, nn.Module] = {}
        self.softmaxes, self.products, self.cross_products = set[str](), set[str](), set[str]()
        self.attention_types: set[type[nn.Module]] = set()
        # Running modules, outermost first: path, module and its first input.
        self._running: list[tuple[str, nn.Module, Tensor | None]] = [("", root, None)]
        self._in_attention = False  # inside an attention function that is read as one call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_attention:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._run_multihead(args, kwargs)
        if (reader := calls.reader_of(func)) is not None:
            is_flash = reader[0] in (calls.of_flash, calls.of_flash_varlen)
            is_refused = is_flash and args[0].dtype not in (torch.float16, torch.bfloat16)
            dense = partial(_flash_output, args[0].shape) if is_refused else None
            return self._run_attention(func, partial(self._read, *reader), args, kwargs, dense=dense)
        name = getattr(func, "__name__", "")
        if name in SOFTMAX and args and isinstance(args[0], Tensor):
            self._softmax(args[0])
        if func is F.embedding:
            self.measurement.embedding(args[0], self.origins.of(args[0]))
        before = self.stream.before(name, args)
        out = func(*args, **kwargs)
        self.origins.trace(name, args, kwargs, out)
        self.stream.trace(name, args, kwargs, out, before)
        self.layout.trace(name, args, out)
        path, module, _ = self._running[-1]
        by_hand = self.by_hand.trace(name, args, kwargs, out, path, module)
        if by_hand is not None:
            scores, call = by_hand
            origins = self.origins.of(scores.operands[0]), self.origins.of(scores.operands[1])
            self.origins.set(out, self._pass_on(scores.path, scores.module, call, origins))
        elif name in PRODUCT:
            self._product((args, kwargs), out)
        return out

    # Attention written with softmax and matmul

    def _softmax(self, x: Tensor) -> None:
        is_square = x.ndim >= 3 and x.shape[-1] == x.shape[-2] == self.tokens > 1 and not self.by_hand.has(x)
        path = self._running[-1][0]
        if is_square and path not in self.cross_products and self.measurement.may_be_main(self.origins.of(x)):
            self.softmaxes.add(path)

    def _product(self, arguments: Any, out: Any) -> None:
        """Record a product of two activations that may be attention logits, because it is a token-by-token matrix."""
        factors = [x for x in tensors_in(arguments) if not isinstance(x, nn.Parameter) and x.ndim >= 3]
        if self.tokens < 2 or len(factors) < 2 or factors[-2].shape[-1] < 2 or not isinstance(out, Tensor):
            return
        if list(out.shape).count(self.tokens) < 2:
            return
        q, k = (self.origins.of(x) for x in factors[-2:])
        if q and k and q.inputs and k.inputs and q.inputs != k.inputs:
            self.cross_products.add(self._running[-1][0])
        elif self.measurement.may_be_main(q):
            self.products.add(self._running[-1][0])

    # Attention calls

    def _run_attention(
        self,
        func: Callable[..., Any],
        read: Callable[..., Call],
        args: Any,
        kwargs: Any,
        *,
        origins: CallOrigins | None = None,
        module: nn.Module | None = None,
        dense: Callable[[Call], Any] | None = None,
    ) -> Any:
        """Run and measure one attention function.

        Args:
            func: the attention function.
            read: returns the `Call` with these arguments.
            args, kwargs: the arguments of both.
            origins: origins of the queries and keys; by default those of the arguments.
            module: the module that calls a function of transformers or mmqk, whose second output may be the weights.
            dense: returns the output of a call in place of ``func``, because ``func`` refuses fp32; or None.
        """
        origins = self._call_origins(args, kwargs) if origins is None else origins
        path, running, _ = self._running[-1]
        call: Call | NotMeasured
        self._in_attention = True
        try:
            try:
                call = read(*args, **kwargs)
            except NotMeasured as reason:
                call = reason
            out = dense(call) if dense is not None and isinstance(call, Call) else func(*args, **kwargs)
            if module is not None and isinstance(call, Call) and isinstance(out, tuple) and len(out) > 1:
                call.weights_BHTS = out[1]
            path = path if module is None else self.paths.get(module, path)
            self.origins.set(out, self._pass_on(path, module or running, call, origins))
        finally:
            self._in_attention = False
        return out

    def _pass_on(self, path: str, module: nn.Module, call: Call | NotMeasured, origins: CallOrigins) -> Origin | None:
        """Measure a call of this module and return the origin of its output."""
        self.attention_types.add(type(module))
        number = self.measurement.attention(path, call, origins)
        return None if origins[0] is None else Origin(origins[0].inputs, number)

    def _read(self, reader: Callable[..., Call], names: tuple[str, ...], *args: Any, **kwargs: Any) -> Call:
        """Return the call of a torch function or operator, with what its arguments do not tell."""
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if reader is calls.of_sdpa:
            order = self.layout.order_of(*tensors_in(args), *tensors_in(kwargs))
            named["split"] = lambda x: self.layout.split(x, order)
        elif reader in (calls.of_flash_varlen, calls.of_torch_varlen):
            named["rows"] = self.rows
        call = reader(**named)
        if reader is calls.of_flex:  # transformers applies the sinks of its layers after the operator
            call.set_sinks(getattr(self._running[-1][1], "sinks", None))
        return call

    def _call_origins(self, args: Any, kwargs: Any) -> CallOrigins:
        """Return the origins of queries and keys; if neither is known, the origin of the enclosing module's input."""
        operands = [*args[:2], *(kwargs[name] for name in ("query", "key", "q", "k") if name in kwargs)]
        q, k = (self.origins.of(x) for x in operands[:2])
        if q is None and k is None:
            outer = (self.origins.of(x) for _, _, x in reversed(self._running) if x is not None)
            q = k = next((origin for origin in outer if origin is not None and origin.inputs), None)
        return q, k

    def _run_multihead(self, args: Any, kwargs: Any) -> Any:
        """Run and measure the function of `nn.MultiheadAttention`.

        The function calls scaled_dot_product_attention only if the weights are not requested. If the weights are
        requested, this method runs the function twice: once without the weights for the measurement, and once with
        them for the output.
        """
        sdpa = F.scaled_dot_product_attention
        reader = calls.reader_of(sdpa)
        assert reader is not None
        read = partial(self._read, *reader)
        origins, outputs = self._call_origins(args, kwargs), list[Tensor]()

        def measured(*a: Any, **k: Any) -> Any:
            outputs.append(self._run_attention(sdpa, read, a, k, origins=origins))
            return outputs[-1]

        with ExitStack() as stack:
            replace(stack, F, "scaled_dot_product_attention", measured)
            out = F.multi_head_attention_forward(*args, **{**kwargs, "need_weights": False})
        if kwargs.get("need_weights", True):
            out = F.multi_head_attention_forward(*args, **kwargs)
        self.origins.set(out, self.origins.of(outputs[0]) if outputs else origins[0])
        return out

    def wrapped(
        self, forward: Callable[..., Any], read: Callable[..., Call], dense: Callable[[Call], Any] | None = None
    ) -> Callable[..., Any]:
        """Return ``forward``, an attention function that gets the module first, as a function that is measured."""

        def measured(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run, read_call = partial(forward, module), partial(read, module)
            return self._run_attention(run, read_call, args, kwargs, module=module, dense=dense)

        return measured

    # Modules

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if module in self.paths:
            path, module_input = self.paths[module], next(tensors_in(args), None)
            self._running.append((path, module, module_input))
            self.stream.enter(path, module_input)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self.paths.get(module)
        if path is None:
            return
        _, _, module_input = self._running.pop()
        origin, first_output = self.origins.of(module_input), next(tensors_in(output), None)
        if self.measurement.may_be_main(origin):
            self.modules[path] = module
        # An output has no origin if an autograd.Function or scripted code computed it, because torch does not pass
        # these to a TorchFunctionMode.
        for x in tensors_in(output) if origin is not None and origin.inputs else ():
            if self.origins.of(x) is None:
                self.origins.set(x, origin)
        self.stream.leave(path, module, module_input, first_output)
        if self.measurement.may_be_main(self.origins.of(first_output)):
            self.measurement.module(path, module_input, first_output)

    # After the forward pass

    def layers(self) -> Layers:
        """Return the layers that have attention, and those whose attention was not measured.

        A layer has attention that was not measured in two cases: one of its calls was not measured, or one of its
        modules made no attention call but seems to compute attention. Such a module has the type of a module that
        made a call, or "attention" in the name of its class, or it computes token-by-token products or softmaxes.
        """
        records = self.measurement.records
        measured = [record.path for record in records if record.not_measured is None and not record.cross]
        calls = {record.path for record in records}
        blocks = {block_of(path) for path in calls}
        not_measured = {r.path for r in records if r.not_measured is not None and not r.other_tokens}
        pending = {  # products with a number for each pair of the main side's tokens
            scores.path
            for scores in self.by_hand.pending
            if scores.q.shape[-2] == scores.k.shape[-2] > 1
            and scores.path not in self.cross_products
            and self.measurement.may_be_main(self.origins.of(scores.operands[0]))
        }
        hidden = not_measured | self.softmaxes | pending
        for path, module in self.modules.items():
            is_attention = type(module) in self.attention_types or isinstance(module, nn.MultiheadAttention)
            name = getattr(module, "original_name", type(module).__name__)  # the first is that of a scripted module
            is_named = ("attention" in name.lower() or "attn" in name.lower()) and block_of(path) not in blocks
            if (is_attention or path in self.products or is_named) and not any(
                _within(path, call) or _within(call, path) for call in calls
            ):
                hidden.add(path)
        outermost = {path for path in hidden if not any(_within(path, p) for p in hidden - {path, ""})}
        measured_blocks = {block_of(path) for path in measured}
        places = {path if block_of(path) in measured_blocks else block_of(path) for path in outermost}
        in_order = sorted(places, key=lambda s: [(int(x), "") if x.isdigit() else (-1, x) for x in s.split(".")])
        names = [place or "the model" for place in in_order]  # layers.2 before layers.10
        seen = {path for path in measured if not any(_within(path, place) for place in places - {""})}
        return Layers(layer_numbers(measured), names, len(seen), bool(hidden - not_measured))


def _flash_output(q_shape: torch.Size, call: Call) -> Any:
    """Return the output of dense attention as the operators of flash_attn return it."""
    out_BTHK = call.output().transpose(1, 2)
    return out_BTHK.reshape(q_shape[:-1] + out_BTHK.shape[-1:]), out_BTHK.new_zeros(call.q_BHTK.shape[:3]), None, None


def _transformers_output(call: Call) -> Any:
    """Return the output of dense attention as transformers' flash attention returns it."""
    return call.output().transpose(1, 2), None


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + ".") or not outer


def _read_eager(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Call:
    """Read a call of an ``eager_attention_forward``."""
    try:
        named = by_name(forward, (module, *args), kwargs)
    except TypeError as error:
        raise NotMeasured(str(error)) from error
    if not {"module", "query", "key", "value"} <= named.keys():
        parameters = ", ".join(named)
        raise NotMeasured(f"its attention function takes {parameters}, not module, query, key and value")
    return calls.of_transformers(**named)


@contextmanager
def watching(capture: Capture) -> Iterator[None]:
    """Pass every torch function, module and attention call of transformers inside the context to ``capture``."""
    with ExitStack() as stack:
        stack.enter_context(nn_module.register_module_forward_pre_hook(capture._enter_module))
        stack.enter_context(nn_module.register_module_forward_hook(capture._leave_module, always_call=True))
        _patch_transformers(capture, stack)
        _patch_mmqk(capture, stack)
        _patch_flex(stack)
        stack.enter_context(capture)
        yield


def _patch_transformers(capture: Capture, stack: ExitStack) -> None:
    """Wrap the eager attention function of each modeling file, and the flash entries of transformers' table of
    functions."""
    kinds = {kind for module in capture.paths for kind in type(module).__mro__}
    for name in {kind.__module__ for kind in kinds}:
        forward = getattr(sys.modules.get(name), "eager_attention_forward", None)
        if callable(forward):
            measured = capture.wrapped(forward, partial(_read_eager, forward))
            replace(stack, sys.modules[name], "eager_attention_forward", measured)
    table = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    if table is not None:
        entries = getattr(table, "_global_mapping", table)
        for key in [key for key in entries if "flash" in key and "|" not in key]:
            stack.callback(entries.__setitem__, key, entries[key])
            entries[key] = capture.wrapped(entries[key], calls.of_transformers_flash, _transformers_output)


def _patch_mmqk(capture: Capture, stack: ExitStack) -> None:
    """Wrap the attention function of mmqk's own model. Only its backend math is read here; the others call functions
    of torch."""
    own = sys.modules.get("mmqk.model.attention")
    if own is None:
        return
    forward = own.attention
    measured = capture.wrapped(lambda _, *a, **k: forward(*a, **k), lambda _, *a, **k: calls.of_mmqk(*a, **k))

    def attention(*args: Any, backend: str = "math", **kwargs: Any) -> Any:
        if backend != "math":
            return forward(*args, backend=backend, **kwargs)
        return measured(capture._running[-1][1], *args, **kwargs)

    replace(stack, own, "attention", attention)


def _patch_flex(stack: ExitStack) -> None:
    """Run flex_attention uncompiled and without a warning; some torch versions would compile a wrapper around it."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    switch = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if hasattr(flex, switch):
        replace(stack, flex, switch, True)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
