"""Causal multi-head attention with rotary positions, optional QK-Norm and an optional cap on the logits.

Shapes are in the names: B batch, T tokens (S the same tokens as keys), D width, H heads, G heads of keys and
values, K head width.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .config import ModelConfig
from .linear import linear, through, untied
from .norms import at_least_fp32, qk_norm
from .rope import Rope, apply_rope

BACKENDS = ("math", "sdpa")
Tap = Callable[[str, Tensor], None]  # receives (site, tensor) while a forward runs

# cuDNN is left out: its backward gives NaN where a row's log-sum-exp is very negative, a regime that drifting
# logits reach, and such a NaN would pass for a divergence of the model.
_SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def no_tap(site: str, tensor: Tensor) -> None:
    """The tap of a forward that nobody watches."""


def check_backend(backend: str, softcap: float | None = None, kind: str = "softmax") -> None:
    """Raise ValueError for an unknown backend, or for one that cannot compute this attention."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, but is {backend!r}.")
    if backend == "sdpa" and softcap is not None:
        raise ValueError(f"backend sdpa cannot apply model.attn_softcap {softcap}; use backend math.")
    if backend == "sdpa" and kind != "softmax":
        raise ValueError(f"backend sdpa cannot compute model.attention {kind}; use backend math.")


def attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    *,
    scale: float,
    kind: str = "softmax",
    softcap: float | None = None,
    window: int = 0,
    document_BT: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "math",
) -> Tensor:
    """Causal attention: `softmax(mask(cap(scale * q.k))) v`, in the dtype of its inputs.

    Args:
        q_BHTK: Queries as they enter the dot product; keys and values have the same shape and dtype.
        k_BHTK: Keys.
        v_BHTK: Values.
        scale: Factor on the dot products.
        kind: softmax, or sigmoid: each weight is `sigmoid(logit - log T)` by itself (Ramapuram et al. 2024,
            arXiv 2409.04431).
        softcap: Logits become `softcap * tanh(logit / softcap)`, before the mask (Gemma 2, arXiv 2408.00118).
        window: A token sees this many tokens, itself included; 0 for all.
        document_BT: A token sees only tokens of its own document number; None is one document a row.
        dropout: Probability of dropping a weight.
        backend: math (dense, fp32 between the inputs and the output) or sdpa (fused, softmax without softcap).

    Returns:
        out_BHTK.

    Raises:
        TypeError: q, k and v differ in dtype.
        ValueError: unknown backend, or sdpa with a softcap or sigmoid.
    """
    check_backend(backend, softcap, kind)
    if not q_BHTK.dtype == k_BHTK.dtype == v_BHTK.dtype:
        raise TypeError(f"q, k and v must share one dtype: {q_BHTK.dtype}, {k_BHTK.dtype}, {v_BHTK.dtype}.")
    T = q_BHTK.shape[-2]
    if backend == "sdpa":
        plain = document_BT is None and not window
        mask = None if plain else visible_keys(T, q_BHTK.device, window, document_BT)
        with sdpa_kernel(_SDPA_KERNELS):
            return F.scaled_dot_product_attention(
                q_BHTK, k_BHTK, v_BHTK, attn_mask=mask, is_causal=plain, scale=scale, dropout_p=dropout
            )
    with torch.autocast(q_BHTK.device.type, enabled=False):
        q, k, v = at_least_fp32(q_BHTK), at_least_fp32(k_BHTK), at_least_fp32(v_BHTK)
        logits_BHTS = (scale * q) @ k.transpose(-1, -2)
        if softcap is not None:
            logits_BHTS = softcap * torch.tanh(logits_BHTS / softcap)
        # Adding -inf in place is one pass forward and none backward; masked_fill is one in each direction.
        visible = visible_keys(T, q.device, window, document_BT)
        logits_BHTS += torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, float("-inf"))
        if kind == "softmax":
            weight_BHTS = torch.softmax(logits_BHTS, dim=-1)
        else:
            weight_BHTS = torch.sigmoid(logits_BHTS - math.log(T))
        if dropout:
            weight_BHTS = F.dropout(weight_BHTS, dropout)
        return (weight_BHTS @ v).to(v_BHTK.dtype)


def visible_keys(T: int, device: torch.device, window: int = 0, document_BT: Tensor | None = None) -> Tensor:
    """Which keys S a query T may see: (T, S), or (B, 1, T, S) where documents are given."""
    visible_TS = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    if window:
        visible_TS = visible_TS.triu(1 - window)
    if document_BT is None:
        return visible_TS
    return visible_TS & (document_BT[:, None, :, None] == document_BT[:, None, None, :])


