"""The early-fusion transformer: one decoder over text and image tokens of one joint vocabulary.

Shapes are in the names: B batch, T tokens, D model width, H heads, K head_dim, L layers, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import Attention, Observe, Rope, no_observer, output_init_scale, rope_tables, value_init_scale
from .backends import RowStats, allow_many_graphs, documents_of, mask_of
from .config import ModelConfig
from .linear import ByModality, init_weights, linear, through, untied
from .norms import LayerScale, ResidualGate, at_least_fp32, stream_norm
from .patch import named_function
from .ranges import default_of

# A function that a forward pass calls as `observer(site, layer, tensor)`, with the tensor itself, not a copy:
#
# | site              | shape            | tensor                                                      |
# | ----------------- | ---------------- | ----------------------------------------------------------- |
# | attn_in           | (B, T, D)        | input of W_q, W_k and W_v                                   |
# | q_raw, k_raw      | (B, H, T, K)     | before QK-Norm; k_raw has only the key heads                |
# | q, k, v           | (B, H, T, K)     | inputs of attention, before its scale; key and value heads  |
# |                   |                  | are repeated for every query head that shares them          |
# | gate              | (B, T, H, K or 1)| factor on the output of attention (`config.attn_gate`)      |
# | attn_out, mlp_out | (B, T, D)        | added to the residual stream, before dropout                |
# | resid             | (B, T, D)        | the residual stream after the layer                         |
# | final             | (B, T, D)        | output of the last layer, before the final norm; layer -1   |
# | logits            | (B, T, V)        | in at least fp32, before the final softcap; layer -1        |
Observer = Callable[[str, int, Tensor], None]


def modality_of_ids(ids_BT: Tensor, vocab_sizes: Mapping[str, int]) -> Tensor:
    """Return the modality number of each id: the index of its block of ids. The result is int64, (B, T)."""
    modality_BT = torch.zeros_like(ids_BT)
    start = 0
    for size in list(vocab_sizes.values())[:-1]:
        start += size
        modality_BT = modality_BT + (ids_BT >= start)
    return modality_BT


class MLP(nn.Module):
    """Position-wise feed-forward network without biases.

    SwiGLU is `w_down(silu(w_gate x) * w_up x)` (Shazeer 2020, arXiv 2002.05202, Eq. 6). GEGLU has the tanh
    approximation of GELU in place of silu (Gemma). GELU is `w_down(gelu(w_up x))` with the exact GELU.
    `mlp_norm` normalizes the input of w_down; `mlp_clamp` bounds `w_gate x` and `w_up x`.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        D, F_, scale = config.d_model, config.mlp_width, value_init_scale(config)
        self.kind = config.mlp
        self.w_gate = None if config.mlp == "gelu" else linear(config, D, F_, scale)
        self.w_up = linear(config, D, F_, scale)
        self.w_down = linear(config, F_, D, output_init_scale(config, layer))
        self.clamp = config.mlp_clamp
        self.norm = stream_norm(config, width=F_) if config.mlp_norm else nn.Identity()

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each position independently; the shape does not change."""
        up_BTF = self.w_up(x_BTD)
        if self.w_gate is None:
            return self.w_down(self.norm(F.gelu(up_BTF)))
        gate_BTF = self.w_gate(x_BTD)
        if self.clamp is not None:
            gate_BTF, up_BTF = gate_BTF.clamp(max=self.clamp), up_BTF.clamp(-self.clamp, self.clamp)
        gate_BTF = F.silu(gate_BTF) if self.kind == "swiglu" else F.gelu(gate_BTF, approximate="tanh")
        return self.w_down(self.norm(gate_BTF * up_BTF))


class Block(nn.Module):
    """One layer. Disabled modules are the identity; only `deep_norm` normalizes the residual stream itself.

    ```
    x ─┬───────────────────────────────────────────────────────────────────────────────────────────────────────(+) h
       └─ attn_pre_norm ─ input_scale ─ attention ─ attn_post_norm ─ attn_layer_scale ─ branch_scale ─ dropout ─┘
    h ─┬───────────────────────────────────────────────────────────────────────────────────────────────────────(+) out
       └─ mlp_pre_norm ─ input_scale ─ mlp ─ mlp_post_norm ─ mlp_layer_scale ─ branch_scale ─ dropout ──────────┘

    input_scale, branch_scale: factors of depth_scale norm and branch; 1 by default
    residual_gate: (+) is a gated sum
    pre_norm, post_norm = (on, off)  Llama, Chameleon-7B
                          (off, on)  Chameleon-34B, Swin, OLMo 2
                          (on, on)   sandwich, Peri-LN, Gemma 2
                          (off, off) deep_norm: x = attn_deep_norm(alpha x + branch), then mlp_deep_norm
    ```

    Attributes:
        run: `compute`, or its compiled version (`compile_blocks`). It is a function, not a submodule, so compiling
            does not affect parameter names, copies of the model or hooks on the block.
    """

    def __init__(self, config: ModelConfig, backend: str, layer: int = 0) -> None:
        super().__init__()
        D, separate = config.d_model, config.separates(layer)

        def norm(on: bool, gain_init: float = 1.0) -> nn.Module:
            if not on:
                return nn.Identity()
            return untied(lambda: stream_norm(config, gain_init), config, config.per_modality.norms or separate)

        def layer_scale() -> nn.Module:
            initial = config.layer_scale
            return nn.Identity() if initial is None else untied(lambda: LayerScale(D, initial), config, separate)

        def residual_gate() -> nn.Module | None:
            temperature = config.residual_gate
            return None if temperature is None else untied(lambda: ResidualGate(D, temperature), config, separate)

        self.attn_pre_norm, self.mlp_pre_norm = norm(config.pre_norm), norm(config.pre_norm)
        self.attn_post_norm = norm(config.post_norm, config.post_gain_init)
        self.mlp_post_norm = norm(config.post_norm, config.post_gain_init)
        self.attn_layer_scale, self.mlp_layer_scale = layer_scale(), layer_scale()
        self.attn_deep_norm, self.mlp_deep_norm = norm(config.deep_norm), norm(config.deep_norm)
        self.stream_scale = (2 * config.n_layers) ** 0.25 if config.deep_norm else None
        self.attention = Attention(config, backend, layer)
        self.mlp = untied(lambda: MLP(config, layer), config, config.per_modality.mlp or separate)
        self.dropout = nn.Dropout(config.residual_dropout)
        self.attn_residual_gate, self.mlp_residual_gate = residual_gate(), residual_gate()
        self.input_scale = (layer + 1) ** -0.5 if config.depth_scale == "norm" else None
        self.branch_scale = (2 * config.n_layers) ** -0.5 if config.depth_scale == "branch" else None
        self.run: Callable[..., tuple[Tensor, RowStats | None]] = Block.compute

    def forward(
        self, x_BTD: Tensor, rope: Rope, mask: Any, modality_BT: Tensor | None = None, observe: Observe = no_observer
    ) -> tuple[Tensor, RowStats | None]:
        """Return `x + dropout(scale(post(sublayer(pre(x)))))` for attention, then for the MLP.

        `residual_gate` replaces the sum; `deep_norm` scales `x` and normalizes the sum.

        Returns:
            x_BTD, and the `RowStats` of the attention or None.
        """
        run = self.run if observe is no_observer else Block.compute  # a compiled block cannot call an observer
        return run(self, x_BTD, rope, mask, modality_BT, observe)

    def compute(
        self, x_BTD: Tensor, rope: Rope, mask: Any, modality_BT: Tensor | None, observe: Observe
    ) -> tuple[Tensor, RowStats | None]:
        """Compute `forward` eagerly; `compile_blocks` compiles this function."""
        in_BTD = self._scaled(through(self.attn_pre_norm, x_BTD, modality_BT), self.input_scale)
        out_BTD, row_stats = self.attention(in_BTD, rope, mask, modality_BT, observe)
        out_BTD = through(self.attn_post_norm, out_BTD, modality_BT)
        out_BTD = through(self.attn_layer_scale, out_BTD, modality_BT)
        out_BTD = self._scaled(out_BTD, self.branch_scale)
        observe("attn_out", out_BTD)
        x_BTD = self._added(self.attn_residual_gate, x_BTD, out_BTD, modality_BT)
        x_BTD = through(self.attn_deep_norm, x_BTD, modality_BT)

        in_BTD = self._scaled(through(self.mlp_pre_norm, x_BTD, modality_BT), self.input_scale)
        out_BTD = through(self.mlp, in_BTD, modality_BT)
        out_BTD = through(self.mlp_post_norm, out_BTD, modality_BT)
        out_BTD = through(self.mlp_layer_scale, out_BTD, modality_BT)
        out_BTD = self._scaled(out_BTD, self.branch_scale)
        observe("mlp_out", out_BTD)
        x_BTD = self._added(self.mlp_residual_gate, x_BTD, out_BTD, modality_BT)
        x_BTD = through(self.mlp_deep_norm, x_BTD, modality_BT)
        observe("resid", x_BTD)
        return x_BTD, row_stats

    @staticmethod
    def _scaled(x_BTD: Tensor, scale: float | None) -> Tensor:
        return x_BTD if scale is None else scale * x_BTD

    def _added(self, gate: nn.Module | None, x_BTD: Tensor, out_BTD: Tensor, modality_BT: Tensor | None) -> Tensor:
        out_BTD = self.dropout(out_BTD)
        if gate is None:
            return self._scaled(x_BTD, self.stream_scale) + out_BTD
        return through(gate, x_BTD, modality_BT, out_BTD)


class Embedding(nn.Embedding):
    """The embedding matrix of the joint vocabulary.

    Attributes:
        row_scales: For each modality, (first row, row after the last, factor on the initial values).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.vocab_size, config.d_model)
        self.row_scales: list[tuple[int, int, float]] = []
        start = 0
        for name, size in config.vocab_sizes.items():
            self.row_scales.append((start, start + size, config.embed_init.get(name, 1.0)))
            start += size


