"""Which input the positions of a tensor belong to, traced through the functions of a forward.

A tensor's origin is the set of the forward's inputs that its positions belong to. The hidden states of a decoder keep
the positions of its own ids after cross-attention, since attention has one row for each query.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from mmqk.monitors.third_party.inputs import Inputs, tensors

# Inputs of these names describe the tokens of others.
_DESCRIBES = ("mask", "position", "type")
# The rows of what these give are those of the first argument that has an origin.
_ROWS_OF_FIRST = {
    "matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "linear", "embedding", "conv1d", "conv2d",
    "conv3d", "__getitem__", "index_select", "gather", "masked_fill", "masked_fill_", "masked_scatter",
    "masked_scatter_", "index_put", "index_put_", "__setitem__", "index_add", "index_add_", "index_copy_",
    "scatter", "scatter_", "scatter_add_", "copy_",
}  # fmt: skip
# Additions, also in place.
ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


class Origin(NamedTuple):
    """Where a tensor comes from.

    Attributes:
        inputs: names of the inputs that its positions stand for; none for parameters and constants.
        call: number of the last attention call that it depends on, other than through a residual stream; 0 is none.
    """

    inputs: frozenset[str]
    call: int = 0

    def __str__(self) -> str:
        return " and ".join(sorted(self.inputs)) or "parameters"


NOWHERE = Origin(frozenset())


class Origins:
    """The origins of the tensors of one forward.

    Args:
        inputs: of the forward, by name.
        constants: modules whose buffers come from nowhere.
        bools: follow comparisons too; otherwise a mask comes from nowhere.
    """

    def __init__(self, inputs: Inputs, constants: nn.Module | None = None, bools: bool = False):
        self.bools = bools
        self._of = WeakTensorKeyDictionary()
        for buffer in constants.buffers() if constants is not None else ():
            self._of[buffer] = NOWHERE
        for name, x in tensors(inputs):
            described = x.dtype == torch.bool and not bools
            if not described and not any(part in name for part in _DESCRIBES):
                self._of[x] = Origin(self._of.get(x, NOWHERE).inputs | {name})
            else:
                self._of.setdefault(x, NOWHERE)

    def of(self, value: Any) -> Origin | None:
        """The origin of a tensor; None if it was not made by a torch function."""
        if isinstance(value, nn.Parameter):
            return NOWHERE
        return self._of.get(value) if isinstance(value, Tensor) else None

    def put(self, value: Any, origin: Origin | None) -> None:
        """Every tensor of ``value`` comes from there; None leaves it open."""
        if origin is None:
            return
        for x in flat(value):
            self._of[x] = origin

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A function of torch gave ``out``."""
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            out = args[0]
        made = list(flat(out))
        if not made:
            return
        given = list(flat(args))
        if kwargs:
            given += flat(tuple(kwargs.values()))
        if name == "where" and len(given) == 3:
            given = given[1:]
        if made[0].dtype == torch.bool and not self.bools:
            origin: Origin | None = NOWHERE
        else:
            origin = self._joined(name, given, made[0])
        if origin is None:
            return
        for x in made:
            if not isinstance(x, nn.Parameter):
                self._of[x] = origin
        written = made[0]._base if name.endswith("_") or name == "__setitem__" else None
        if written is not None and not (self._of.get(written) or NOWHERE).inputs:
            self._of[written] = origin

    def _joined(self, name: str, given: list[Tensor], out: Tensor) -> Origin | None:
        all_found = [(x, self.of(x)) for x in given]
        found = [(x, origin) for x, origin in all_found if origin is not None and origin.inputs]
        if not found:
            unknown = any(origin is None for _, origin in all_found)
            return None if unknown else NOWHERE
        if name in _ROWS_OF_FIRST:
            inputs = found[0][1].inputs
            return Origin(inputs, max(origin.call for _, origin in found))
        # A tensor that is only broadcast along the positions does not determine their origin.
        full = [origin for x, origin in found if x.shape == out.shape] or [origin for _, origin in found]
        inputs = frozenset().union(*(origin.inputs for origin in full))
        calls = [origin.call for origin in full]
        # The residual stream goes on beside what is added to it.
        return Origin(inputs, min(calls) if name in ADDITIONS else max(origin.call for _, origin in found))


def flat(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from flat(part)


class Tracing(TorchFunctionMode):
    """Follows every function within."""

    def __init__(self, origins: Origins):
        super().__init__()
        self.origins = origins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.origins.see(func, args, kwargs, out)
        return out
