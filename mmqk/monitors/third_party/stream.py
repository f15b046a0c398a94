"""The residual stream of a model, found by structure: what a layer adds to its input.

The output of a numbered module (``layers.3``) is the stream after a layer when it is a sum of the module's input and
other terms, also where norms follow the additions (post-norm). The term that depends on the attention call is the
attention's output; the others together are the MLP's.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mmqk.monitors.third_party.origins import ADDITIONS, Origins

_NUMBERED = re.compile(r"(^|.*\.)\d+")
_NORM = re.compile("norm", re.IGNORECASE)
_NORM_FUNCTIONS = {"layer_norm", "rms_norm"}
_SAME = {
    "dropout",
    "to",
    "float",
    "type",
    "type_as",
    "contiguous",
    "clone",
    "detach",
    "half",
    "bfloat16",
    "identity",
}
# Terms of a layer: more are several layers, and would keep the outputs of all of them.
_MOST_TERMS = 8


@dataclass(frozen=True, eq=False)
class Term:
    """One term of a sum.

    Attributes:
        tensor: None where nothing was added yet.
        call: of its `Origin`.
        parts: terms that this one was a sum of before a norm, or before a layer began.
    """

    tensor: Tensor | None
    call: int
    parts: tuple[Term, ...] = ()


class Stream:
    """Follows additions.

    Args:
        origins: of the tensors.
        is_stream: whether a tensor is (B, T, D) of the tokens that are watched.
        calls: numbers of the self-attention calls among these tokens so far.

    Attributes:
        layers: number of a layer's attention call to the lengths (B, T, 1) of attn_out, mlp_out and resid, of those
            that were found.
    """

    def __init__(
        self,
        origins: Origins,
        is_stream: Callable[[Tensor], bool],
        calls: Callable[[], list[int]],
    ):
        self.origins, self.is_stream, self.calls = origins, is_stream, calls
        self.layers: dict[int, dict[str, Tensor]] = {}
        self._final: tuple[Tensor, int] | None = None
        self._terms = WeakTensorKeyDictionary()
        self._after = WeakTensorKeyDictionary()  # a layer's output to its call
        self._open: list[tuple[str, Term | None, int]] = []

    @property
    def final(self) -> Tensor | None:
        """What the final norm takes, (B, T, D): the output of the last layer, where a norm takes it."""
        calls = self.calls()
        return self._final[0] if self._final is not None and calls and self._final[1] == calls[-1] else None

    def of(self, x: Tensor) -> tuple[Term, ...]:
        """The terms that a tensor is a sum of; itself where it is none."""
        origin = self.origins.of(x)
        return self._terms.get(x) or (Term(None, 0 if origin is None else origin.call),)

    def before(self, func: Any, args: Any) -> Any:
        """What an addition in place overwrites, kept: to be handed to `see`."""
        if getattr(func, "__name__", "") not in ("add_", "__iadd__") or len(args) < 2:
            return None
        x = args[0]
        if not isinstance(x, Tensor) or not self.is_stream(x):
            return None
        terms = self.of(x)
        return (terms, x.clone() if terms[0].tensor is None and not terms[0].parts else None)

    def see(self, func: Any, args: Any, kwargs: Any, out: Any, before: Any = None) -> None:
        """A function of torch gave ``out``."""
        if not isinstance(out, Tensor) or not args or not isinstance(args[0], Tensor):
            return
        name = getattr(func, "__name__", "")
        if name in ADDITIONS:
            self._add(args, kwargs, out, before)
        elif name in _SAME and args[0].shape == out.shape and args[0] is not out:
            self._same(args[0], out)
        elif name in _NORM_FUNCTIONS:
            self._norm(args[0], out)
        elif out is args[0] and name.endswith("_"):  # written in place
            self._terms.pop(out, None)
            self._after.pop(out, None)

    def _same(self, x: Tensor, out: Tensor) -> None:
        for known in (self._terms, self._after):
            if (found := known.get(x)) is not None:
                known[out] = found

    def _add(self, args: Any, kwargs: Any, out: Tensor, before: Any) -> None:
        self._terms.pop(out, None)
        if len(args) < 2 or (kwargs and kwargs.get("alpha", 1) != 1) or not self.is_stream(out):
            return
        terms: list[Term] = []
        for place, x in enumerate(args[:2]):
            if not isinstance(x, Tensor) or x.shape != out.shape or not self.is_stream(x):
                return
            own, value = before if before is not None and not place else (self.of(x), x)
            taken = own[0] in [frame[1] for frame in self._open]
            terms += [Term(value, own[0].call, own[0].parts)] if _alone(own) and not taken else own
        if len(terms) <= _MOST_TERMS:
            self._terms[out] = tuple(terms)

    def _norm(self, x: Tensor, out: Tensor) -> None:
        if x is out or x.shape != out.shape or not self.is_stream(out):
            return
        if (after := self._after.get(x)) is not None:
            self._final = (x, after)
        if (terms := self._terms.get(x)) is not None:
            self._terms[out] = (Term(None, min(term.call for term in terms), terms),)

    # Modules

    def enter(self, path: str, given: Tensor | None) -> None:
        """A module begins."""
        if not _NUMBERED.fullmatch(path):
            return
        taken = None
        if given is not None and self.is_stream(given):
            terms = self.of(given)
            taken = Term(None, 0, terms if _count(terms) <= _MOST_TERMS else ())
            self._terms[given] = (taken,)
        self._open.append((path, taken, max(self.calls(), default=0)))

    def leave(self, path: str, module: nn.Module, given: Tensor | None, output: Tensor | None) -> None:
        """And ends."""
        is_norm = _NORM.search(type(module).__name__) and not any(True for _ in module.children())
        if given is not None and output is not None and is_norm:
            self._norm(given, output)
        if not self._open or self._open[-1][0] != path:
            return
        _, taken, first = self._open.pop()
        own = [call for call in self.calls() if call > first]
        if taken is None or output is None or len(own) != 1 or not self.is_stream(output):
            return
        terms = [term for part in self.of(output) for term in _to(part, taken)]
        added = [term for term in terms if term is not taken]
        if len(added) != len(terms) - 1:
            return
        sites = {"resid": output}
        for name, parts in (
            ("attn_out", [term for term in added if term.call == own[0]]),
            ("mlp_out", [term for term in added if not term.call]),
        ):
            tensors = [term.tensor for term in parts if term.tensor is not None]
            if tensors and len(tensors) == len(parts):
                sites[name] = torch.stack([x.float() for x in tensors]).sum(0) if tensors[1:] else tensors[0]
        lengths = {
            name: torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True) for name, x in sites.items()
        }
        self.layers[own[0]] = lengths
        self._after[output] = own[0]
        if self._final is not None and self._final[1] == own[0]:
            self._final = None  # a norm within the layer


def _alone(terms: tuple[Term, ...]) -> bool:
    """Whether a tensor is a single term whose value was not kept."""
    return len(terms) == 1 and terms[0].tensor is None


def _count(terms: tuple[Term, ...]) -> int:
    return sum(_count(term.parts) if term.parts else 1 for term in terms)


def _to(term: Term, taken: Term) -> list[Term]:
    """The term in parts, if what the layer takes is among them."""
    if term is taken or not term.parts:
        return [term]
    parts = [found for part in term.parts for found in _to(part, taken)]
    return parts if any(part is taken for part in parts) else [term]
