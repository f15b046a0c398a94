"""Traces the torch functions of a forward pass: the origins of tensors, and attention that a model computes by hand.

An origin is the set of model inputs that a tensor's token axis comes from. `attach` uses origins to tell self-
attention (queries and keys have the same origin) from cross-attention, and the decoder's tokens from the encoder's.
The output of attention has the origin of its queries, since it has a row for each query: a decoder's hidden states
keep the origin decoder_input_ids after cross-attention.

`ByHand` follows each product of two activations through scalings, masks, biases and a soft cap to a softmax, and the
weights to their product with the values. Anything else in between ends the trace: the call is then not measured.
`Layout` follows in which order tensors with three axes merge sequences and heads: (B * H, T, K) or (H * B, T, K).

Shapes: B batch, H heads, T query tokens, S key tokens, K head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from mmqk.monitors.adapters import tensors_in
from mmqk.monitors.foreign.calls import MASKED, Call, NotMeasured, set_mask
from mmqk.monitors.foreign.inputs import Inputs, named_tensors

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
# Functions whose output has the values of their first argument, in another dtype or memory.
SAME_VALUES = {
    "to", "float", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "detach", "dropout", "identity",
}  # fmt: skip


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


class Origins(TorchFunctionMode):
    """The origins of the tensors of one forward pass. As a context, it traces every torch function inside.

    Args:
        inputs: the arguments of the model. Its buffers are constants, with the origin `NO_INPUTS`.
        bools: whether to trace bool tensors; otherwise the origin of masks and comparisons is `NO_INPUTS`.
    """

    def __init__(self, inputs: Inputs, bools: bool = False):
        super().__init__()
        self.bools = bools
        self._of = WeakTensorKeyDictionary()
        for buffer in inputs.root.buffers():
            self._of[buffer] = NO_INPUTS
        for name, x in named_tensors(inputs.named):
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
        for x in tensors_in(value) if origin is not None else ():
            self._of[x] = origin

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.trace(getattr(func, "__name__", ""), args, kwargs, out)
        return out

    def trace(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Set the origin of ``out``, which the torch function of this name returned."""
        if name == "__setitem__":
            out = args[0]
        outputs = list(tensors_in(out))
        if not outputs:
            return
        arguments = [*tensors_in(args), *tensors_in(kwargs)]
        if name == "where" and len(arguments) == 3:
            arguments = arguments[1:]
        is_mask = outputs[0].dtype == torch.bool and not self.bools
        origin = NO_INPUTS if is_mask else self._combined(name, arguments, outputs[0])
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
            return None if any(origin is None for _, origin in origins) else NO_INPUTS
        latest = max(origin.call for _, origin in with_inputs)
        if name in _ROWS_OF_FIRST:
            return Origin(with_inputs[0][1].inputs, latest)
        # A tensor that is broadcast to the output's shape does not determine the origin of the positions.
        full = [origin for x, origin in with_inputs if x.shape == out.shape] or [origin for _, origin in with_inputs]
        inputs = frozenset().union(*(origin.inputs for origin in full))
        # x + attention(x) is still the residual stream, so an addition keeps the earlier call.
        return Origin(inputs, min(origin.call for origin in full) if name in ADDITIONS else latest)


_MERGES = {"reshape", "view", "flatten", "_unsafe_view", "contiguous"}
# Functions that move axes or select a part, so that the shape changes and the order does not.
_MOVES = {"transpose", "permute", "movedim", "swapaxes", "swapdims", "__get__", "chunk", "split", "unbind", "narrow"}
_PARTS = {"cat", "__getitem__", "bmm", "matmul", "__matmul__"}
# Functions that may put the rows in another order.
_REORDERS = {"__getitem__", "index_select", "gather", "take_along_dim", "flip", "roll"}


