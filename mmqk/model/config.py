"""Shape and variant of a model: frozen dataclasses that refuse impossible values and combinations of fields.

This file needs no torch, so that a configuration is checked before torch is imported.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mmqk.model.ranges import BELOW_ONE, LARGEST, SMALLEST, check_fields, number, refuse, to_defaults

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LAYER = re.compile(r"(layer|head)\d{2,}")  # reserved in the names of logged statistics

MlpKind = Literal["swiglu", "geglu", "gelu"]


@dataclass(frozen=True)
class QKNormConfig:
    """Normalization of queries and keys. Fields that a kind does not use are reset to their defaults.

    Attributes:
        kind: none; rms (Qwen3, OLMo 2); layer (LayerNorm: Chameleon, ViT-22B); l2 (cosine attention: Henry et al.,
            Swin V2), whose learned scale multiplies the queries and replaces `attn_scale`.
        scope: Channels that are normalized together: those of one head (head), or of all heads (full: OLMo 2).
        gain: none; shared (one gain over head_dim for all heads: Chameleon 7B, Qwen3); per_head (one gain for
            every head: OLMo 2); zero_centered (shared, `1 + w` with w initially 0: Gemma 3, Qwen3-Next). With kind l2
            this is the learned scale: none (fixed), shared (one per layer) or per_head.
        bias: Whether a LayerNorm has a bias (Chameleon does, ViT-22B does not).
        eps: For rms and layer, added to the mean square or the variance under the square root; for l2, the smallest
            length to divide by.
        place: before_rope (Chameleon, Qwen3, OLMo 2) or after_rope (Llama 4).
        normalize_v: Whether to normalize values too (QKV-Norm, arXiv 2410.16682); with kind l2 values get no scale.
        scale_init: Initial value of the scale of kind l2.
        scale_max: Largest scale of kind l2 (Swin V2: 100). If this is set, the trained parameter is the logarithm of
            the scale.
    """

    kind: Literal["none", "rms", "layer", "l2"] = "none"
    scope: Literal["head", "full"] = "head"
    gain: Literal["none", "shared", "per_head", "zero_centered"] = "shared"
    bias: bool = False
    eps: float = number(1e-5, SMALLEST, 1.0)
    place: Literal["before_rope", "after_rope"] = "before_rope"
    normalize_v: bool = False
    scale_init: float = number(10.0, 1e-6, 1e12)
    scale_max: float | None = number(None, 1e-6, 1e12)

    def __post_init__(self) -> None:
        check_fields(self, "model.qk_norm")
        if self.kind == "none":
            to_defaults(self, "scope", "gain", "bias", "eps", "place", "normalize_v")
        if self.kind != "l2":
            to_defaults(self, "scale_init", "scale_max")
        elif self.gain == "none":
            to_defaults(self, "scale_max")
        l2 = self.kind == "l2"
        refuse({
            f"model.qk_norm.bias belongs to kind 'layer', but model.qk_norm.kind is '{self.kind}'.":
                self.bias and self.kind != "layer",
            "model.qk_norm.scope 'full' does not work with model.qk_norm.kind 'l2': set it to head.":
                l2 and self.scope == "full",
            "model.qk_norm.gain 'zero_centered' does not work with model.qk_norm.kind 'l2', whose scale starts at"
            " model.qk_norm.scale_init: set it to none, shared or per_head.": l2 and self.gain == "zero_centered",
            f"model.qk_norm.scale_max {self.scale_max} is below model.qk_norm.scale_init {self.scale_init}.":
                l2 and self.scale_max is not None and self.scale_max < self.scale_init,
        })  # fmt: skip


@dataclass(frozen=True)
class PerModalityConfig:
    """Layers with one copy per modality (Mixture-of-Transformers, arXiv 2411.04996).

    A token uses the copy of its modality. All copies start with the weights of the same model without copies, so both
    models are equal until the first update. A copy gets the gradient 0, not None, from a batch without its modality.

    Attributes:
        norms: Whether each modality has its own gains (and biases) of the norms around the sublayers and of the final
            norm.
        qk_norm: Whether each modality has its own gains (and biases) of QK-Norm.
        qk: Whether each modality has its own W_q and W_k.
        mlp: Whether each modality has its own MLP.
    """

    norms: bool = False
    qk_norm: bool = False
    qk: bool = False
    mlp: bool = False


@dataclass(frozen=True)
class RopeScalingConfig:
    """Rotary frequencies scaled for longer sequences than in the original training of a checkpoint.

    Attributes:
        kind: none; linear (all frequencies divided by the factor: Gemma 3); llama3 (only the low frequencies,
            with a smooth transition: Llama 3.1).
        factor: Divisor of the frequencies.
        low_freq_factor: Wavelengths above `original_length / low_freq_factor` are divided by the factor (llama3).
        high_freq_factor: Wavelengths below `original_length / high_freq_factor` are unchanged (llama3).
        original_length: Tokens per sequence in the original training (llama3).
    """

    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = number(1.0, 1e-6, 1e6)
    low_freq_factor: float = number(1.0, 1e-6, 1e6)
    high_freq_factor: float = number(4.0, 1e-6, 1e6)
    original_length: int = number(8192, 1, 2**30)

    def __post_init__(self) -> None:
        check_fields(self, "model.rope_scaling")
        if self.kind == "none":
            to_defaults(self, "factor")
        if self.kind != "llama3":
            to_defaults(self, "low_freq_factor", "high_freq_factor", "original_length")
        refuse({
            f"model.rope_scaling.high_freq_factor {self.high_freq_factor} must be above"
            f" model.rope_scaling.low_freq_factor {self.low_freq_factor}.":
                self.high_freq_factor <= self.low_freq_factor,
        })  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """An early-fusion decoder over one joint vocabulary.

    Impossible values raise ValueError. Options of a disabled feature are reset to their defaults, so two
    configurations are equal if and only if their models are equal.

    Attributes:
        vocab_sizes: Number of ids by modality, contiguous from id 0; by default taken from the tokenizers.
        d_model: Width of the residual stream.
        n_layers: Number of blocks, each with attention and an MLP.
        n_heads: Attention heads.
        n_kv_heads: Key and value heads, each shared by n_heads / n_kv_heads query heads; 0 means n_heads.
        d_head: Width of a head (head_dim), an even number because of RoPE; 0 means d_model / n_heads.
        d_ff: Hidden width of the MLP; 0 means 4 d_model for gelu, else 8/3 d_model rounded up to a multiple of 16.
        mlp: swiglu (gated, three matrices), geglu (gated by the tanh approximation of GELU: Gemma) or gelu (two
            matrices).
        pre_norm: Whether the input of each sublayer is normalized (pre-norm alone: Llama, Chameleon-7B).
        post_norm: Whether the output of each sublayer is normalized (post-norm alone: Chameleon-34B, Swin, OLMo 2).
        norm: Kind of the norms around the sublayers and of the final norm: rms or layer.
        norm_gain: Gain of these norms: plain (a learned w), none, or zero_centered (`1 + w`, w initially 0: Gemma).
        norm_bias: Whether these norms have a bias; only possible if norm is layer.
        norm_eps: Epsilon of these norms.
        post_gain_init: Initial value of the gains of post-norms; with 0 every branch starts at zero (timm's Swin V2).
        qk_norm: Normalization of queries and keys.
        attn_softcap: Cap of the attention logits, cap * tanh(logit / cap), before the mask; null: no cap.
        final_softcap: Cap of the output logits, cap * tanh(logit / cap); null: no cap.
        attn_scale: Factor on q.k: rsqrt (1 / sqrt(head_dim)), inverse (1 / head_dim), none (1) or a number.
        attention: softmax, or sigmoid with bias -log T (arXiv 2409.04431). T counts every token of the row, including
            padding and other documents, so the same tokens in a longer row give different outputs.
        attn_gate: Factor sigmoid(W_g x) on attention's output, before W_o: none, element (one per channel:
            Qwen3-Next, arXiv 2505.06708) or head (one per head).
        attn_sink: Whether each head has a learned logit that only adds to the softmax's denominator (gpt-oss), so the
            weights of the keys sum to less than 1.
        head_scale: Whether a learned factor multiplies each head's output (NormFormer, arXiv 2110.09456).
        weight_reparam: none, or sigma: matrices of the blocks are used as `gamma / sigma(W) * W`, with the largest
            singular value sigma(W) (σReparam, arXiv 2303.06296).
        reparam_gamma: Initial value of gamma: sigma (the value sigma(W), so that the first forward pass equals that
            of weight_reparam "none", as in the authors' PyTorch code for vision and language) or one (as in their JAX
            code for speech).
        mlp_clamp: Bound c on the two factors of SwiGLU: gate is at most c, up is between -c and c (gpt-oss: 7); null:
            no bound.
        mlp_norm: Whether a norm of kind `norm` normalizes the input of the MLP's last matrix (NormFormer).
        residual_gate: Temperature of learned gates b = sigmoid(w / temperature), one per channel, w initially 0. They
            replace the sum x + f of stream and branch by sqrt(1 - b^2) x + b f (Muse Spark: 0.3); null keeps the sum.
        depth_scale: Fixed factors that depend on depth: none; norm (each pre-norm's output is divided by sqrt(layer +
            1): LayerNorm Scaling, arXiv 2502.05795) or branch (each branch is divided by sqrt(2 n_layers): Granite's
            residual_multiplier).
        deep_norm: Whether the residual stream is norm(alpha x + sublayer(x)) with alpha = (2 n_layers)^(1/4), without
            other norms around the sublayers and without a final norm. W_v, W_o and the matrices of the MLP start
            smaller, by the factor (8 n_layers)^(-1/4) (DeepNorm, arXiv 2203.00555).
        residual_dropout: Probability of dropping an element of a sublayer's output before it is added.
        attn_dropout: Probability of dropping an attention weight.
        layer_scale: Initial value of a learned factor on each channel of a sublayer's output (LayerScale, arXiv
            2103.17239); null: no factor.
        output_init: Initial size of the last matrix of each sublayer: plain (as for other matrices); total (plain
            divided by sqrt(2 n_layers): GPT-2, Spike No More) or depth (plain divided by sqrt(2 (layer + 1)):
            OLMo-core, DCLM).
        embed_init: Factor on the initial size of a modality's embeddings, by modality name; 1 by default.
        embed_scale: Factor on a modality's embeddings in every forward pass, by modality name; 1 by default.
        embed_sqrt_d: Whether embeddings are multiplied by sqrt(d_model) in every forward pass (Gemma; Spike No More,
            arXiv 2312.16903), in addition to `embed_scale`.
        embed_norm: Whether embeddings are divided by their root mean square, before both scales (Muse Glimmer).
        per_modality: Layers with one copy per modality.
        separate_first: Number of first layers that are separate for each modality: every weight has one copy per
            modality, and a token attends to tokens of its modality only (Uni-X, arXiv 2509.24365).
        separate_last: Number of last layers that are separate in the same way. The final norm is shared.
        tie_embeddings: Whether the head is the embedding matrix.
        window: Number of tokens that a query attends to in windowed layers, itself included; 0 for all tokens in all
            layers.
        global_every: With n above 0, every n-th layer ignores `window` and attends to all tokens (Gemma 2: 2,
            Gemma 3: 6); with 0, no layer does.
        rope_theta: Base of the rotary position frequencies.
        local_rope_theta: Base in windowed layers, which then do not use `rope_scaling`; null: these layers use
            `rope_theta` with `rope_scaling`.
        rope_scaling: Scaling of the rotary frequencies for longer sequences.
        patch: module:function that gets the model after it is built and changes it in place; empty for none. In a
            fork it gets the model with the parent's weights.
    """

    vocab_sizes: dict[str, int] = number(dict, 1, 2**24)
    d_model: int = number(64, 1, 2**17)
    n_layers: int = number(4, 1, 4096)
    n_heads: int = number(4, 1, 4096)
    n_kv_heads: int = number(0, 0, 4096)
    d_head: int = number(0, 0, 2**14)
    d_ff: int = number(0, 0, 2**21)
    mlp: MlpKind = "swiglu"
    pre_norm: bool = True
    post_norm: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_gain: Literal["plain", "none", "zero_centered"] = "plain"
    norm_bias: bool = False
    norm_eps: float = number(1e-5, SMALLEST, 1.0)
    post_gain_init: float = number(1.0, -1e6, 1e6)
    qk_norm: QKNormConfig = field(default_factory=QKNormConfig)
    attn_softcap: float | None = number(None, 1e-6, 1e12)
    final_softcap: float | None = number(None, 1e-6, 1e12)
    attn_scale: Literal["rsqrt", "inverse", "none"] | float = number("rsqrt", 1e-9, 1e12)
    attention: Literal["softmax", "sigmoid"] = "softmax"
    attn_gate: Literal["none", "element", "head"] = "none"
    attn_sink: bool = False
    head_scale: bool = False
    weight_reparam: Literal["none", "sigma"] = "none"
    reparam_gamma: Literal["sigma", "one"] = "sigma"
    mlp_clamp: float | None = number(None, 1e-6, 1e12)
    mlp_norm: bool = False
    residual_gate: float | None = number(None, 1e-6, 1e6)
    depth_scale: Literal["none", "norm", "branch"] = "none"
    deep_norm: bool = False
    residual_dropout: float = number(0.0, 1e-6, BELOW_ONE, zero=True)
    attn_dropout: float = number(0.0, 1e-6, BELOW_ONE, zero=True)
    layer_scale: float | None = number(None, 1e-12, 1e6)
    output_init: Literal["plain", "total", "depth"] = "plain"
    embed_init: dict[str, float] = number(dict, SMALLEST, LARGEST)
    embed_scale: dict[str, float] = number(dict, SMALLEST, LARGEST)
    embed_sqrt_d: bool = False
    embed_norm: bool = False
    per_modality: PerModalityConfig = field(default_factory=PerModalityConfig)
    separate_first: int = number(0, 0, 4096)
    separate_last: int = number(0, 0, 4096)
    tie_embeddings: bool = False
    window: int = number(0, 0, 2**30)
    global_every: int = number(0, 0, 4096)
    rope_theta: float = number(10000.0, 1e-6, 1e18)
    local_rope_theta: float | None = number(None, 1e-6, 1e18)
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    patch: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "model")
        if not self.post_norm:
            to_defaults(self, "post_gain_init")
        if self.weight_reparam == "none":
            to_defaults(self, "reparam_gamma")
        if not self.window:
            to_defaults(self, "global_every", "local_rope_theta")
        if len(self.vocab_sizes) == 1:
            to_defaults(self, "per_modality", "separate_first", "separate_last")
        _refuse_shapes(self)
        _refuse_conflicts(self)
        _refuse_copies(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "ModelConfig":
        """Return the configuration from its `dataclasses.asdict`. An unknown field raises TypeError."""
        nested = {"qk_norm": QKNormConfig, "per_modality": PerModalityConfig, "rope_scaling": RopeScalingConfig}
        return cls(**{name: nested[name](**value) if name in nested else value for name, value in stored.items()})

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the modalities in the order of their ids; the number of a modality is its index here."""
        return tuple(self.vocab_sizes)

    @property
    def vocab_size(self) -> int:
        """Number of ids of all modalities."""
        return sum(self.vocab_sizes.values())

    @property
    def head_dim(self) -> int:
        """Width of one attention head: d_head, or d_model / n_heads if d_head is 0."""
        return self.d_head or self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads: n_kv_heads, or n_heads if n_kv_heads is 0."""
        return self.n_kv_heads or self.n_heads

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP: d_ff, or its default if d_ff is 0."""
        if self.d_ff:
            return self.d_ff
        return 4 * self.d_model if self.mlp == "gelu" else 16 * math.ceil(8 * self.d_model / 3 / 16)

    @property
    def attn_scale_value(self) -> float:
        """The factor on q.k; 1 under qk_norm.kind l2, where the queries are multiplied by the learned scale."""
        if self.qk_norm.kind == "l2":
            return 1.0
        if not isinstance(self.attn_scale, str):
            return float(self.attn_scale)
        return {"rsqrt": self.head_dim**-0.5, "inverse": 1 / self.head_dim, "none": 1.0}[self.attn_scale]

    def window_of(self, layer: int) -> int:
        """Return the number of tokens that a query of this layer attends to, itself included; 0 means all tokens."""
        return 0 if self.global_every and (layer + 1) % self.global_every == 0 else self.window

    def separates(self, layer: int) -> bool:
        """Return whether the weights of this layer and its attention are separate for each modality."""
        return layer < self.separate_first or layer >= self.n_layers - self.separate_last

    def reach_of(self, layer: int) -> tuple[int, bool]:
        """Return `window_of` and `separates`. Layers with equal values share one attention mask."""
        return self.window_of(layer), self.separates(layer)


