"""Causal multi-head attention with rotary positions, optional QK-Norm and an optional cap on the logits.

Shapes are in the names: B batch, T tokens, D model width, H heads, G key and value heads, K head_dim.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .backends import RowStats, attention
from .config import ModelConfig, RopeScalingConfig
from .linear import linear, through, untied
from .norms import LayerScale, at_least_fp32, qk_norm
from .ranges import check_backend

Rope = tuple[Tensor, Tensor]  # cosine and signed sine of every position's angles
Observe = Callable[[str, Tensor], None]  # receives (site, tensor) during a forward pass


def no_observer(site: str, tensor: Tensor) -> None:
    """Do nothing. A forward pass without an observer passes this function to its layers."""


class Attention(nn.Module):
    """Self-attention of one layer, without biases.

    ```
    x ─┬─ w_q ── q_norm ── rope ─┐
       ├─ w_k ── k_norm ── rope ─┼─ attention ── head_scale ── gate ── w_o ── out
       ├─ w_v ── v_norm ─────────┘                               │
       └─ w_g ── sigmoid ────────────────────────────────────────┘
    ```

    A disabled part is the identity; `qk_norm.place` "after_rope" swaps norm and RoPE.
    """

    def __init__(self, config: ModelConfig, backend: str, layer: int = 0) -> None:
        super().__init__()
        dropout, sink = config.attn_dropout, config.attn_sink
        check_backend(backend, config.attn_softcap, config.attention, dropout=dropout, sink=sink)
        D, K, H, G = config.d_model, config.head_dim, config.n_heads, config.kv_heads
        self.n_heads, self.kv_heads, self.scale = H, G, config.attn_scale_value
        self.kind, self.softcap, self.window = config.attention, config.attn_softcap, config.window_of(layer)
        self.dropout, self.backend = config.attn_dropout, backend
        self.norm_first = config.qk_norm.place == "before_rope"
        separate = config.separates(layer)
        untie_qk = config.per_modality.qk or separate
        untie_norm = config.per_modality.qk_norm or (separate and config.qk_norm.kind != "none")
        self.w_q = untied(lambda: linear(config, D, H * K), config, untie_qk)
        self.w_k = untied(lambda: linear(config, D, G * K), config, untie_qk)
        self.w_v = untied(lambda: linear(config, D, G * K, value_init_scale(config)), config, separate)
        self.w_o = untied(lambda: linear(config, H * K, D, output_init_scale(config, layer)), config, separate)
        self.q_norm = untied(lambda: qk_norm(config.qk_norm, H, K, "q"), config, untie_norm)
        self.k_norm = untied(lambda: qk_norm(config.qk_norm, G, K, "k"), config, untie_norm)
        untie_v_norm = separate and config.qk_norm.normalize_v
        self.v_norm = untied(lambda: qk_norm(config.qk_norm, G, K, "v"), config, untie_v_norm)
        gates = {"none": 0, "head": H, "element": H * K}[config.attn_gate]
        self.w_g = untied(lambda: linear(config, D, gates), config, separate) if gates else None
        self.sink = LayerScale(H, 0.0) if config.attn_sink else None
        self.head_scale = untied(lambda: LayerScale(H, 1.0), config, separate) if config.head_scale else None

    def forward(
        self, x_BTD: Tensor, rope: Rope, mask: Any, modality_BT: Tensor | None = None, observe: Observe = no_observer
    ) -> tuple[Tensor, RowStats | None]:
        """Compute self-attention over `x_BTD`. `rope` comes from `rope_tables` and `mask` from `mask_of`, for T
        tokens.

        Returns:
            out_BTD, and the `RowStats` of the backend or None.
        """
        observe("attn_in", x_BTD)
        q_BTHK = through(self.w_q, x_BTD, modality_BT).unflatten(-1, (self.n_heads, -1))
        k_BTGK = through(self.w_k, x_BTD, modality_BT).unflatten(-1, (self.kv_heads, -1))
        v_BTGK = through(self.w_v, x_BTD, modality_BT).unflatten(-1, (self.kv_heads, -1))
        v_BTGK = through(self.v_norm, v_BTGK, modality_BT)
        observe("q_raw", q_BTHK.transpose(1, 2))
        observe("k_raw", k_BTGK.transpose(1, 2))

        q_BHTK = self._norm_and_rope(q_BTHK, self.q_norm, rope, modality_BT).transpose(1, 2)
        k_BHTK = self._norm_and_rope(k_BTGK, self.k_norm, rope, modality_BT).transpose(1, 2)
        v_BHTK = v_BTGK.transpose(1, 2)
        if self.backend != "flex" or observe is not no_observer:  # flex supports shared heads
            k_BHTK, v_BHTK = self._repeat_heads(k_BHTK), self._repeat_heads(v_BHTK)
        observe("q", q_BHTK)
        observe("k", k_BHTK)
        observe("v", v_BHTK)

        out_BHTK, row_stats = attention(
            q_BHTK,
            k_BHTK,
            v_BHTK,
            mask,
            scale=self.scale,
            kind=self.kind,
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
            sink_H=None if self.sink is None else self.sink.weight,
        )
        out_BTHK = out_BHTK.transpose(1, 2)
        if self.head_scale is not None:
            out_BTHK = through(self.head_scale, out_BTHK.mT, modality_BT).mT
        if self.w_g is not None:
            gate_BTHK = torch.sigmoid(through(self.w_g, x_BTD, modality_BT)).unflatten(-1, (self.n_heads, -1))
            observe("gate", gate_BTHK)
            out_BTHK = gate_BTHK * out_BTHK
        return through(self.w_o, out_BTHK.flatten(2), modality_BT), row_stats

    def _norm_and_rope(self, x_BTHK: Tensor, norm: nn.Module, rope: Rope, modality_BT: Tensor | None) -> Tensor:
        if self.norm_first:
            return apply_rope(through(norm, x_BTHK, modality_BT), rope)
        return through(norm, apply_rope(x_BTHK, rope), modality_BT)

    def _repeat_heads(self, x_BGTK: Tensor) -> Tensor:
        """Repeat each key or value head for every query head that shares it."""
        repeat = self.n_heads // self.kv_heads
        return x_BGTK if repeat == 1 else x_BGTK.repeat_interleave(repeat, dim=1)

    def extra_repr(self) -> str:
        """Return the heads, scale, kind, cap, window and backend."""
        return (
            f"n_heads={self.n_heads}, kv_heads={self.kv_heads}, scale={self.scale:g}, kind={self.kind}, "
            f"softcap={self.softcap}, window={self.window}, backend={self.backend}"
        )


def value_init_scale(config: ModelConfig) -> float:
    """Return the factor on the initial size of W_v and of the first matrices of the MLP: 1 without
    `config.deep_norm`."""
    return (8 * config.n_layers) ** -0.25 if config.deep_norm else 1.0


def output_init_scale(config: ModelConfig, layer: int) -> float:
    """Return the factor on the initial size of a sublayer's last matrix, which `config.output_init` or
    `config.deep_norm` sets."""
    if config.deep_norm:
        return value_init_scale(config)
    scales = {"plain": 1.0, "total": (2 * config.n_layers) ** -0.5, "depth": (2 * (layer + 1)) ** -0.5}
    return scales[config.output_init]


def rope_tables(
    T: int, K: int, theta: float, device: torch.device, scaling: RopeScalingConfig | None = None, heads: int = 1
) -> Rope:
    """Return the cosine and signed sine of every position's angles, fp32, (T, 1, K) each (RoFormer, arXiv
    2104.09864).

    Channel i pairs with i + K/2 (the half-split layout of Hugging Face's Llama); pair i rotates by
    `position * theta^(-2i/K)`. The sine is negative in the first half, which `apply_rope` relies on.

    On a CPU the tables are (T, heads, K), because a product with a factor that is broadcast over heads would take
    three times as long.
    """
    frequency = theta ** (torch.arange(0, K, 2, dtype=torch.float32, device=device) / -K)
    if scaling is not None and scaling.kind != "none":
        frequency = _scaled(frequency, scaling)
    angle_TK2 = torch.arange(T, dtype=torch.float32, device=device)[:, None] * frequency
    cos, sin = angle_TK2.cos(), angle_TK2.sin()
    cos_T1K, signed_sin_T1K = torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
    if device.type != "cpu":
        return cos_T1K, signed_sin_T1K
    return cos_T1K.expand(-1, heads, -1).contiguous(), signed_sin_T1K.expand(-1, heads, -1).contiguous()


def _scaled(frequency: Tensor, scaling: RopeScalingConfig) -> Tensor:
    slow = frequency / scaling.factor
    if scaling.kind == "linear":
        return slow
    # Number of rotations of this pair within the length of the original training.
    turns = scaling.original_length * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequency + (1 - kept) * slow


def apply_rope(x_BTHK: Tensor, rope: Rope) -> Tensor:
    """Rotate every pair of channels by its position's angle, in fp32; the result has the input's dtype."""
    cos_THK, signed_sin_THK = (t[:, : x_BTHK.shape[2]] for t in rope)  # keys may have fewer heads than queries
    wide = at_least_fp32(x_BTHK)
    swapped = wide.roll(wide.shape[-1] // 2, dims=-1)
    return (wide * cos_THK + swapped * signed_sin_THK).to(x_BTHK.dtype)
