"""Origins: the model inputs that each tensor's token axis comes from, traced through every torch function.

`attach` uses origins to tell self-attention (queries and keys have the same origin) from cross-attention, and the
decoder's tokens from the encoder's. The output of attention has the origin of its queries, since it has a row for
each query: a decoder's hidden states keep the origin decoder_input_ids after cross-attention.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        return Origin(
            inputs, min(calls) if name in ADDITIONS else max(origin.call for _, origin in with_inputs)
        )


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
