"""Causal multi-head attention with rotary positions, optional QK-Norm and an optional cap on the logits.

Shapes are in the names: B batch, T tokens, D width, H heads, G heads of keys and values, K head width.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .backends import Rows, attention, check_backend
from .config import ModelConfig
from .linear import linear, through, untied
from .norms import qk_norm
from .rope import Rope, apply_rope

Tap = Callable[[str, Tensor], None]  # receives (site, tensor) while a forward runs


def no_tap(site: str, tensor: Tensor) -> None:
    """The tap of a forward that nobody watches."""


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
        check_backend(backend, config.attn_softcap, config.attention, dropout=config.attn_dropout)
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
        self, x_BTD: Tensor, rope: Rope, mask: Any, modality_BT: Tensor | None = None, tap: Tap = no_tap
    ) -> tuple[Tensor, Rows | None]:
        """Attend within `x_BTD`; `rope` is `rope_tables` and `mask` is `mask_of` this length.

        Returns:
            out_BTD, and the rows of a backend that has them.
        """
        tap("attn_in", x_BTD)
        q_BTHK = through(self.w_q, x_BTD, modality_BT).unflatten(-1, (self.n_heads, -1))
        k_BTGK = through(self.w_k, x_BTD, modality_BT).unflatten(-1, (self.kv_heads, -1))
        v_BTGK = self.v_norm(self.w_v(x_BTD).unflatten(-1, (self.kv_heads, -1)))
        tap("q_raw", q_BTHK.transpose(1, 2))
        tap("k_raw", k_BTGK.transpose(1, 2))

        q_BHTK = self._placed(q_BTHK, self.q_norm, rope, modality_BT).transpose(1, 2)
        k_BHTK = self._placed(k_BTGK, self.k_norm, rope, modality_BT).transpose(1, 2)
        v_BHTK = v_BTGK.transpose(1, 2)
        if self.backend != "flex" or tap is not no_tap:  # flex reads a shared head where it is
            k_BHTK, v_BHTK = self._shared(k_BHTK), self._shared(v_BHTK)
        tap("q", q_BHTK)
        tap("k", k_BHTK)
        tap("v", v_BHTK)

        out_BHTK, rows = attention(
            q_BHTK,
            k_BHTK,
            v_BHTK,
            mask,
            scale=self.scale,
            kind=self.kind,
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return self.w_o(out_BHTK.transpose(1, 2).flatten(2)), rows

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