def _refuse_shapes(c: ModelConfig) -> None:
    refuse({
        f"model.d_model {c.d_model} cannot be split into model.n_heads {c.n_heads} equal heads: change one of them, or"
        " set model.d_head.": not c.d_head and c.d_model % c.n_heads,
        f"model.d_head is {c.d_head}, which RoPE cannot rotate in pairs: make it even.": c.d_head % 2,
        f"model.d_model {c.d_model} divided by model.n_heads {c.n_heads} gives the odd head_dim {c.head_dim}, which"
        " RoPE cannot rotate in pairs.": c.head_dim % 2,
        f"model.n_heads {c.n_heads} cannot share model.n_kv_heads {c.n_kv_heads} key heads evenly.":
            c.n_heads % c.kv_heads,
    } | {
        f"model.vocab_sizes has a modality {name!r}: use letters, digits and _, and no name like layer03.":
            not _NAME.fullmatch(name) or _LAYER.fullmatch(name)
        for name in c.vocab_sizes
    } | {
        f"model.{field} names {name!r}, but the modalities are {', '.join(c.vocab_sizes)}.":
            c.vocab_sizes and name not in c.vocab_sizes
        for field, factors in (("embed_init", c.embed_init), ("embed_scale", c.embed_scale))
        for name in factors
    })  # fmt: skip