class Attention(nn.Module):
    """Self-attention of one layer, without biases.

    ```
    x ─┬─ w_q ── q_norm ── rope ─┐
       ├─ w_k ── k_norm ── rope ─┼─ attention ── w_o ── out
       └─ w_v ── v_norm ─────────┘
    ```

    A norm that is switched off is the identity; `qk_norm.place` after_rope swaps norm and RoPE.
    """

    def __init__(self, config: ModelConfig, backend: str, layer: int = 0) -> None:
        super().__init__()
        check_backend(backend, config.attn_softcap, config.attention)
        D, K, H, G = config.d_model, config.head_dim, config.n_heads, config.kv_heads
        self.n_heads, self.kv_heads, self.scale = H, G, config.attn_scale_value
        self.kind, self.softcap, self.window = config.attention, config.attn_softcap, config.window_of(layer)
        self.dropout, self.backend = config.attn_dropout, backend
        self.norm_first = config.qk_norm.place == "before_rope"
        own = config.untie
        self.w_q = untied(lambda: linear(config, D, H * K), config, own.qk)
        self.w_k = untied(lambda: linear(config, D, G * K), config, own.qk)
        self.w_v = linear(config, D, G * K)
        self.w_o = linear(config, H * K, D, output_init_scale(config, layer))
        self.q_norm = untied(lambda: qk_norm(config.qk_norm, H, K, "q"), config, own.qk_norm)
        self.k_norm = untied(lambda: qk_norm(config.qk_norm, G, K, "k"), config, own.qk_norm)
        self.v_norm = qk_norm(config.qk_norm, G, K, "v")

    def forward(
        self,
        x_BTD: Tensor,
        rope: Rope,
        document_BT: Tensor | None = None,
        modality_BT: Tensor | None = None,
        tap: Tap = no_tap,
    ) -> Tensor:
        """Attend within `x_BTD`; `rope` is `rope_tables` of this length. Returns out_BTD."""
        tap("attn_in", x_BTD)
        q_BTHK = through(self.w_q, x_BTD, modality_BT).unflatten(-1, (self.n_heads, -1))
        k_BTGK = through(self.w_k, x_BTD, modality_BT).unflatten(-1, (self.kv_heads, -1))
        v_BTGK = self.v_norm(self.w_v(x_BTD).unflatten(-1, (self.kv_heads, -1)))
        tap("q_raw", q_BTHK.transpose(1, 2))
        tap("k_raw", k_BTGK.transpose(1, 2))

        q_BHTK = self._placed(q_BTHK, self.q_norm, rope, modality_BT).transpose(1, 2)
        k_BHTK = self._shared(self._placed(k_BTGK, self.k_norm, rope, modality_BT).transpose(1, 2))
        v_BHTK = self._shared(v_BTGK.transpose(1, 2))
        tap("q", q_BHTK)
        tap("k", k_BHTK)
        tap("v", v_BHTK)

        out_BHTK = attention(
            q_BHTK,
            k_BHTK,
            v_BHTK,
            scale=self.scale,
            kind=self.kind,
            softcap=self.softcap,
            window=self.window,
            document_BT=document_BT,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return self.w_o(out_BHTK.transpose(1, 2).flatten(2))

    def _placed(self, x_BTHK: Tensor, norm: nn.Module, rope: Rope, modality_BT: Tensor | None) -> Tensor:
        if self.norm_first:
            return apply_rope(through(norm, x_BTHK, modality_BT), rope)
        return through(norm, apply_rope(x_BTHK, rope), modality_BT)

    def _shared(self, x_BGTK: Tensor) -> Tensor:
        """Each head of keys or values once for every query head that uses it."""
        repeat = self.n_heads // self.kv_heads
        return x_BGTK if repeat == 1 else x_BGTK.repeat_interleave(repeat, dim=1)

    def extra_repr(self) -> str:
        """Heads, scale, kind, cap, window and backend."""
        return (
            f"n_heads={self.n_heads}, kv_heads={self.kv_heads}, scale={self.scale:g}, kind={self.kind}, "
            f"softcap={self.softcap}, window={self.window}, backend={self.backend}"
        )


def output_init_scale(config: ModelConfig, layer: int) -> float:
    """Factor on the initial size of the last matrix of a sublayer, as `config.output_init` says."""
    return {"plain": 1.0, "total": (2 * config.n_layers) ** -0.5, "depth": (2 * (layer + 1)) ** -0.5}[
        config.output_init
    ]
