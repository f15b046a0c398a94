"""The early-fusion transformer: one decoder over text and image tokens of one joint vocabulary.

Shapes are in the names: B batch, T tokens, D width, H heads, K head width, L layers, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import Attention, Tap, no_tap, output_init_scale
from .backends import Rows, mask_of
from .config import ModelConfig
from .init import init_weights
from .linear import ByModality, linear, through, untied
from .norms import LayerScale, at_least_fp32, stream_norm
from .rope import Rope, rope_tables

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

    SwiGLU is `w_down(silu(w_gate x) * w_up x)` (Shazeer 2020, arXiv 2002.05202, Eq. 6), GEGLU the same with the
    tanh approximation of GELU (Gemma), and GELU `w_down(gelu(w_up x))` with the exact Gaussian distribution function.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        D, F_ = config.d_model, config.mlp_width
        self.kind = config.mlp
        self.w_gate = None if config.mlp == "gelu" else linear(config, D, F_)
        self.w_up = linear(config, D, F_)
        self.w_down = linear(config, F_, D, output_init_scale(config, layer))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each position by itself; same shape."""
        up_BTF = self.w_up(x_BTD)
        if self.w_gate is None:
            return self.w_down(F.gelu(up_BTF))
        gate_BTF = self.w_gate(x_BTD)
        gate_BTF = F.silu(gate_BTF) if self.kind == "swiglu" else F.gelu(gate_BTF, approximate="tanh")
        return self.w_down(gate_BTF * up_BTF)


class Block(nn.Module):
    """One layer. What is switched off is the identity; the residual stream itself is never normalised.

    ```
    x ─┬─────────────────────────────────────────────────────────────────────────(+)── h
       └─ attn_pre_norm ─ attention ─ attn_post_norm ─ attn_layer_scale ─ dropout ─┘
    h ─┬─────────────────────────────────────────────────────────────────────────(+)── out
       └─ mlp_pre_norm ─ mlp ─ mlp_post_norm ─ mlp_layer_scale ─ dropout ──────────┘

    pre_norm, post_norm = (on, off)  Llama, Chameleon-7B
                          (off, on)  Chameleon-34B, Swin, OLMo 2
                          (on, on)   sandwich, Peri-LN, Gemma 2
    ```

    Attributes:
        run: `compute`, or what compiles it (`compile_blocks`): a plain function of the block, so that copies of the
            model, its parameters' names and hooks on the block are what they would be without.
    """

    def __init__(self, config: ModelConfig, backend: str, layer: int = 0) -> None:
        super().__init__()
        D, own = config.d_model, config.untie

        def norm(on: bool, gain_init: float = 1.0) -> nn.Module:
            return untied(lambda: stream_norm(config, gain_init), config, own.norms) if on else nn.Identity()

        def layer_scale() -> nn.Module:
            return nn.Identity() if config.layer_scale is None else LayerScale(D, config.layer_scale)

        self.attn_pre_norm, self.mlp_pre_norm = norm(config.pre_norm), norm(config.pre_norm)
        self.attn_post_norm = norm(config.post_norm, config.post_gain_init)
        self.mlp_post_norm = norm(config.post_norm, config.post_gain_init)
        self.attn_layer_scale, self.mlp_layer_scale = layer_scale(), layer_scale()
        self.attention = Attention(config, backend, layer)
        self.mlp = untied(lambda: MLP(config, layer), config, own.mlp)
        self.dropout = nn.Dropout(config.residual_dropout)
        self.run: Callable[..., tuple[Tensor, Rows | None]] = Block.compute

    def forward(
        self, x_BTD: Tensor, rope: Rope, mask: Any, modality_BT: Tensor | None = None, tap: Tap = no_tap
    ) -> tuple[Tensor, Rows | None]:
        """`x + dropout(scale(post(sublayer(pre(x)))))`, for attention and then for the MLP; and attention's rows."""
        run = self.run if tap is no_tap else Block.compute  # a compiled one shows nobody what is inside
        return run(self, x_BTD, rope, mask, modality_BT, tap)

    def compute(
        self, x_BTD: Tensor, rope: Rope, mask: Any, modality_BT: Tensor | None, tap: Tap
    ) -> tuple[Tensor, Rows | None]:
        """What `run` is, or what it is compiled from."""
        out_BTD, rows = self.attention(
            through(self.attn_pre_norm, x_BTD, modality_BT), rope, mask, modality_BT, tap
        )
        out_BTD = self.attn_layer_scale(through(self.attn_post_norm, out_BTD, modality_BT))
        tap("attn_out", out_BTD)
        x_BTD = x_BTD + self.dropout(out_BTD)

        out_BTD = through(self.mlp, through(self.mlp_pre_norm, x_BTD, modality_BT), modality_BT)
        out_BTD = self.mlp_layer_scale(through(self.mlp_post_norm, out_BTD, modality_BT))
        tap("mlp_out", out_BTD)
        x_BTD = x_BTD + self.dropout(out_BTD)
        tap("resid", x_BTD)
        return x_BTD, rows


