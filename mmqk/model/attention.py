"""Causal multi-head attention with rotary positions, optional QK-Norm and an optional cap on the logits.

Shapes are in the names: B batch, T tokens (S the same tokens as keys), D width, H heads, K head width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .config import ModelConfig, QKNormConfig
from .norms import LayerNorm, RMSNorm, at_least_fp32

BACKENDS = ("math", "sdpa")
Tap = Callable[[str, Tensor], None]  # receives (site, tensor) while a forward runs

# cuDNN is left out: its backward gives NaN where a row's log-sum-exp is very negative, a regime that drifting
# logits reach, and such a NaN would pass for a divergence of the model.
_SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def no_tap(site: str, tensor: Tensor) -> None:
    """The tap of a forward that nobody watches."""


def check_backend(backend: str, softcap: float | None) -> None:
    """Raise ValueError for an unknown backend, or for one that cannot apply an attention softcap."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, but is {backend!r}.")
    if backend == "sdpa" and softcap is not None:
        raise ValueError(f"backend sdpa cannot apply model.attn_softcap {softcap}; use backend math.")


def attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    document_BT: Tensor | None = None,
    backend: str = "math",
) -> Tensor:
    """Causal attention: `softmax(mask(cap(scale * q.k))) v`, in the dtype of its inputs.

    Args:
        q_BHTK: Queries as they enter the dot product; keys and values have the same shape and dtype.
        k_BHTK: Keys.
        v_BHTK: Values.
        scale: Factor on the dot products.
        softcap: Logits become `softcap * tanh(logit / softcap)`, before the mask (Gemma 2, arXiv 2408.00118).
        document_BT: A token sees only tokens of its own document number; None is one document a row.
        backend: math (dense, fp32 between the inputs and the output) or sdpa (fused, no softcap).

    Returns:
        out_BHTK.

    Raises:
        TypeError: q, k and v differ in dtype.
        ValueError: unknown backend, or sdpa with a softcap.
    """
    check_backend(backend, softcap)
    if not q_BHTK.dtype == k_BHTK.dtype == v_BHTK.dtype:
        raise TypeError(f"q, k and v must share one dtype: {q_BHTK.dtype}, {k_BHTK.dtype}, {v_BHTK.dtype}.")
    if backend == "sdpa":
        visible = None if document_BT is None else _visible(q_BHTK, document_BT)
        with sdpa_kernel(_SDPA_KERNELS):
            return F.scaled_dot_product_attention(
                q_BHTK, k_BHTK, v_BHTK, attn_mask=visible, is_causal=visible is None, scale=scale
            )
    with torch.autocast(q_BHTK.device.type, enabled=False):
        q, k, v = at_least_fp32(q_BHTK), at_least_fp32(k_BHTK), at_least_fp32(v_BHTK)
        logits_BHTS = (scale * q) @ k.transpose(-1, -2)
        if softcap is not None:
            logits_BHTS = softcap * torch.tanh(logits_BHTS / softcap)
        # Adding -inf in place is one pass forward and none backward; masked_fill is one in each direction.
        visible = _visible(q_BHTK, document_BT)
        logits_BHTS += torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, float("-inf"))
        return (torch.softmax(logits_BHTS, dim=-1) @ v).to(v_BHTK.dtype)


def _visible(q_BHTK: Tensor, document_BT: Tensor | None) -> Tensor:
    """Which keys S a query T may see: (T, S), or (B, 1, T, S) where documents are given."""
    T = q_BHTK.shape[-2]
    causal_TS = torch.ones(T, T, dtype=torch.bool, device=q_BHTK.device).tril()
    if document_BT is None:
        return causal_TS
    return causal_TS & (document_BT[:, None, :, None] == document_BT[:, None, None, :])


def rope_tables(T: int, K: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every position's angles, fp32, (T, 1, K) each (RoFormer, arXiv 2104.09864).

    Channel i pairs with i + K/2 (the half-split layout of Hugging Face's Llama); pair i turns by
    `position * theta^(-2i/K)`. The sine is negative in the first half, which `apply_rope` relies on.
    """
    frequency = theta ** (torch.arange(0, K, 2, dtype=torch.float32, device=device) / -K)
    angle_TK2 = torch.arange(T, dtype=torch.float32, device=device)[:, None] * frequency
    cos, sin = angle_TK2.cos(), angle_TK2.sin()
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def apply_rope(x_BTHK: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate every pair of channels by its position's angle, in fp32; the result has the input's dtype."""
    cos_T1K, signed_sin_T1K = rope
    wide = at_least_fp32(x_BTHK)
    swapped = wide.roll(wide.shape[-1] // 2, dims=-1)
    return (wide * cos_T1K + swapped * signed_sin_T1K).to(x_BTHK.dtype)


def qk_norm(config: QKNormConfig, K: int) -> nn.Module:
    """The norm of queries or of keys: over one head's channels, with one gain for all heads."""
    if config.kind == "none":
        return nn.Identity()
    return RMSNorm(K, config.eps) if config.kind == "rms" else LayerNorm(K, config.eps)


class Attention(nn.Module):
    """Self-attention of one layer, without biases.

    ```
    x ─┬─ w_q ── q_norm ── rope ─┐
       ├─ w_k ── k_norm ── rope ─┼─ attention ── w_o ── out
       └─ w_v ───────────────────┘
    ```
    """

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        check_backend(backend, config.attn_softcap)
        D, K = config.d_model, config.head_dim
        self.n_heads, self.scale = config.n_heads, config.attn_scale_value
        self.softcap, self.backend = config.attn_softcap, backend
        self.w_q = nn.Linear(D, D, bias=False)
        self.w_k = nn.Linear(D, D, bias=False)
        self.w_v = nn.Linear(D, D, bias=False)
        self.w_o = nn.Linear(D, D, bias=False)
        self.q_norm, self.k_norm = qk_norm(config.qk_norm, K), qk_norm(config.qk_norm, K)

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], document_BT: Tensor | None = None, tap: Tap = no_tap
    ) -> Tensor:
        """Attend within `x_BTD`; `rope` is `rope_tables` of this length. Returns out_BTD."""
        q_BTHK = self.w_q(x_BTD).unflatten(-1, (self.n_heads, -1))
        k_BTHK = self.w_k(x_BTD).unflatten(-1, (self.n_heads, -1))
        v_BHTK = self.w_v(x_BTD).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        tap("q_raw", q_BTHK.transpose(1, 2))
        tap("k_raw", k_BTHK.transpose(1, 2))

        q_BHTK = apply_rope(self.q_norm(q_BTHK), rope).transpose(1, 2)
        k_BHTK = apply_rope(self.k_norm(k_BTHK), rope).transpose(1, 2)
        tap("q", q_BHTK)
        tap("k", k_BHTK)
        tap("v", v_BHTK)

        out_BHTK = attention(
            q_BHTK,
            k_BHTK,
            v_BHTK,
            scale=self.scale,
            softcap=self.softcap,
            document_BT=document_BT,
            backend=self.backend,
        )
        return self.w_o(out_BHTK.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        """Heads, scale, cap and backend."""
        return f"n_heads={self.n_heads}, scale={self.scale:g}, softcap={self.softcap}, backend={self.backend}"