def capped(logits_BTV: Tensor, softcap: float | None) -> Tensor:
    """Return `softcap * tanh(logits / softcap)` in fp32, or fp64 for fp64 logits (Gemma 2, arXiv 2408.00118)."""
    wide_BTV = at_least_fp32(logits_BTV)
    return wide_BTV if softcap is None else softcap * torch.tanh(wide_BTV / softcap)


class EarlyFusionTransformer(nn.Module):
    """A decoder that reads and predicts every modality from one vocabulary (Chameleon, arXiv 2405.09818).

    ```
    ids ── embed ── L blocks ── final_norm ── head ── final softcap ── logits
    ```

    Args:
        config: Shape and variant; `config.vocab_sizes` must be set.
        backend: Attention backend, one of `BACKENDS`.
        seed: Seed of the initial weights (`init_weights`).

    Attributes:
        activation_checkpointing: Whether the backward pass recomputes the activations of each block (Chen et al.
            2016, arXiv 1604.06174): a third more operations for a fraction of the memory.

    Raises:
        ValueError: `config.vocab_sizes` is empty, or the backend is unknown or cannot compute this attention.
    """

    def __init__(self, config: ModelConfig, backend: str = "math", seed: int = 0) -> None:
        super().__init__()
        if not config.vocab_sizes:
            raise ValueError("model.vocab_sizes is empty; give each modality's name and number of ids.")
        self.config, self.backend, self.activation_checkpointing = config, backend, False
        self.attn_scale_value = config.attn_scale_value
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, backend, layer) for layer in range(config.n_layers))
        self.final_norm = (
            nn.Identity()
            if config.deep_norm
            else untied(lambda: stream_norm(config), config, config.per_modality.norms)
        )
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.reads_modality = bool(config.embed_scale) or any(isinstance(m, ByModality) for m in self.modules())
        init_weights(self, seed)
        if config.patch:
            named_function(config.patch)(self)

    def forward(
        self,
        ids_BT: Tensor,
        modality_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
        observer: Observer | None = None,
        row_stats: list[RowStats] | None = None,
        output: Literal["logits", "raw_logits", "hidden"] = "logits",
    ) -> Tensor:
        """Return the logits of the next token at every position.

        Args:
            ids_BT: int64 ids of the joint vocabulary.
            modality_BT: Modality number of each id; None derives it from the id ranges. Used only with
                `config.per_modality`, separate layers or `config.embed_scale`; an unknown number counts as 0.
            document_BT: Document number of each token in packed rows; attention stays inside a document. None
                means one document per row.
            observer: See `Observer`.
            row_stats: Receives the `RowStats` of each layer, from the first to the last; stays empty with a backend
                that does not compute them.
            output: What to return. logits: after the final softcap. raw_logits: before the final softcap, so that a
                compiled loss can fuse cast and softcap. hidden: the output of the final norm, (B, T, D), for a loss
                in chunks; the head does not run.

        Returns:
            logits_BTV in fp32 (fp64 in an fp64 model), with and without autocast; raw_logits in the dtype of the
            head, or in at least fp32 with an observer.
        """
        c, T, device = self.config, ids_BT.shape[1], ids_BT.device
        if self.reads_modality and modality_BT is None:
            modality_BT = modality_of_ids(ids_BT, c.vocab_sizes)
        x_BTD = self._embedded(ids_BT, modality_BT)
        rope = rope_tables(T, c.head_dim, c.rope_theta, device, c.rope_scaling, heads=c.n_heads)
        theta = c.local_rope_theta
        local_rope = rope if theta is None else rope_tables(T, c.head_dim, theta, device, heads=c.n_heads)
        masks = {
            (window, apart): mask_of(self.backend, T, device, window, documents_of(c, apart, modality_BT, document_BT))
            for window, apart in {c.reach_of(layer) for layer in range(c.n_layers)}
        }
        drops = self.training and bool(c.residual_dropout or c.attn_dropout)
        # Recomputation would call an observer twice.
        recompute = self.activation_checkpointing and observer is None and torch.is_grad_enabled()
        for layer, block in enumerate(self.blocks):
            observe = no_observer if observer is None else partial(_at_layer, observer, layer)
            reach = c.reach_of(layer)
            inputs = (x_BTD, local_rope if reach[0] else rope, masks[reach], modality_BT, observe)
            run = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=drops) if recompute else block
            x_BTD, stats = run(*inputs)
            if row_stats is not None and stats is not None:
                row_stats.append(stats)
        if observer is not None:
            observer("final", -1, x_BTD)
        hidden_BTD = through(self.final_norm, x_BTD, modality_BT)
        if output == "hidden":
            return hidden_BTD
        logits_BTV = self.head(hidden_BTD)
        if observer is not None:
            logits_BTV = at_least_fp32(logits_BTV)
            observer("logits", -1, logits_BTV)
        return logits_BTV if output == "raw_logits" else capped(logits_BTV, c.final_softcap)

    def _embedded(self, ids_BT: Tensor, modality_BT: Tensor | None) -> Tensor:
        c, x_BTD = self.config, self.embed(ids_BT)
        if c.embed_norm:
            wide_BTD = at_least_fp32(x_BTD)
            x_BTD = (wide_BTD * torch.rsqrt(wide_BTD.square().mean(-1, keepdim=True) + c.norm_eps)).to(x_BTD.dtype)
        if c.embed_sqrt_d:
            x_BTD = x_BTD * c.d_model**0.5
        if c.embed_scale:
            assert modality_BT is not None
            known_BT = (modality_BT >= 0) & (modality_BT < len(c.vocab_sizes))
            modality_BT1 = modality_BT.where(known_BT, 0)[..., None]
            for m, name in enumerate(c.modalities):
                if name in c.embed_scale:
                    x_BTD = torch.where(modality_BT1 == m, c.embed_scale[name] * x_BTD, x_BTD)
        return x_BTD

    @contextmanager
    def use_backend(self, backend: str) -> Iterator[None]:
        """Use another attention backend inside the `with` block."""
        holders: list[Any] = [self, *(cast(Block, block).attention for block in self.blocks)]
        before = self.backend
        try:
            for holder in holders:
                holder.backend = backend
            yield
        finally:
            for holder in holders:
                holder.backend = before

    def extra_repr(self) -> str:
        """Return the fields of the configuration that differ from their defaults."""
        values = [(f, getattr(self.config, f.name)) for f in fields(self.config)]
        return ", ".join(f"{f.name}={value}" for f, value in values if value != default_of(f))


def _at_layer(observer: Observer, layer: int, site: str, tensor: Tensor) -> None:
    observer(site, layer, tensor)


def compile_blocks(model: EarlyFusionTransformer) -> None:
    """Compile the blocks, with one graph for equal blocks, and the final norm.

    Names of parameters and modules do not change. A graph break raises an error. Hooks on a block are called;
    hooks on its submodules are called only if they were registered before compilation. With an observer the blocks
    run eagerly.
    """
    allow_many_graphs()
    blocks = [cast(Block, block) for block in model.blocks]
    run = torch.compile(Block.compute, fullgraph=True, dynamic=False)
    for block in blocks:
        block.run = run
    model.final_norm.compile(fullgraph=True, dynamic=False)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside the context; restore each submodule's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:  # not train(): a module may override it, for example to merge its LoRA adapters
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