class Layout:
    """Whether sequences are outermost in the tensors with three axes of one forward pass; heads are otherwise.

    An order is not known if there are as many sequences as heads and shapes do not tell them apart.

    Args:
        rows: number of sequences.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self._orders = WeakTensorKeyDictionary()

    def order_of(self, *tensors: Tensor) -> bool | None:
        """Return whether sequences are outermost in the first tensor whose order is known; None if none is."""
        return next((self._orders[x] for x in tensors if x in self._orders), None)

    def trace(self, name: str, args: Sequence[Any], out: Any) -> None:
        """Trace one torch function, which returned ``out``."""
        tensors, outputs = list(tensors_in(args)), list(tensors_in(out))
        if not tensors or not outputs or outputs[0].ndim != 3:
            return
        order = self._of(name, tensors, outputs[0])
        if order is not None:
            for x in outputs:
                self._orders[x] = order

    def _of(self, name: str, tensors: list[Tensor], out: Tensor) -> bool | None:
        x, rows = tensors[0], self.rows
        if name in _MERGES and x.ndim == 4 and out.shape[0] == x.shape[0] * x.shape[1]:
            return None if (x.shape[0] == rows) == (x.shape[1] == rows) else x.shape[0] == rows
        if name in _MERGES and x.ndim == 3 and len(x) == len(out) and x.shape[1] == rows and out.shape[1] > rows:
            return True  # (T, B, D) to (T, B * H, K)
        if name in ("cat", "concat", "concatenate") and len(out) > rows and all(len(x) == rows for x in tensors):
            return False  # chunks of one head each, of all sequences
        traced = next((y for y in tensors if y in self._orders), None)
        if traced is None or (name in _REORDERS and (tensors[1:] or name in ("flip", "roll"))):
            return None
        is_kept = traced.shape == out.shape or name in _MOVES or (name in _PARTS and len(out) == len(traced))
        return self._orders[traced] if is_kept else None

    def split(self, x: Tensor, order: bool | None) -> Tensor:
        """Return a tensor (N, T, K) with the axes (B, H, T, K).

        Raises:
            NotMeasured: N has sequences and heads in an unknown order.
        """
        if self.rows and len(x) == self.rows:
            return x[:, None]
        if self.rows == 1:
            return x[None]
        if not self.rows or len(x) % self.rows or order is None:
            unknown = f"its shape {tuple(x.shape)} has sequences and heads in an unknown order"
            raise NotMeasured(f"{unknown}: call attach with sequences=1")
        if order:
            return x.unflatten(0, (self.rows, -1))
        return x.unflatten(0, (-1, self.rows)).transpose(0, 1)


# Names of torch functions that compute a softmax or a matrix product.
SOFTMAX = {"softmax", "special_softmax", "_softmax", "log_softmax", "special_log_softmax"}
PRODUCT = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
_OPERANDS = ("input", "batch1", "batch2", "other", "mat2")  # their arguments by name, the first operand first
_MULTIPLY = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
_DIVIDE = {"div", "div_", "__truediv__", "__itruediv__", "__div__", "true_divide", "divide"}
# Functions whose output has the same meaning, in another shape or dtype.
_SAME = SAME_VALUES | {
    "view", "reshape", "unflatten", "flatten", "squeeze", "unsqueeze", "nan_to_num", "masked_fill", "masked_fill_",
    "where",
}  # fmt: skip
# Functions that add a mask or a bias; `ByHand._call` computes what they added.
_ADD = ADDITIONS | {
    "sub", "sub_", "__sub__", "__isub__", "subtract", "max", "maximum", "clamp", "clamp_", "clamp_min",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Scores:
    """A product of queries (..., T, K) and keys (..., S, K), and what was done to it since.

    Attributes:
        path: path of the module that computed the product.
        module: this module.
        operands: the arguments of the product, of which q and k are views without an origin.
        scale: product of the scalars that it was multiplied by, before a soft cap.
        softcap: product of the scalars that it was multiplied by after a tanh; None without a tanh.
    """

    path: str
    module: nn.Module
    operands: tuple[Tensor, Tensor]
    q: Tensor
    k: Tensor
    scale: float = 1.0
    softcap: float | None = None


class ByHand:
    """The products and attention weights of one forward pass.

    Args:
        layout: the order of sequences and heads in tensors with three axes.
        origins: origins of the tensors; a product with a tensor that depends on no input is no product of tokens.

    Attributes:
        pending: the softmaxes of products that were not multiplied by values yet.
    """

    def __init__(self, layout: Layout, origins: Origins):
        self.layout, self.origins = layout, origins
        self.pending: list[Scores] = []
        self._scores = WeakTensorKeyDictionary()  # tensor -> Scores
        self._weights = WeakTensorKeyDictionary()  # attention weights -> (Scores, input of the softmax)

    def has(self, x: Tensor) -> bool:
        """Return whether a tensor is a traced product."""
        return x in self._scores

    def trace(
        self, name: str, args: Sequence[Any], kwargs: Any, out: Any, path: str, module: nn.Module
    ) -> tuple[Scores, Call | NotMeasured] | None:
        """Trace one torch function; if it multiplied attention weights by values, return the attention call."""
        if not isinstance(out, Tensor):
            return None
        if name in PRODUCT:
            return self._product(name, args, kwargs, out, path, module)
        if name in SOFTMAX:
            self._softmax(name, args, kwargs, out)
            return None
        traced = next((x for x in tensors_in(args) if x in self._scores or x in self._weights), None)
        if traced is None:
            return None
        scores = self._scores.get(traced)
        if name in _SAME and traced in self._weights:
            self._weights[out] = self._weights[traced]
        elif scores is not None:
            is_sum = len({id(self._scores[x].operands) for x in tensors_in(args) if x in self._scores}) > 1
            changed = None if is_sum else _changed(name, scores, args, kwargs)  # a second product is no mask or bias
            if changed is not None:
                self._scores[out] = changed
            elif out is traced:
                del self._scores[out]
        return None

    def _softmax(self, name: str, args: Sequence[Any], kwargs: Any, out: Tensor) -> None:
        z = args[0] if args else kwargs.get("input")
        scores = self._scores.get(z) if isinstance(z, Tensor) else None
        if scores is None:
            return
        self.pending.append(scores)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if "log" not in name and dim in (-1, out.ndim - 1):
            self._weights[out] = (scores, z.detach().clone() if out is z else z)

    def _product(
        self, name: str, args: Sequence[Any], kwargs: Any, out: Tensor, path: str, module: nn.Module
    ) -> tuple[Scores, Call | NotMeasured] | None:
        given = [x for x in tensors_in([*args, *map(kwargs.get, _OPERANDS)]) if x.ndim >= 3]
        if len(given) < 2 or any(x in self._scores for x in given[:-2]):
            return None
        left, right = operands = given[-2:]
        equation = args[0].replace(" ", "") if name == "einsum" and isinstance(args[0], str) else None
        if right in self._weights and equation is not None:
            operands_of, arrow, result = equation.partition("->")
            equation = ",".join(reversed(operands_of.split(","))) + arrow + result
            left, right = right, left
        if left in self._weights:
            scores, z = self._weights[left]
            self.pending = [x for x in self.pending if x is not scores]
            try:
                return scores, self._call(scores, z, _factors(left, right, equation, is_scores=False)[1])
            except NotMeasured as reason:
                return scores, reason
        if any(origin is not None and not origin.inputs for origin in map(self.origins.of, operands)):
            return None
        try:
            q, k = _factors(left, right, equation, is_scores=True)
        except NotMeasured:
            return None
        if q.shape[-1] > 1:
            scale = float(kwargs.get("alpha", 1)) if name == "baddbmm" else 1.0
            self._scores[out] = Scores(path, module, (left, right), q, k.transpose(-1, -2), scale)
        return None

    def _call(self, scores: Scores, z: Tensor, values: Tensor) -> Call:
        """Return the call with these scores. What was added between product and softmax is its additive mask."""
        q, k, v, z_BHTS = (self._four_axes(x, z, scores) for x in (scores.q, scores.k, values, z))
        if q.shape[1] % k.shape[1]:
            raise NotMeasured(f"it has {q.shape[1]} heads of queries and {k.shape[1]} of keys")
        call = Call(q, k, v, scores.scale)
        if scores.softcap is not None:
            call.scale, call.softcap = scores.scale * scores.softcap, scores.softcap
        added_BHTS = torch.stack([z_BHTS[:, head].float() - call.softmax_input(head) for head in range(q.shape[1])], 1)
        is_masked = z_BHTS <= MASKED
        added_BHTS.masked_fill_(is_masked & (added_BHTS > MASKED), -torch.inf)
        # Differences as large as rounding are no bias.
        largest = torch.where(is_masked, 0.0, z_BHTS.float().abs()).amax()
        if torch.where(is_masked, 0.0, added_BHTS.abs()).amax() <= 8 * torch.finfo(z.dtype).eps * (1 + largest):
            added_BHTS = torch.where(is_masked, added_BHTS, 0.0)
            if (is_masked == is_masked[:, :1]).all():
                added_BHTS = added_BHTS[:, :1]
        set_mask(call, added_BHTS)
        return call

    def _four_axes(self, x: Tensor, z: Tensor, scores: Scores) -> Tensor:
        """Return queries, keys, values or scores with the axes (B, H, tokens, K)."""
        if x.ndim > 4:
            return x.flatten(1, -3)
        if x.ndim == 4:
            return x
        if z.ndim == 4 and len(x) == z.shape[0] * z.shape[1]:
            return x.unflatten(0, z.shape[:2])
        return self.layout.split(x, self.layout.order_of(*scores.operands))


def _changed(name: str, scores: Scores, args: Sequence[Any], kwargs: Any) -> Scores | None:
    """Return the scores after a torch function; None if they are not followed through this function."""
    if name in _SAME or name in _ADD:
        return scores
    if name in ("tanh", "tanh_") and scores.softcap is None:
        return replace(scores, softcap=1.0)
    factors = [*args, *kwargs.values()]
    factor = next((x for x in reversed(factors) if not isinstance(x, Tensor) or x.numel() == 1), None)
    if name not in _MULTIPLY | _DIVIDE or not isinstance(factor, float | int | Tensor) or len(args) < 2:
        return None
    number = float(factor) if name in _MULTIPLY else 1 / float(factor)
    if scores.softcap is not None:
        return replace(scores, softcap=scores.softcap * number)
    return replace(scores, scale=scores.scale * number)


def _factors(left: Tensor, right: Tensor, equation: str | None, is_scores: bool) -> tuple[Tensor, Tensor]:
    """Return the factors (..., T, K) and (..., K, S) of a product, which may be an einsum.

    Raises:
        NotMeasured: the einsum is another product.
    """
    if equation is None:
        return left, right
    operands, _, out = equation.partition("->")
    a, _, b = operands.partition(",")
    shared = [x for x in (out if is_scores else a) if x in a and x in b and x in out]
    rows = [x for x in a if x not in b]
    inner = [x for x in a if x in b and x not in out]
    columns = [x for x in b if x not in a]
    is_product = len(rows) == len(inner) == len(columns) == 1 and "." not in equation and len(a) == len(b)
    if not is_product or (is_scores and out != "".join([*shared, *rows, *columns])):
        raise NotMeasured(f"its product is the einsum {equation}")
    return (
        left.permute([a.index(x) for x in [*shared, *rows, *inner]]),
        right.permute([b.index(x) for x in [*shared, *inner, *columns]]),
    )
