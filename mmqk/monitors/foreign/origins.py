"""Traces every torch function of a forward pass: origins of tensors, and the residual stream.

An origin is the set of model inputs that a tensor's token axis comes from. `attach` uses origins to tell self-
attention (queries and keys have the same origin) from cross-attention, and the decoder's tokens from the encoder's.
The output of attention has the origin of its queries, since it has a row for each query: a decoder's hidden states
keep the origin decoder_input_ids after cross-attention.

The residual stream is found from the additions. A numbered module (``layers.3``) is a layer if its output is its
input plus other terms; norms may follow the additions, as in a post-norm layer. The output is then the residual
stream after the layer. The added term that depends on the layer's attention call is attn_out; the sum of the other
added terms is mlp_out.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from mmqk.monitors.foreign.inputs import Inputs, tensors

# Inputs with these words in their names are not tokens: they describe the tokens of other inputs.
_DESCRIPTIONS = {"mask", "masks", "position", "positions", "type", "types"}
# The output of these functions has the token axis of the first argument that comes from a model input.
_ROWS_OF_FIRST = {
    "matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "linear", "embedding", "conv1d", "conv2d",
    "conv3d", "__getitem__", "index_select", "gather", "masked_fill", "masked_fill_", "masked_scatter",
    "masked_scatter_", "index_put", "index_put_", "__setitem__", "index_add", "index_add_", "index_copy_",
    "scatter", "scatter_", "scatter_add_", "copy_",
}  # fmt: skip
# Additions, including those in place.
ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


class Origin(NamedTuple):
    """The origin of one tensor.

    Attributes:
        inputs: names of the model inputs whose tokens are its positions; empty for parameters and constants.
        call: number of the last attention call that the tensor depends on, except through the residual stream; 0 if
            none.
    """

    inputs: frozenset[str]
    call: int = 0

    def __str__(self) -> str:
        return " and ".join(sorted(self.inputs)) or "parameters"


NO_INPUTS = Origin(frozenset())


class Origins:
    """The origins of the tensors of one forward pass.

    Args:
        inputs: the model's inputs by name.
        constants: a module whose buffers are constants, with the origin `NO_INPUTS`.
        bools: whether to trace bool tensors; otherwise the origin of masks and comparisons is `NO_INPUTS`.
    """

    def __init__(self, inputs: Inputs, constants: nn.Module | None = None, bools: bool = False):
        self.bools = bools
        self._of = WeakTensorKeyDictionary()
        for buffer in constants.buffers() if constants is not None else ():
            self._of[buffer] = NO_INPUTS
        for name, x in tensors(inputs):
            is_mask = x.dtype == torch.bool and not bools
            if not is_mask and not _DESCRIPTIONS & set(name.split("_")):
                self._of[x] = Origin(self._of.get(x, NO_INPUTS).inputs | {name})
            else:
                self._of.setdefault(x, NO_INPUTS)

    def of(self, value: Any) -> Origin | None:
        """Return the origin of a tensor; None if no traced torch function returned it."""
        if isinstance(value, nn.Parameter):
            return NO_INPUTS
        return self._of.get(value) if isinstance(value, Tensor) else None

    def set(self, value: Any, origin: Origin | None) -> None:
        """Set the origin of every tensor in ``value``; do nothing if ``origin`` is None."""
        if origin is None:
            return
        for x in flat(value):
            self._of[x] = origin

    def trace(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Set the origin of ``out``, which the torch function ``func`` returned."""
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            out = args[0]
        outputs = list(flat(out))
        if not outputs:
            return
        arguments = [*flat(args), *flat(kwargs)]
        if name == "where" and len(arguments) == 3:
            arguments = arguments[1:]
        if outputs[0].dtype == torch.bool and not self.bools:
            origin: Origin | None = NO_INPUTS
        else:
            origin = self._combined(name, arguments, outputs[0])
        if origin is None:
            return
        for x in outputs:
            if not isinstance(x, nn.Parameter):
                self._of[x] = origin
        base = outputs[0]._base if name.endswith("_") or name == "__setitem__" else None
        if base is not None and not (self._of.get(base) or NO_INPUTS).inputs:
            self._of[base] = origin

    def _combined(self, name: str, arguments: list[Tensor], out: Tensor) -> Origin | None:
        """Return the origin of ``out`` from the origins of the tensor arguments; None if no argument determines
        it."""
        origins = [(x, self.of(x)) for x in arguments]
        with_inputs = [(x, origin) for x, origin in origins if origin is not None and origin.inputs]
        if not with_inputs:
            untraced = any(origin is None for _, origin in origins)
            return None if untraced else NO_INPUTS
        if name in _ROWS_OF_FIRST:
            inputs = with_inputs[0][1].inputs
            return Origin(inputs, max(origin.call for _, origin in with_inputs))
        # A tensor that is broadcast to the output's shape does not determine the origin of the positions.
        full = [origin for x, origin in with_inputs if x.shape == out.shape]
        full = full or [origin for _, origin in with_inputs]
        inputs = frozenset().union(*(origin.inputs for origin in full))
        calls = [origin.call for origin in full]
        # x + attention(x) is still the residual stream, so an addition keeps the earlier call.
        return Origin(inputs, min(calls) if name in ADDITIONS else max(origin.call for _, origin in with_inputs))


