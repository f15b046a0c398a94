"""Follows in which order tensors with three axes merge sequences and heads: (B * H, T, K) or (H * B, T, K).

Shapes: B batch, H heads, T tokens, K head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mmqk.monitors.foreign.calls import NotMeasured
from mmqk.monitors.foreign.origins import flat

# Which of the two is outermost; "unclear" if B equals H, so that shapes do not tell.
Order = Literal["sequences", "heads", "unclear"]
_MERGES = {"reshape", "view", "flatten", "_unsafe_view", "contiguous"}
# Functions that move axes or select a part, so that the shape changes and the order does not.
_MOVES = {"transpose", "permute", "movedim", "swapaxes", "swapdims", "__get__", "chunk", "split", "unbind", "narrow"}
_PARTS = {"cat", "__getitem__", "bmm", "matmul", "__matmul__"}
# Functions that may put the rows in another order.
_REORDERS = {"__getitem__", "index_select", "gather", "take_along_dim", "flip", "roll"}


class Layout:
    """The orders of the tensors of one forward pass with ``rows`` sequences."""

    def __init__(self, rows: int):
        self.rows = rows
        self._orders = WeakTensorKeyDictionary()

    def order_of(self, *tensors: Tensor) -> Order | None:
        """Return the order of the first tensor whose order is known."""
        return next((self._orders[x] for x in tensors if x in self._orders), None)

    def trace(self, name: str, args: Sequence[Any], out: Any) -> None:
        """Trace one torch function, which returned ``out``."""
        tensors, outputs = list(flat(args)), list(flat(out))
        if not tensors or not outputs or outputs[0].ndim != 3:
            return
        order = self._of(name, tensors, outputs[0])
        if order is not None:
            for x in outputs:
                self._orders[x] = order

    def _of(self, name: str, tensors: list[Tensor], out: Tensor) -> Order | None:
        x, rows = tensors[0], self.rows
        if name in _MERGES and x.ndim == 4 and out.shape[0] == x.shape[0] * x.shape[1]:
            is_first, is_second = x.shape[0] == rows, x.shape[1] == rows
            if is_first and is_second:
                return "unclear"
            return "sequences" if is_first else "heads" if is_second else None
        if name in _MERGES and x.ndim == 3 and len(x) == len(out) and x.shape[1] == rows and out.shape[1] > rows:
            return "sequences"  # (T, B, D) to (T, B * H, K)
        if name in ("cat", "concat", "concatenate") and len(out) > rows and all(len(x) == rows for x in tensors):
            return "heads"  # chunks of one head each, of all sequences
        traced = next((y for y in tensors if y in self._orders), None)
        if traced is None or (name in _REORDERS and (tensors[1:] or name in ("flip", "roll"))):
            return None
        is_kept = traced.shape == out.shape or name in _MOVES or (name in _PARTS and len(out) == len(traced))
        return self._orders[traced] if is_kept else None

    def split(self, x: Tensor, order: Order | None) -> Tensor:
        """Return a tensor (N, T, K) with the axes (B, H, T, K).

        Raises:
            NotMeasured: N has sequences and heads in an unknown order.
        """
        if self.rows and len(x) == self.rows:
            return x[:, None]
        if self.rows == 1:
            return x[None]
        if not self.rows or len(x) % self.rows or order is None:
            raise NotMeasured(f"its shape {tuple(x.shape)} has sequences and heads in an unknown order")
        if order == "unclear":
            raise NotMeasured(
                f"its shape {tuple(x.shape)} has as many sequences as heads, so their order is unclear: call attach "
                "with another number of sequences"
            )
        if order == "sequences":
            return x.unflatten(0, (self.rows, -1))
        return x.unflatten(0, (-1, self.rows)).transpose(0, 1)
