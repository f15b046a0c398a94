"""The layers of a third-party model: which were measured, their weight matrices and the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from mmqk.monitors.adapters import block_of, clean, layer_of
from mmqk.monitors.collect import Statistics
from mmqk.monitors.foreign.trace import ADDITIONS, SAME_VALUES, Origins
from mmqk.store import UserError


@dataclass(frozen=True)
class Layers:
    """The layers with attention.

    Attributes:
        numbers: layer numbers of the measured calls, in call order.
        hidden: names of layers whose attention was not measured, such as "layers.3". If only a part of a layer's
            attention was measured, the full path of the module that was not measured.
        seen: number of layers whose attention was measured in every call.
        by_hand: whether a hidden layer calls no attention function.
    """

    numbers: list[int]
    hidden: list[str]
    seen: int
    by_hand: bool = False

    @property
    def total(self) -> int:
        """Number of layers with attention, measured or not. A module with several calls counts once."""
        return self.seen + len(self.hidden)


def add_matrices(statistics: Statistics, root: nn.Module, calls: Sequence[tuple[int, str]]) -> None:
    """Add norm, spectral norm and stable rank of every matrix of every layer.

    A tag is, for example, ``self_attn_q_proj_norm/layer03``.

    A matrix is a parameter with two axes that is not an embedding. Its name in the tag is its path in the layer.
    The path of a layer is that of its call up to its first integer if these paths all differ, else up to its last
    integer.

    Args:
        statistics: gets the values.
        root: the model.
        calls: layer number and path of the module of each attention call.

    Raises:
        UserError: a layer has no matrix, or its matrices are sharded over ranks.
    """
    named: list[tuple[str, list[str], int, Tensor]] = []
    layers = [layer_of(path) for _, path in calls]
    prefixes = [f"{layer[0]}.{layer[1]}".lstrip(".") for layer in layers if layer is not None]
    if len(set(prefixes)) < len(calls):
        prefixes = [block_of(path) for _, path in calls]
    for (layer, _), prefix in zip(calls, prefixes, strict=True):
        matrices = list(_matrices(root.get_submodule(prefix)))
        if not matrices or any(isinstance(weight, DTensor) for _, weight in matrices):
            raise UserError(
                f"matrices: {prefix or 'the model'} holds no whole weight matrix, as with FSDP: call attach "
                "without matrices"
            )
        named += [(name, [], layer, weight) for name, weight in matrices]
    statistics.add_matrices(named)


def _matrices(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in layer.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim == 2 and weight.is_floating_point() and not isinstance(module, nn.Embedding):
                full = clean(f"{path}.{name}".strip(".")).replace(".", "_")
                yield full.removesuffix("_weight"), weight


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

    def before(self, name: str, args: Any) -> Any:
        """Return the terms and value that an in-place addition overwrites, to pass to `trace`."""
        if name not in ("add_", "__iadd__") or len(args) < 2:
            return None
        x = args[0]
        if not isinstance(x, Tensor) or not self.is_stream(x):
            return None
        terms = self.terms_of(x)
        return (terms, x.clone() if terms[0].tensor is None and not terms[0].parts else None)

    def trace(self, name: str, args: Any, kwargs: Any, out: Any, before: Any) -> None:
        """Trace the torch function of this name, which returned ``out``; ``before`` is the result of `before`."""
        if not isinstance(out, Tensor) or not args or not isinstance(args[0], Tensor):
            return
        if name in ADDITIONS:
            self._add(args, kwargs, out, before)
        elif name in SAME_VALUES and args[0].shape == out.shape and args[0] is not out:
            for by_tensor in (self._terms, self._call_of_layer):
                if (entry := by_tensor.get(args[0])) is not None:
                    by_tensor[out] = entry
        elif name in ("layer_norm", "rms_norm"):
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
        if not path.rpartition(".")[2].isdecimal():
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
        is_norm = "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
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
