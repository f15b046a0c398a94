"""Combinations of fields that no model can have, and the kinds of attention that each backend can compute.

This file needs no torch, so that a configuration is checked before torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import ModelConfig

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LAYER = re.compile(r"(layer|head)\d{2,}")  # reserved in the names of logged statistics
# math is dense attention and flex is FlexAttention. The others are torch's scaled_dot_product_attention; sdpa uses
# the kernel that `kernel_name` returns.
BACKENDS = ("math", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex")
BLOCK = 128  # tokens


def check_model(config: ModelConfig) -> None:
    """Raise ValueError with the first conflict between fields of a model."""
    for find in (_shape_conflicts, _field_conflicts, _copy_conflicts):
        for sentence in find(config):
            raise ValueError(sentence)


def _shape_conflicts(c: ModelConfig) -> Iterator[str]:
    if not c.d_head and c.d_model % c.n_heads:
        yield (
            f"model.d_model {c.d_model} cannot be split into model.n_heads {c.n_heads} equal heads: change one of"
            " them, or set model.d_head."
        )
    if c.head_dim % 2 and c.d_head:
        yield f"model.d_head is {c.d_head}, which RoPE cannot rotate in pairs: make it even."
    if c.head_dim % 2:
        yield (
            f"model.d_model {c.d_model} divided by model.n_heads {c.n_heads} gives the odd head_dim {c.head_dim},"
            " which RoPE cannot rotate in pairs."
        )
    if c.n_heads % c.kv_heads:
        yield f"model.n_heads {c.n_heads} cannot share model.n_kv_heads {c.n_kv_heads} key heads evenly."
    for name in c.vocab_sizes:
        if not (isinstance(name, str) and _NAME.fullmatch(name)) or _LAYER.fullmatch(name):
            yield (f"model.vocab_sizes has a modality {name!r}: use letters, digits and _, and no name like layer03.")
    for field, factors in (("embed_init", c.embed_init), ("embed_scale", c.embed_scale)):
        for name in factors:
            if c.vocab_sizes and name not in c.vocab_sizes:
                yield f"model.{field} names {name!r}, but the modalities are {', '.join(c.vocab_sizes)}."


def _field_conflicts(c: ModelConfig) -> Iterator[str]:
    excluded_by_deep_norm = {
        "pre_norm true": c.pre_norm,
        "post_norm true": c.post_norm,
        "residual_gate": c.residual_gate is not None,
        f"depth_scale {c.depth_scale}": c.depth_scale != "none",
        f"output_init {c.output_init}": c.output_init != "plain",
    }
    for name, is_set in excluded_by_deep_norm.items():
        if c.deep_norm and is_set:
            yield (
                f"model.deep_norm has its own norms, factors and initial sizes and excludes model.{name}: remove one"
                " of them."
            )
    if not (c.pre_norm or c.post_norm or c.deep_norm):
        yield "model.pre_norm and model.post_norm are both false; set at least one of them."
    if c.norm_bias and c.norm != "layer":
        yield f"model.norm_bias belongs to model.norm layer, but model.norm is {c.norm}."
    if c.post_gain_init != 1 and c.norm_gain == "none":
        yield f"model.post_gain_init {c.post_gain_init} needs a gain, but model.norm_gain is none."
    if c.qk_norm.kind == "l2" and c.attn_scale not in ("rsqrt", "none"):
        yield (
            f"model.attn_scale {c.attn_scale} would multiply the learned scale of model.qk_norm.kind l2, which"
            " replaces it: remove model.attn_scale."
        )
    if c.attn_sink and c.attention != "softmax":
        yield (f"model.attn_sink is a logit of the softmax, but model.attention is {c.attention}: remove one of them.")
    if c.mlp_clamp is not None and c.mlp != "swiglu":
        yield f"model.mlp_clamp is for model.mlp 'swiglu', but model.mlp is '{c.mlp}': remove one of them."
    if c.depth_scale == "norm" and not c.pre_norm:
        yield (
            "model.depth_scale 'norm' scales the output of pre-norms, but model.pre_norm is false: set"
            " model.depth_scale to branch or none."
        )


def _copy_conflicts(c: ModelConfig) -> Iterator[str]:
    """Yield the conflicts of layers with one copy per modality."""
    qk = c.qk_norm
    if c.per_modality.norms and c.norm_gain == "none" and not c.norm_bias:
        yield "model.per_modality.norms has no gain or bias to separate: model.norm_gain is none."
    if c.per_modality.qk_norm and qk.kind == "none":
        yield "model.per_modality.qk_norm has no QK-Norm to separate: set model.qk_norm.kind."
    if c.per_modality.qk_norm and qk.gain == "none" and not qk.bias:
        yield "model.per_modality.qk_norm has no gain or bias to separate: model.qk_norm.gain is none."
    for name in ("separate_first", "separate_last"):
        if getattr(c, name) and c.attn_sink:
            yield (
                f"model.{name} separates every weight, but model.attn_sink has one logit for all modalities: remove"
                " one of them."
            )
    if c.separate_first + c.separate_last > c.n_layers:
        yield (
            f"model.separate_first {c.separate_first} and model.separate_last {c.separate_last} are more layers than"
            f" model.n_layers {c.n_layers}: lower one of them."
        )


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
    refused = [
        (backend != "math" and kind != "softmax", f"cannot compute model.attention {kind}; use backend math."),
        (backend != "math" and sink, "cannot compute model.attn_sink; use backend math."),
        (
            backend not in ("math", "flex") and softcap is not None,
            f"cannot apply model.attn_softcap {softcap}; use backend math, or flex on a GPU.",
        ),
        (
            backend == "sdpa_flash" and masked,
            "cannot apply model.window, model.separate_first, model.separate_last or data.document_mask; use sdpa,"
            " sdpa_efficient, flex or math.",
        ),
        (
            backend == "sdpa_cudnn" and masked and uneven,
            f"with a mask needs data.seq_len to be a multiple of {BLOCK}, but it is {tokens}: at other lengths its"
            " backward pass has given NaN; use sdpa.",
        ),
        (
            backend == "flex" and dropout > 0,
            f"cannot drop attention weights (model.attn_dropout {dropout}); use sdpa or math.",
        ),
        (
            backend == "flex" and uneven,
            f"needs data.seq_len to be a multiple of {BLOCK}, but it is {tokens}: at other lengths its backward pass"
            " has given NaN.",
        ),
    ]
    for is_refused, reason in refused:
        if is_refused:
            raise ValueError(f"backend {backend} {reason}")