class Embedding(nn.Embedding):
    """Rows of the joint vocabulary.

    Attributes:
        row_scales: (first row, end, factor on their initial values) by modality.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.vocab_size, config.d_model)
        self.row_scales: list[tuple[int, int, float]] = []
        start = 0
        for name, size in config.blocks.items():
            self.row_scales.append((start, start + size, config.embed_init.get(name, 1.0)))
            start += size


def capped(logits_BTV: Tensor, softcap: float | None) -> Tensor:
    """Logits in fp32 (fp64 in fp64), and `softcap * tanh(logit / softcap)` of them (Gemma 2, arXiv 2408.00118)."""
    wide_BTV = at_least_fp32(logits_BTV)
    return wide_BTV if softcap is None else softcap * torch.tanh(wide_BTV / softcap)


class EarlyFusionTransformer(nn.Module):
    """A decoder that reads and predicts every modality from one vocabulary (Chameleon, arXiv 2405.09818).

    ```
    ids ── embed ── L blocks ── final_norm ── head ── final softcap ── logits
    ```

    Args:
        config: Shape and variant; `config.blocks` must be filled.
        backend: Attention backend, one of `BACKENDS`.
        seed: Seed of the initial weights (`init_weights`).

    Attributes:
        recompute: Whether a block forgets its activations and computes them again in the backward pass (activation
            checkpointing; Chen et al. 2016, arXiv 1604.06174): a third more operations for a fraction of the memory.

    Raises:
        ValueError: empty `config.blocks`, unknown backend, or a backend that cannot compute this attention.
    """

    def __init__(self, config: ModelConfig, backend: str = "math", seed: int = 0) -> None:
        super().__init__()
        if not config.blocks:
            raise ValueError("model.blocks is empty; give each modality's name and number of ids.")
        self.config, self.backend, self.recompute = config, backend, False
        self.attn_scale_value = config.attn_scale_value
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, backend, layer) for layer in range(config.n_layers))
        self.final_norm = untied(lambda: stream_norm(config), config, config.untie.norms)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.reads_modality = bool(config.embed_scale) or any(
            isinstance(m, ByModality) for m in self.modules()
        )
        init_weights(self, seed)

    def forward(
        self,
        ids_BT: Tensor,
        modality_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
        sink: Sink | None = None,
        head: bool = True,
        rows: list[Rows] | None = None,
        raw: bool = False,
    ) -> Tensor:
        """Logits of the next token at every position.

        Args:
            ids_BT: int64 ids of the joint vocabulary.
            modality_BT: Modality number of each id; None takes it from the block ranges. It matters only where
                `config.untie` or `config.embed_scale` sets modalities apart; a number that none has counts as 0.
            document_BT: Document number of each token where several are packed in a row; attention stays
                inside a document. None is one document a row.
            sink: Called as `sink(site, layer, tensor)` while the forward runs, with the tensors themselves.
                Per layer, (B, H, T, K): q_raw and k_raw before QK-Norm (k_raw with the heads of the keys); q
                and k as they enter the dot product, before its scale, and v, a shared head once for every query
                head. Per layer, (B, T, D): attn_in, what W_q, W_k and W_v are applied to; attn_out and mlp_out as
                added to the residual stream, before dropout; resid, the stream after the layer. With layer -1: final
                (B, T, D), the last layer's output before the final norm; logits (B, T, V), before the final
                softcap.
            head: False stops before the head, for a loss that applies head and softcap itself.
            rows: Gets what each layer's attention knows of its rows, from the first layer to the last; nothing from a
                backend that does not know.
            raw: Logits as the head gives them, for a loss that applies precision and softcap in passes of its own.

        Returns:
            logits_BTV in fp32 (fp64 in an fp64 model), whatever autocast makes of the head. Without the head, the
            output of the final norm, (B, T, D); no site logits then.
        """
        c, T, device = self.config, ids_BT.shape[1], ids_BT.device
        if self.reads_modality:
            modality_BT = modality_of_ids(ids_BT, c.blocks) if modality_BT is None else modality_BT
        x_BTD = self.embed(ids_BT)
        if c.embed_sqrt_d:
            x_BTD = x_BTD * c.d_model**0.5
        if c.embed_scale:
            assert modality_BT is not None
            of_token_BT1 = modality_BT.where((modality_BT >= 0) & (modality_BT < len(c.blocks)), 0)[..., None]
            for m, name in enumerate(c.modalities):
                if name in c.embed_scale:
                    x_BTD = torch.where(of_token_BT1 == m, c.embed_scale[name] * x_BTD, x_BTD)
        rope = rope_tables(T, c.head_dim, c.rope_theta, device, c.rope_scaling, heads=c.n_heads)
        theta = c.local_rope_theta
        local_rope = rope if theta is None else rope_tables(T, c.head_dim, theta, device, heads=c.n_heads)
        masks = {
            window: mask_of(self.backend, T, device, window, document_BT)
            for window in {c.window_of(layer) for layer in range(c.n_layers)}
        }
        again = self.recompute and sink is None and torch.is_grad_enabled()  # a sink would see everything twice
        for layer, block in enumerate(self.blocks):
            tap = no_tap if sink is None else partial(_at_layer, sink, layer)
            window = c.window_of(layer)
            inputs = (x_BTD, local_rope if window else rope, masks[window], modality_BT, tap)
            x_BTD, found = self._checkpointed(block, inputs) if again else block(*inputs)
            if rows is not None and found is not None:
                rows.append(found)
        if sink is not None:
            sink("final", -1, x_BTD)
        hidden_BTD = through(self.final_norm, x_BTD, modality_BT)
        if not head:
            return hidden_BTD
        logits_BTV = self.head(hidden_BTD)
        if sink is not None:
            logits_BTV = at_least_fp32(logits_BTV)
            sink("logits", -1, logits_BTV)
        return logits_BTV if raw else capped(logits_BTV, c.final_softcap)

    @contextmanager
    def use_backend(self, backend: str) -> Iterator[None]:
        """Attention by another backend, for as long as this lasts."""
        holders: list[Any] = [self, *(cast(Block, block).attention for block in self.blocks)]
        before = self.backend
        try:
            for holder in holders:
                holder.backend = backend
            yield
        finally:
            for holder in holders:
                holder.backend = before

    def _checkpointed(self, block: nn.Module, inputs: tuple[Any, ...]) -> Any:
        drops = self.training and (self.config.residual_dropout or self.config.attn_dropout)
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=bool(drops))

    def extra_repr(self) -> str:
        """The variant: every field that is not at its default."""
        said = [
            f"{f.name}={getattr(self.config, f.name)}"
            for f in fields(self.config)
            if getattr(self.config, f.name) != getattr(_PLAIN, f.name)
        ]
        return ", ".join(said)


_PLAIN = ModelConfig()


def _at_layer(sink: Sink, layer: int, site: str, tensor: Tensor) -> None:
    sink(site, layer, tensor)
