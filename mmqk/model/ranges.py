"""Checks fields of a configuration: a number declares its range, a choice is a `Literal`, and `refuse` lists the
combinations of fields that exclude each other; `check_backend` lists what each attention backend cannot compute.

    @dataclass(frozen=True)
    class OptimConfig:
        lr: float = number(1e-3, SMALLEST, LARGEST)
        schedule: Literal["constant", "cosine"] = "cosine"

        def __post_init__(self) -> None:
            check_fields(self, "optim")
            refuse({"optim.schedule exponential cannot end at 0: ...": self.schedule == "exponential" and ...})

A range is metadata of its field and is not part of a run's identity. This module needs only the standard library, so
that the model can be used without the packages of the laboratory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

# About the smallest and largest normal numbers of fp32, for a field without a narrower range.
SMALLEST, LARGEST = 1e-37, 1e38
BELOW_ONE = 1 - 1e-7
MOST_STEPS = 10**9
MOST_SEED = 2**32 - 1
# Below this, the rounding of fp32 weights would remove most of a perturbation.
SMALLEST_PERTURBATION = 1e-7
_KEY = "range"

# math is dense attention and flex is FlexAttention. The others are torch's scaled_dot_product_attention; sdpa uses
# the kernel that `kernel_name` returns.
BACKENDS = ("math", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex")
BLOCK = 128  # tokens


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, both included; only whole numbers if both are ``int``. With ``zero`` also
    0, which turns most fields off."""

    low: float
    high: float
    zero: bool = False

    def __contains__(self, value: Any) -> bool:
        kind = Integral if isinstance(self.low, int) and isinstance(self.high, int) else Real
        if not isinstance(value, kind) or isinstance(value, bool):
            return False
        return self.low <= value <= self.high or (self.zero and value == 0)  # type: ignore[operator]

    def __str__(self) -> str:
        whole = "whole " if isinstance(self.low, int) and isinstance(self.high, int) else ""
        low, high = (str(end) if isinstance(end, int) else f"{end:.12g}" for end in (self.low, self.high))
        return f"a {whole}number from {low} to {high}{', or 0' if self.zero else ''}"


def default_of(f: Field[Any]) -> Any:
    """Return the default of a field of a dataclass."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def to_defaults(config: Any, *names: str) -> None:
    """Set fields of a frozen dataclass that have no effect to their defaults, so that they are not part of a run's
    identity."""
    for f in fields(config):
        if f.name in names:
            object.__setattr__(config, f.name, default_of(f))


def number(default: Any, low: float, high: float, *, zero: bool = False) -> Any:
    """Return a field with a range, which applies to every element of a mapping or list. ``default`` may be a
    factory."""
    kind = "default_factory" if callable(default) else "default"
    return field(**{kind: default}, metadata={_KEY: Range(low, high, zero)})


def range_of(declared: Field[Any]) -> Range | None:
    """Return the range that a field declares."""
    return declared.metadata.get(_KEY)


def check_fields(config: Any, path: str) -> None:
    """Check every field of a dataclass that declares a range or a `Literal`.

    The range does not apply to a default that is null, NaN or text, because such a default is not a number.

    Args:
        config: the dataclass.
        path: dotted name of the dataclass, for the message; empty for none.

    Raises:
        ValueError: a number is outside its range, or a value is not a choice of its field.
    """
    prefix = f"{path}." if path else ""
    for declared in fields(config):
        name, value = f"{prefix}{declared.name}", getattr(config, declared.name)
        choices, only = _choices(config.__class__, declared.name)
        if choices and value not in choices and (only or isinstance(value, str)):
            raise ValueError(f"{name} must be one of {', '.join(choices)}, but is {value!r}.")
        wanted = range_of(declared)
        is_nan = isinstance(declared.default, float) and math.isnan(declared.default) and value is declared.default
        if wanted is None or value is None or is_nan or (choices and isinstance(value, str)):
            continue
        whole = not isinstance(value, Mapping | list | tuple)
        for suffix, each in [("", value)] if whole else entries(value).values():
            if each not in wanted:
                null = ", or null" if declared.default is None else ""
                raise ValueError(f"{name}{suffix} is {shortened(each)}: it must be {wanted}{null}.")


def entries(value: Any) -> dict[Any, tuple[str, Any]]:
    """Return the entries of a mapping or list by key: what a message adds to the name of the whole, and the entry."""
    if isinstance(value, Mapping):
        return {key: (f".{key}", entry) for key, entry in value.items()}
    return {i: (f"[{i}]", entry) for i, entry in enumerate(value)} if isinstance(value, list | tuple) else {}


def refuse(mistakes: Mapping[str, object]) -> None:
    """Raise ValueError with the first sentence whose condition holds."""
    for sentence, holds in mistakes.items():
        if holds:
            raise ValueError(sentence)


def check_backend(
    backend: str,
    softcap: float | None = None,
    kind: str = "softmax",
    *,
    dropout: float = 0.0,
    masked: bool = False,
    tokens: int | None = None,
    sink: bool = False,
) -> None:
    """Raise ValueError for a backend that is unknown or cannot compute this attention on any device.

    Args:
        backend: One of `BACKENDS`.
        softcap: Cap on the logits.
        kind: softmax or sigmoid.
        dropout: Probability of dropping an attention weight.
        masked: Whether a window, a document mask or a layer that separates the modalities hides earlier keys.
        tokens: Tokens per sequence; None if unknown.
        sink: Whether the softmax has a learned logit that belongs to no key.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, but is {backend!r}.")
    uneven = tokens is not None and tokens % BLOCK != 0
    refused = {
        f"cannot compute model.attention {kind}; use backend math.": backend != "math" and kind != "softmax",
        "cannot compute model.attn_sink; use backend math.": backend != "math" and sink,
        f"cannot apply model.attn_softcap {softcap}; use backend math, or flex on a GPU.":
            backend not in ("math", "flex") and softcap is not None,
        "cannot apply model.window, model.separate_first, model.separate_last or data.document_mask; use sdpa,"
        " sdpa_efficient, flex or math.": backend == "sdpa_flash" and masked,
        f"with a mask needs data.seq_len to be a multiple of {BLOCK}, but it is {tokens}: at other lengths its"
        " backward pass has given NaN; use sdpa.": backend == "sdpa_cudnn" and masked and uneven,
        f"cannot drop attention weights (model.attn_dropout {dropout}); use sdpa or math.":
            backend == "flex" and dropout > 0,
        f"needs data.seq_len to be a multiple of {BLOCK}, but it is {tokens}: at other lengths its backward pass has"
        " given NaN.": backend == "flex" and uneven,
    }  # fmt: skip
    refuse({f"backend {backend} {reason}": is_refused for reason, is_refused in refused.items()})


@lru_cache
def _choices(kind: type, name: str) -> tuple[tuple[str, ...], bool]:
    """Return the choices of a field whose type is a `Literal` or a union with one, and whether it accepts no other
    values."""
    hint = get_type_hints(kind)[name]
    found = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    return (get_args(found[0]), found[0] is hint) if found else ((), False)


def shortened(value: Any) -> str:
    """Return a value as text of at most 60 characters. A whole number of more than 24 digits is not printed, because
    Python refuses to print one with thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**24:
        return "a number of more than 24 digits"
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:56]} …"
