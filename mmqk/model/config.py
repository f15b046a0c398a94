"""The shape and the variant of a model: frozen dataclasses that check themselves."""

import math
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class QKNormConfig:
    """Normalisation of queries and keys, one head at a time and before RoPE; the gain is shared by all heads.

    Attributes:
        kind: none; rms (RMSNorm, as in Qwen3); layer (LayerNorm with gain and bias, as in Chameleon).
        eps: Added to the mean square (rms) or to the variance (layer) under the root.
    """

    kind: Literal["none", "rms", "layer"] = "none"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        _one_of("qk_norm.kind", self.kind, ("none", "rms", "layer"))
        _above_zero("qk_norm.eps", self.eps)


@dataclass(frozen=True)
class ModelConfig:
    """An early-fusion decoder over one joint vocabulary. Impossible values raise ValueError in one sentence.

    Attributes:
        blocks: Number of ids by modality, contiguous from id 0; filled from the tokenizers when left out.
        d_model: Width of the residual stream.
        n_layers: Number of blocks, each one attention and one MLP.
        n_heads: Attention heads; d_model / n_heads is the head width and must be even, for RoPE.
        d_ff: Hidden width of the MLP; 0 for 8/3 d_model up to a multiple of 16 (swiglu) or 4 d_model (gelu).
        mlp: swiglu (gated, three matrices) or gelu (two matrices).
        pre_norm: RMSNorm on the input of each sublayer; pre alone is Llama and Chameleon-7B.
        post_norm: RMSNorm on the output of each sublayer; post alone is Chameleon-34B, Swin and OLMo 2.
        norm_eps: Epsilon of every RMSNorm but QK-Norm.
        qk_norm: Normalisation of queries and keys.
        attn_softcap: Bounds attention logits by cap * tanh(logit / cap), before the mask; null for none.
        final_softcap: Bounds the output logits in the same way; null for none.
        attn_scale: Factor on q.k: rsqrt (1 / sqrt(head width)), inverse (1 / head width) or none (1).
        residual_dropout: Probability of dropping an element of a sublayer's output before it is added.
        rope_theta: Base of the rotary position frequencies.
    """

    blocks: dict[str, int] = field(default_factory=dict)
    d_model: int = 64
    n_layers: int = 4
    n_heads: int = 4
    d_ff: int = 0
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    pre_norm: bool = True
    post_norm: bool = False
    norm_eps: float = 1e-5
    qk_norm: QKNormConfig = field(default_factory=QKNormConfig)
    attn_softcap: float | None = None
    final_softcap: float | None = None
    attn_scale: Literal["rsqrt", "inverse", "none"] = "rsqrt"
    residual_dropout: float = 0.0
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, but is {getattr(self, name)}.")
        if self.d_model % self.n_heads:
            raise ValueError(
                f"model.d_model {self.d_model} cannot be split into model.n_heads {self.n_heads} equal heads."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.d_model {self.d_model} over model.n_heads {self.n_heads} gives the odd head width "
                f"{self.head_dim}, which RoPE cannot rotate in pairs."
            )
        if self.d_ff < 0:
            raise ValueError(f"model.d_ff must be 0 (chosen from d_model) or a width, but is {self.d_ff}.")
        if not (self.pre_norm or self.post_norm):
            raise ValueError("model.pre_norm and model.post_norm are both false; set at least one of them.")
        for name, size in self.blocks.items():
            if size < 1:
                raise ValueError(f"model.blocks gives {name} {size} ids; a modality needs at least one.")
        for name in ("attn_softcap", "final_softcap"):
            if getattr(self, name) is not None:
                _above_zero(name, getattr(self, name))
        if not 0.0 <= self.residual_dropout < 1.0:
            raise ValueError(f"model.residual_dropout must lie in [0, 1), but is {self.residual_dropout}.")
        _above_zero("norm_eps", self.norm_eps)
        _above_zero("rope_theta", self.rope_theta)
        _one_of("mlp", self.mlp, ("swiglu", "gelu"))
        _one_of("attn_scale", self.attn_scale, ("rsqrt", "inverse", "none"))

    @property
    def modalities(self) -> tuple[str, ...]:
        """Block names in id order; a modality's number is its place here."""
        return tuple(self.blocks)

    @property
    def vocab_size(self) -> int:
        """Ids of all blocks together."""
        return sum(self.blocks.values())

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP, with d_ff 0 resolved."""
        if self.d_ff:
            return self.d_ff
        return 4 * self.d_model if self.mlp == "gelu" else 16 * math.ceil(8 * self.d_model / 3 / 16)

    @property
    def attn_scale_value(self) -> float:
        """The factor on q.k that `attn_scale` names."""
        return {"rsqrt": self.head_dim**-0.5, "inverse": 1 / self.head_dim, "none": 1.0}[self.attn_scale]


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"model.{name} must be one of {', '.join(choices)}, but is {value!r}.")


def _above_zero(name: str, value: float) -> None:
    if not (value > 0.0 and math.isfinite(value)):
        raise ValueError(f"model.{name} must be a finite number above 0, but is {value}.")