def _refuse_conflicts(c: ModelConfig) -> None:
    excluded_by_deep_norm = {
        "pre_norm true": c.pre_norm,
        "post_norm true": c.post_norm,
        "residual_gate": c.residual_gate is not None,
        f"depth_scale {c.depth_scale}": c.depth_scale != "none",
        f"output_init {c.output_init}": c.output_init != "plain",
    }
    refuse({
        f"model.deep_norm has its own norms, factors and initial sizes and excludes model.{name}: remove one of them.":
            c.deep_norm and is_set
        for name, is_set in excluded_by_deep_norm.items()
    } | {
        "model.pre_norm and model.post_norm are both false; set at least one of them.":
            not (c.pre_norm or c.post_norm or c.deep_norm),
        f"model.norm_bias belongs to model.norm layer, but model.norm is {c.norm}.":
            c.norm_bias and c.norm != "layer",
        f"model.post_gain_init {c.post_gain_init} needs a gain, but model.norm_gain is none.":
            c.post_gain_init != 1 and c.norm_gain == "none",
        f"model.attn_scale {c.attn_scale} would multiply the learned scale of model.qk_norm.kind l2, which replaces it:"
        " remove model.attn_scale.": c.qk_norm.kind == "l2" and c.attn_scale not in ("rsqrt", "none"),
        f"model.attn_sink is a logit of the softmax, but model.attention is {c.attention}: remove one of them.":
            c.attn_sink and c.attention != "softmax",
        f"model.mlp_clamp is for model.mlp 'swiglu', but model.mlp is '{c.mlp}': remove one of them.":
            c.mlp_clamp is not None and c.mlp != "swiglu",
        "model.depth_scale 'norm' scales the output of pre-norms, but model.pre_norm is false: set model.depth_scale to"
        " branch or none.": c.depth_scale == "norm" and not c.pre_norm,
    })  # fmt: skip


def _refuse_copies(c: ModelConfig) -> None:
    """Refuse conflicts of layers with one copy per modality."""
    copies, qk = c.per_modality, c.qk_norm
    refuse({
        "model.per_modality.norms has no gain or bias to separate: model.norm_gain is none.":
            copies.norms and c.norm_gain == "none" and not c.norm_bias,
        "model.per_modality.qk_norm has no QK-Norm to separate: set model.qk_norm.kind.":
            copies.qk_norm and qk.kind == "none",
        "model.per_modality.qk_norm has no gain or bias to separate: model.qk_norm.gain is none.":
            copies.qk_norm and qk.gain == "none" and not qk.bias,
        f"model.separate_first {c.separate_first} and model.separate_last {c.separate_last} are more layers than"
        f" model.n_layers {c.n_layers}: lower one of them.": c.separate_first + c.separate_last > c.n_layers,
    } | {
        f"model.{name} separates every weight, but model.attn_sink has one logit for all modalities: remove one of"
        " them.": getattr(c, name) and c.attn_sink
        for name in ("separate_first", "separate_last")
    })  # fmt: skip