def flat(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from flat(part)


class Tracing(TorchFunctionMode):
    """Traces the origins of every torch function inside the context."""

    def __init__(self, origins: Origins):
        super().__init__()
        self.origins = origins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.origins.trace(func, args, kwargs, out)
        return out


_NUMBERED = re.compile(r"(^|.*\.)\d+")
_NORM = re.compile("norm", re.IGNORECASE)
_NORM_FUNCTIONS = {"layer_norm", "rms_norm"}
# Functions whose output is the same sum of terms as their input.
_SAME_SUM = {
    "dropout", "to", "float", "type", "type_as", "contiguous", "clone", "detach", "half", "bfloat16", "identity",
}  # fmt: skip
# Largest number of terms of one layer. A longer sum spans several layers and would keep all their outputs in memory.
_MAX_TERMS = 8


@dataclass(frozen=True, eq=False)
class Term:
    """One term of a sum.

    Attributes:
        tensor: its value, stored when an addition adds the term; None before that.
        call: the ``call`` of its `Origin`.
        parts: the terms of the sum that this term stands for, if it is a layer's input or a norm's output.
    """

    tensor: Tensor | None
    call: int
    parts: tuple[Term, ...] = ()


class Stream:
    """Stores, for each tensor of the stream's shape, the terms that sum to it.

    Args:
        origins: origins of the tensors of the forward pass.
        is_stream: returns whether a tensor is (B, T, D) with the main side's tokens.
        calls: returns the numbers of the main side's self-attention calls so far.

    Attributes:
        layers: number of a layer's attention call -> L2 norms (B, T, 1) of attn_out, mlp_out and resid, where they
            were detected.
    """

    def __init__(self, origins: Origins, is_stream: Callable[[Tensor], bool], calls: Callable[[], list[int]]):
        self.origins, self.is_stream, self.calls = origins, is_stream, calls
        self.layers: dict[int, dict[str, Tensor]] = {}
        # Input of the last norm on a layer's output, number of that layer's call, and paths of the numbered modules
        # around the norm.
        self._final: tuple[Tensor, int, list[str]] | None = None
        self._terms = WeakTensorKeyDictionary()
        self._call_of_layer = WeakTensorKeyDictionary()  # output of a layer -> number of its attention call
        # Numbered modules that are running: path, term of the input, and last attention call before it.
        self._running: list[tuple[str, Term | None, int]] = []

    @property
    def final(self) -> Tensor | None:
        """The input of the final norm, (B, T, D): the last layer's output, if a norm follows it; else None."""
        calls = self.calls()
        return self._final[0] if self._final is not None and calls and self._final[1] == calls[-1] else None

    def terms_of(self, x: Tensor) -> tuple[Term, ...]:
        """Return the terms that sum to the tensor; a single term if no traced addition returned it."""
        origin = self.origins.of(x)
        return self._terms.get(x) or (Term(None, 0 if origin is None else origin.call),)

    def before(self, func: Any, args: Any) -> Any:
        """Return the terms and value that an in-place addition overwrites, to pass to `trace`."""
        if getattr(func, "__name__", "") not in ("add_", "__iadd__") or len(args) < 2:
            return None
        x = args[0]
        if not isinstance(x, Tensor) or not self.is_stream(x):
            return None
        terms = self.terms_of(x)
        return (terms, x.clone() if terms[0].tensor is None and not terms[0].parts else None)

    def trace(self, func: Any, args: Any, kwargs: Any, out: Any, before: Any = None) -> None:
        """Trace one torch function, which returned ``out``; ``before`` is the result of `before`."""
        if not isinstance(out, Tensor) or not args or not isinstance(args[0], Tensor):
            return
        name = getattr(func, "__name__", "")
        if name in ADDITIONS:
            self._add(args, kwargs, out, before)
        elif name in _SAME_SUM and args[0].shape == out.shape and args[0] is not out:
            for by_tensor in (self._terms, self._call_of_layer):
                if (entry := by_tensor.get(args[0])) is not None:
                    by_tensor[out] = entry
        elif name in _NORM_FUNCTIONS:
            self._norm(args[0], out)
        elif out is args[0] and name.endswith("_"):  # written in place
            self._terms.pop(out, None)
            self._call_of_layer.pop(out, None)

    def _add(self, args: Any, kwargs: Any, out: Tensor, before: Any) -> None:
        self._terms.pop(out, None)
        if len(args) < 2 or (kwargs and kwargs.get("alpha", 1) != 1) or not self.is_stream(out):
            return
        terms: list[Term] = []
        for i, x in enumerate(args[:2]):
            if not isinstance(x, Tensor) or x.shape != out.shape or not self.is_stream(x):
                return
            addends, value = before if before is not None and i == 0 else (self.terms_of(x), x)
            is_layer_input = addends[0] in [input_term for _, input_term, _ in self._running]
            is_new = len(addends) == 1 and addends[0].tensor is None and not is_layer_input
            terms += [Term(value, addends[0].call, addends[0].parts)] if is_new else addends
        if len(terms) <= _MAX_TERMS:
            self._terms[out] = tuple(terms)

    def _norm(self, x: Tensor, out: Tensor) -> None:
        if x is out or x.shape != out.shape or not self.is_stream(out):
            return
        if (call := self._call_of_layer.get(x)) is not None:
            self._final = (x, call, [path for path, _, _ in self._running])
        if (terms := self._terms.get(x)) is not None:
            self._terms[out] = (Term(None, min(term.call for term in terms), terms),)

    # Modules

    def enter(self, path: str, module_input: Tensor | None) -> None:
        """Make the input of a numbered module a single term, before the module runs."""
        if not _NUMBERED.fullmatch(path):
            return
        input_term = None
        if module_input is not None and self.is_stream(module_input):
            terms = self.terms_of(module_input)
            input_term = Term(None, 0, terms if _count(terms) <= _MAX_TERMS else ())
            self._terms[module_input] = (input_term,)
        self._running.append((path, input_term, max(self.calls(), default=0)))

    def leave(self, path: str, module: nn.Module, module_input: Tensor | None, output: Tensor | None) -> None:
        """After a module has run: pass the terms of a norm's input on to its output, and store a layer's L2 norms.

        A numbered module is a layer if it has one attention call and its output is its input plus other terms. The
        final norm may also follow blocks without an attention call, such as an MLP or a state-space model.
        """
        is_norm = _NORM.search(type(module).__name__) and not any(True for _ in module.children())
        if module_input is not None and output is not None and is_norm:
            self._norm(module_input, output)
        if not self._running or self._running[-1][0] != path:
            return
        _, input_term, last_before = self._running.pop()
        layer_calls = [call for call in self.calls() if call > last_before]
        if input_term is None or output is None or len(layer_calls) > 1 or not self.is_stream(output):
            return
        if not layer_calls and not is_norm and self._final is not None and path in self._final[2]:
            self._final = None  # that norm is inside this block, so it is not the final norm
        terms = [term for part in self.terms_of(output) for term in _expanded(part, input_term)]
        added = [term for term in terms if term is not input_term]
        if len(added) != len(terms) - 1:
            return
        if not layer_calls:
            if (of_layer := self._call_of_layer.get(module_input)) is not None:
                self._call_of_layer[output] = of_layer
            return
        call = layer_calls[0]
        sites = {"resid": output}
        for name, parts in (
            ("attn_out", [term for term in added if term.call == call]),
            ("mlp_out", [term for term in added if not term.call]),
        ):
            tensors = [term.tensor for term in parts if term.tensor is not None]
            if tensors and len(tensors) == len(parts):
                sites[name] = torch.stack([x.float() for x in tensors]).sum(0) if tensors[1:] else tensors[0]
        self.layers[call] = {
            name: torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True) for name, x in sites.items()
        }
        self._call_of_layer[output] = call
        if self._final is not None and self._final[1] == call:
            self._final = None  # that norm is inside the layer, so it is not the final norm


def _count(terms: tuple[Term, ...]) -> int:
    return sum(_count(term.parts) if term.parts else 1 for term in terms)


def _expanded(term: Term, input_term: Term) -> list[Term]:
    """Return the parts of a term if the layer's input is one of them, else the term."""
    if term is input_term or not term.parts:
        return [term]
    parts = [inner for part in term.parts for inner in _expanded(part, input_term)]
    return parts if any(part is input_term for part in parts) else [term]
