"""The early-fusion transformer: one decoder over text and image tokens of one joint vocabulary.

Shapes are in the names: B batch, T tokens, D width, H heads, K head width, L layers, V vocabulary.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, Tap, no_tap, rope_tables
from .config import ModelConfig
from .init import init_weights
from .norms import RMSNorm, at_least_fp32

Sink = Callable[[str, int, Tensor], None]  # receives (site, layer, tensor) while a forward runs


def modality_of_ids(ids_BT: Tensor, blocks: Mapping[str, int]) -> Tensor:
    """The modality number of each id: the place of the block it falls in. Same shape as `ids_BT`, int64."""
    modality_BT = torch.zeros_like(ids_BT)
    start = 0
    for size in list(blocks.values())[:-1]:
        start += size
        modality_BT = modality_BT + (ids_BT >= start)
    return modality_BT


class MLP(nn.Module):
    """Position-wise feed-forward without biases.

    SwiGLU is `w_down(silu(w_gate x) * w_up x)` (Shazeer 2020, arXiv 2002.05202, Eq. 6), and GELU is
    `w_down(gelu(w_up x))` with the exact Gaussian distribution function.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, F_ = config.d_model, config.mlp_width
        self.w_gate = nn.Linear(D, F_, bias=False) if config.mlp == "swiglu" else None
        self.w_up = nn.Linear(D, F_, bias=False)
        self.w_down = nn.Linear(F_, D, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each position by itself; same shape."""
        up_BTF = self.w_up(x_BTD)
        hidden_BTF = F.gelu(up_BTF) if self.w_gate is None else F.silu(self.w_gate(x_BTD)) * up_BTF
        return self.w_down(hidden_BTF)


class Block(nn.Module):
    """One layer. A norm that is switched off is the identity; the residual stream itself is never normalised.

    ```
    x ─┬───────────────────────────────────────────────────────(+)── h
       └─ attn_pre_norm ─ attention ─ attn_post_norm ─ dropout ─┘
    h ─┬───────────────────────────────────────────────(+)── out
       └─ mlp_pre_norm ─ mlp ─ mlp_post_norm ─ dropout ─┘

    pre_norm, post_norm = (on, off)  Llama, Chameleon-7B
                          (off, on)  Chameleon-34B, Swin, OLMo 2
                          (on, on)   sandwich, Peri-LN, Gemma 2
    ```
    """

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()

        def norm(on: bool) -> nn.Module:
            return RMSNorm(config.d_model, config.norm_eps) if on else nn.Identity()

        self.attn_pre_norm, self.attn_post_norm = norm(config.pre_norm), norm(config.post_norm)
        self.mlp_pre_norm, self.mlp_post_norm = norm(config.pre_norm), norm(config.post_norm)
        self.attention = Attention(config, backend)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], document_BT: Tensor | None = None, tap: Tap = no_tap
    ) -> Tensor:
        """`x + dropout(post(sublayer(pre(x))))`, for attention and then for the MLP."""
        attn_out_BTD = self.attn_post_norm(self.attention(self.attn_pre_norm(x_BTD), rope, document_BT, tap))
        tap("attn_out", attn_out_BTD)
        x_BTD = x_BTD + self.dropout(attn_out_BTD)

        mlp_out_BTD = self.mlp_post_norm(self.mlp(self.mlp_pre_norm(x_BTD)))
        tap("mlp_out", mlp_out_BTD)
        x_BTD = x_BTD + self.dropout(mlp_out_BTD)
        tap("resid", x_BTD)
        return x_BTD


class EarlyFusionTransformer(nn.Module):
    """A decoder that reads and predicts every modality from one vocabulary (Chameleon, arXiv 2405.09818).

    ```
    ids ── embed ── L blocks ── final_norm ── head ── final softcap ── logits
    ```

    Args:
        config: Shape and variant; `config.blocks` must be filled.
        backend: Attention backend, math or sdpa.
        seed: Seed of the initial weights (`init_weights`).

    Raises:
        ValueError: empty `config.blocks`, unknown backend, or a backend that cannot apply `attn_softcap`.
    """

    def __init__(self, config: ModelConfig, backend: str = "math", seed: int = 0) -> None:
        super().__init__()
        if not config.blocks:
            raise ValueError("model.blocks is empty; give each modality's name and number of ids.")
        self.config = config
        self.attn_scale_value = config.attn_scale_value
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.n_layers))
        self.final_norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        init_weights(self, seed)

    def forward(
        self,
        ids_BT: Tensor,
        modality_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
        sink: Sink | None = None,
    ) -> Tensor:
        """Logits of the next token at every position.

        Args:
            ids_BT: int64 ids of the joint vocabulary.
            modality_BT: Modality number of each id; None takes it from the block ranges. No parameter here is
                particular to a modality, so it does not change the logits.
            document_BT: Document number of each token where several are packed in a row; attention stays
                inside a document. None is one document a row.
            sink: Called as `sink(site, layer, tensor)` while the forward runs, with the tensors themselves.
                Per layer, (B, H, T, K): q_raw and k_raw before QK-Norm; q and k as they enter the dot
                product, before its scale; v. Per layer, (B, T, D): attn_out and mlp_out as added to the
                residual stream, before dropout; resid, the stream after the layer. With layer -1: final
                (B, T, D), the last layer's output before the final norm; logits (B, T, V), before the final
                softcap.

        Returns:
            logits_BTV in fp32 (fp64 in an fp64 model), whatever autocast makes of the head.
        """
        x_BTD = self.embed(ids_BT)
        rope = rope_tables(ids_BT.shape[1], self.config.head_dim, self.config.rope_theta, ids_BT.device)
        for layer, block in enumerate(self.blocks):
            tap = no_tap if sink is None else partial(_at_layer, sink, layer)
            x_BTD = block(x_BTD, rope, document_BT, tap)
        logits_BTV = at_least_fp32(self.head(self.final_norm(x_BTD)))
        if sink is not None:
            sink("final", -1, x_BTD)
            sink("logits", -1, logits_BTV)
        cap = self.config.final_softcap
        return logits_BTV if cap is None else cap * torch.tanh(logits_BTV / cap)

    def extra_repr(self) -> str:
        """The variant: what distinguishes this model from another of the same size."""
        c = self.config
        return (
            f"pre_norm={c.pre_norm}, post_norm={c.post_norm}, qk_norm={c.qk_norm.kind}, mlp={c.mlp}, "
            f"attn_scale={c.attn_scale}, attn_softcap={c.attn_softcap}, final_softcap={c.final_softcap}, "
            f"residual_dropout={c.residual_dropout}, blocks={c.blocks}"
        )


def _at_layer(sink: Sink, layer: int, site: str, tensor: Tensor) -> None:
    sink(site, layer, tensor)
