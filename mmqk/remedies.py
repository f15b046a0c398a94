"""Every published remedy as data: the fields that switch it on, its formula and its source.

``python -m mmqk.remedies`` prints all remedies with their flags. docs/remedies.md adds the cost of each remedy and
the implementation that it was compared with. Nothing here imports torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmqk.lab.grid.language import flags
from mmqk.store import OneSentenceParser, run_main

# The marks after the sources. A mark states how the source was read.
MARKS = {
    "V": "its text or code was read",
    "S": "a detailed secondary source was read, not the paper itself",
    "A": "only its abstract was read",
    "M": "from memory, not checked",
}
# What a remedy can act on. A bound on the logits of one softmax does not affect the other softmax.
LOGITS = "logits of the attention softmax"
OUTPUT = "logits of the output softmax"
STREAM = "residual stream: the input or output of a sublayer"
QK = "queries and keys, and with them the logits of the attention softmax"


@dataclass(frozen=True)
class Remedy:
    """One remedy, and the fields that switch it on.

    Attributes:
        key: Its name in the code and the tests.
        title: A short description.
        settings: Dotted fields of a run that switch the remedy on. The numbers are those of the source or have
            the same order of magnitude: choose your own.
        formula: Formula in the symbols of the code.
        source: Paper, arXiv number, equation or section, and how it was read (`MARKS`).
        acts_on: The softmax, the matrices or the part of the residual stream that it changes.
        cost: The cost besides parameters and matrix products: passes over tensors, state, a lost fused kernel.
        group: Its section in docs/remedies.md.
        purpose: What it is for, in one line.
    """

    key: str
    title: str
    settings: Mapping[str, Any]
    formula: str
    source: str
    acts_on: str
    cost: str = ""
    group: str = ""
    purpose: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags for ``python -m mmqk.train --config ...``."""
        return flags(self.settings)


_NORM_PASSES = "a norm of q and a norm of k in every layer"
_NO_KERNEL = "no fused kernel: backend math"
# fmt: off
_GROUPS: dict[str, tuple[Remedy, ...]] = {
    "scaled dot product": (
        Remedy("attn_scale_inverse", "scale 1 / head_dim", {"model.attn_scale": "inverse"},
            "logit = q·k / head_dim, instead of q·k / √head_dim",
            "μP, arXiv 2203.03466 [M]; the control is Vaswani et al. 2017, arXiv 1706.03762, Eq. 1 [M]",
            LOGITS, "none"),
        Remedy("attn_scale_none", "no scale", {"model.attn_scale": "none"}, "logit = q·k",
            "Vaswani et al. 2017, section 3.2.1, who argue against it [M]", LOGITS, "none"),
    ),
    "QK-Norm": (
        Remedy("qk_norm_rms", "RMS by head", {"model.qk_norm.kind": "rms"},
            "q ← gain · q / √(mean(q²) + eps), mean over head_dim, one gain for all heads; k likewise",
            "Qwen3, arXiv 2505.09388 [S]", QK, _NORM_PASSES),
        Remedy("qk_norm_layer", "LayerNorm by head", {"model.qk_norm.kind": "layer"},
            "q ← gain · (q − mean(q)) / √(var(q) + eps), over head_dim; k likewise",
            "Wortsman et al. 2023, arXiv 2309.14322 [V]; ViT-22B, arXiv 2302.05442 (sources differ on the axis) [S]",
            QK, _NORM_PASSES),
        Remedy("qk_norm_layer_bias", "LayerNorm by head, with bias",
            {"model.qk_norm.kind": "layer", "model.qk_norm.bias": True},
            "q ← gain · (q − mean(q)) / √(var(q) + eps) + bias, over head_dim; k likewise",
            "Chameleon, arXiv 2405.09818, section 2.3, and its released code [V]", QK, _NORM_PASSES),
        Remedy("qk_norm_l2", "cosine attention, one learned scale per layer", {"model.qk_norm.kind": "l2"},
            "logit = scale · q·k / (max(|q|, eps) · max(|k|, eps)), without 1 / √head_dim",
            "Henry et al. 2020, arXiv 2010.04245 [S]", QK, _NORM_PASSES),
        Remedy("qk_norm_l2_per_head", "cosine attention, a learned scale per head",
            {"model.qk_norm.kind": "l2", "model.qk_norm.gain": "per_head"},
            "logit = scale_h · q·k / (max(|q|, eps) · max(|k|, eps)) in head h",
            "a variant of Henry et al. 2020, arXiv 2010.04245 [S]", QK, _NORM_PASSES),
        Remedy("qk_norm_cosine", "cosine attention, clamped scale per head",
            {"model.qk_norm.kind": "l2", "model.qk_norm.gain": "per_head", "model.qk_norm.scale_max": 100.0},
            "logit = exp(min(s_h, log scale_max)) · q·k / (max(|q|, eps) · max(|k|, eps)), s_h learned",
            "Swin V2, arXiv 2111.09883: temperature above 0.01 [V]", QK, _NORM_PASSES),
        Remedy("qk_norm_full", "RMS over the full width",
            {"model.qk_norm.kind": "rms", "model.qk_norm.scope": "full", "model.qk_norm.gain": "per_head"},
            "q ← gain · q / √(mean(q²) + eps), mean over all heads together; k likewise",
            "OLMo 2, arXiv 2501.00656 [S], and its code in transformers [V]", QK, _NORM_PASSES),
        Remedy("qk_norm_no_gain", "RMS without gain",
            {"model.qk_norm.kind": "rms", "model.qk_norm.gain": "none"},
            "q ← q / √(mean(q²) + eps), so |logit| ≤ √head_dim; k likewise",
            "nanochat and Llama 4, both after RoPE; without a gain the order does not matter [V]",
            QK, _NORM_PASSES),
        Remedy("qk_norm_rms_per_head", "RMS by head, a gain per head",
            {"model.qk_norm.kind": "rms", "model.qk_norm.gain": "per_head"},
            "q ← gain_h · q / √(mean(q²) + eps) in head h, over head_dim; k likewise",
            "x-transformers, qk_rmsnorm [V]", QK, _NORM_PASSES),
        Remedy("qk_norm_per_head", "LayerNorm by head, a gain and a bias per head",
            {"model.qk_norm.kind": "layer", "model.qk_norm.bias": True, "model.qk_norm.gain": "per_head"},
            "q ← gain_h · (q − mean(q)) / √(var(q) + eps) + bias_h in head h, over head_dim; k likewise",
            "Chameleon in transformers, Cohere (without bias) [V]", QK, _NORM_PASSES),
        Remedy("qk_norm_zero_centered", "RMS by head, gain 1 + w",
            {"model.qk_norm.kind": "rms", "model.qk_norm.gain": "zero_centered"},
            "q ← (1 + w) · q / √(mean(q²) + eps), w initially 0; k likewise",
            "Gemma 3, arXiv 2503.19786 [S]; Qwen3-Next, which decays w (optim.decay_gains) [S]", QK,
            _NORM_PASSES),
        Remedy("qk_norm_after_rope", "RMS by head, after RoPE",
            {"model.qk_norm.kind": "rms", "model.qk_norm.place": "after_rope"},
            "q ← gain · rope(q) / √(mean(q²) + eps); only the position of the gain differs from the norm before RoPE",
            "Llama 4 and nanochat place it there [V]", QK, _NORM_PASSES),
        Remedy("qkv_norm", "RMS by head, values too",
            {"model.qk_norm.kind": "rms", "model.qk_norm.normalize_v": True},
            "v ← gain · v / √(mean(v²) + eps); q and k likewise",
            "QKV-Norm, Rybakov et al. 2024, arXiv 2410.16682 [S], who also remove the pre-norm",
            "queries and keys (attention softmax), and the values",
            "a norm of q, of k and of v in every layer"),
    ),
    "norm placement": (
        Remedy("post_norm", "post-norm only", {"model.pre_norm": False, "model.post_norm": True},
            "x ← x + norm(sublayer(x)), instead of x + sublayer(norm(x))",
            "Chameleon-34B, arXiv 2405.09818, section 2.3 [V]; Swin V2, arXiv 2111.09883 [V];"
            " OLMo 2, arXiv 2501.00656 [S]", STREAM, "none: the norms are moved"),
        Remedy("sandwich", "pre-norm and post-norm", {"model.pre_norm": True, "model.post_norm": True},
            "x ← x + norm(sublayer(norm(x)))", "Gemma 2, arXiv 2408.00118 [S]; Peri-LN, arXiv 2502.02732 [S]",
            STREAM, "two additional norms in every layer"),
        Remedy("deep_norm", "DeepNorm", {"model.deep_norm": True, "model.pre_norm": False},
            "x ← norm(α x + sublayer(x)), α = (2 n_layers)^¼, no final norm; W_v, W_o and the MLP's matrices"
            " initially times (8 n_layers)^−¼",
            "DeepNet, arXiv 2203.00555, Fig. 2 [M]; torchscale's decoder [V]",
            "residual stream, whose norm depends on the gains alone; initial W_v, W_o and matrices of the MLP",
            "a product, twice in every layer; the norms are moved"),
        Remedy("post_gain_zero", "post-norm, gains initially 0",
            {"model.pre_norm": False, "model.post_norm": True, "model.post_gain_init": 0.0},
            "x ← x + gain · normalized(sublayer(x)), gain initially 0, so every branch initially adds 0",
            "Swin V2 in timm [S]", STREAM, "none: the norms are moved"),
        Remedy("layer_norm", "LayerNorm with bias", {"model.norm": "layer", "model.norm_bias": True},
            "norm(x) = gain · (x − mean(x)) / √(var(x) + eps) + bias, instead of RMSNorm",
            "Ba et al. 2016, arXiv 1607.06450, Eq. 4 [M]; used by Swin V2 and ViT",
            STREAM + ", and the input of the head", "an additional mean and bias in every norm"),
    ),
    "capping": (
        Remedy("attn_softcap", "attention softcap", {"model.attn_softcap": 50.0, "backend": "math"},
            "logit ← cap · tanh(logit / cap), before the mask; q·k itself can keep growing",
            "Gemma 2, arXiv 2408.00118 [S]", LOGITS, "a tanh of every logit; fused by flex on a GPU only"),
        Remedy("final_softcap", "final softcap", {"model.final_softcap": 30.0},
            "logit ← cap · tanh(logit / cap)", "Gemma 2, arXiv 2408.00118 [S]", OUTPUT,
            "a tanh of every output logit"),
    ),
    "QK-Clip": (
        Remedy("qk_clip", "QK-Clip", {"optim.qk_clip": 100.0},
            "after the update, in head h: W_q, W_k ← √gamma · W_q, W_k; gamma = min(1, tau / max logit_h);"
            " where heads share keys, W_q ← gamma · W_q",
            "Kimi K2, arXiv 2507.20534: tau 100 [S]",
            "rows of W_q and W_k, so the logits of the attention softmax",
            "a maximum over all logits in every step"),
    ),
    "weight reparameterization": (
        Remedy("sigma_reparam", "σReparam", {"model.weight_reparam": "sigma"},
            "W ← gamma / sigma(W) · W, gamma learned, initially sigma(W); sigma(W) = uᵀWv in fp32, exact at the"
            " start, then 10 power iterations per update (the source: 1)",
            "Zhai et al. 2023, arXiv 2303.06296 [S], and the authors' PyTorch code [V]",
            "all matrices of the blocks, but not the embedding and the head",
            "two passes over every matrix in the forward pass; u and v as state"),
    ),
    "attention function": (
        Remedy("sigmoid_attention", "sigmoid attention", {"model.attention": "sigmoid", "backend": "math"},
            "weight = sigmoid(logit − log T) for each key, T the number of tokens of the row, with padding",
            "Ramapuram et al. 2024, arXiv 2409.04431 [S]",
            "the attention softmax, which it replaces", _NO_KERNEL),
    ),
    "attention output": (
        Remedy("attn_gate_element", "output gate by channel", {"model.attn_gate": "element"},
            "out = W_o (sigmoid(W_g x) · attention(x)), a gate for every channel of every head",
            "Qwen3-Next and Muse Glimmer in transformers [V]; arXiv 2505.06708 [S]",
            "the output of attention; a head can output zero even if all its logits are small",
            "W_g: a matrix like W_q"),
        Remedy("attn_gate_head", "output gate by head", {"model.attn_gate": "head"},
            "out = W_o (sigmoid(W_g x)_h · attention(x)_h), one gate for every head",
            "arXiv 2505.06708 [S]; x-transformers [V]",
            "the output of attention; a head can output zero even if all its logits are small", "W_g: n_heads rows"),
        Remedy("attn_sink", "learned sink", {"model.attn_sink": True, "backend": "math"},
            "weight = exp(logit) / (exp(s_h) + Σ exp(logit)), s_h learned by head, initially 0",
            "gpt-oss in transformers [V]", "the attention softmax, which is then no longer shift-invariant",
            _NO_KERNEL),
        Remedy("head_scale", "scaled heads", {"model.head_scale": True},
            "out = W_o (s_h · attention(x)_h), s_h learned, initially 1",
            "NormFormer, arXiv 2110.09456 [M]; x-transformers [V]", "the output of attention", "a product by head"),
    ),
    "MLP": (
        Remedy("mlp_clamp", "clamped SwiGLU", {"model.mlp_clamp": 7.0},
            "W_down (silu(min(W_gate x, c)) · clamp(W_up x, −c, c))", "gpt-oss in transformers: 7 [V]",
            "the factors of SwiGLU", "two clamps in every layer"),
        Remedy("mlp_norm", "norm inside the MLP", {"model.mlp_norm": True},
            "W_down norm(silu(W_gate x) · W_up x)", "NormFormer, arXiv 2110.09456 [M]; x-transformers [V]",
            "the input of W_down", "a norm of width d_ff in every layer"),
    ),
    "regularizers": (
        Remedy("z_loss", "final z-loss", {"loss.z_loss": 1e-4},
            "loss + z_loss · log² Z, Z = Σ exp(logit) over the vocabulary, at every trained target",
            "PaLM, arXiv 2204.02311 [S], and Wortsman et al. 2023, arXiv 2309.14322: 1e-4 [V];"
            " Chameleon, arXiv 2405.09818: 1e-5 [V]", OUTPUT + "; not the attention softmax",
            "the gradient of log Z"),
        Remedy("residual_dropout", "residual dropout", {"model.residual_dropout": 0.1},
            "x ← x + dropout(sublayer(norm(x)))", "Chameleon-7B, arXiv 2405.09818, section 2.3: 0.1 [V]",
            "the output of a sublayer; no softmax", "two masks in every layer"),
        Remedy("attn_dropout", "attention dropout", {"model.attn_dropout": 0.1}, "out = dropout(weights) v",
            "attention_dropout of Chameleon in transformers [V]", "weights after the attention softmax",
            "a mask over all weights, T² per head"),
    ),
    "residual branch": (
        Remedy("layer_scale", "LayerScale", {"model.layer_scale": 0.1},
            "x ← x + scale · sublayer(norm(x)), scale learned by channel, here initially 0.1",
            "CaiT, Touvron et al. 2021, arXiv 2103.17239, section 2 [M]",
            "the output of a sublayer", "a product by channel, twice in every layer"),
        Remedy("residual_gate", "gated residual sum", {"model.residual_gate": 0.3},
            "x ← √(1 − b²) · x + b · sublayer(norm(x)), b = sigmoid(w / T) by channel, w initially 0, T = 0.3",
            "Muse Spark in transformers [V]",
            "the residual stream, which does not grow if x and branch have equal norms",
            "two products by channel, twice in every layer"),
        Remedy("depth_scale_norm", "pre-norms / √(layer + 1)", {"model.depth_scale": "norm"},
            "x ← x + sublayer(norm(x) / √(layer + 1)), layer from 0",
            "LayerNorm Scaling, arXiv 2502.05795 [S]; OLMo-core [S]", "the input of a sublayer",
            "a product, twice in every layer"),
        Remedy("depth_scale_branch", "branches / √(2 n_layers)", {"model.depth_scale": "branch"},
            "x ← x + sublayer(norm(x)) / √(2 n_layers), in every forward pass",
            "residual_multiplier of Granite in transformers [V]; this value is ours", "the output of a sublayer",
            "a product, twice in every layer"),
        Remedy("output_init_total", "output matrices / √(2 n_layers)", {"model.output_init": "total"},
            "initial std of W_o and W_down, divided by √(2 n_layers)",
            "GPT-2 [M]; Spike No More, arXiv 2312.16903 [S]", "initial W_o and W_down", "none"),
        Remedy("output_init_depth", "output matrices / √(2 (layer + 1))", {"model.output_init": "depth"},
            "initial std of W_o and W_down, divided by √(2 (layer + 1))", "OLMo-core, DCLM [M]",
            "initial W_o and W_down", "none"),
    ),
    "optimizer side": (
        Remedy("decay_independent", "independent weight decay",
            {"optim.decay_mode": "independent", "optim.weight_decay": 1e-4},
            "W ← W − s_t · weight_decay · W with s_t = lr_t / lr, instead of lr_t · weight_decay",
            "Wortsman et al. 2023, arXiv 2309.14322, section 3.2.2: 1e-4 [V]",
            "parameters with weight decay: matrices and embeddings", "none"),
        Remedy("adam_eps", "Adam's epsilon", {"optim.eps": 1e-15}, "W ← W − lr · m / (√v + eps)",
            "Wortsman et al. 2023, arXiv 2309.14322, Fig. 11 to 13: 1e-15 [V]; OLMo 2: 1e-8 instead of 1e-5 [S];"
            " Chameleon: 1e-5 [V]", "updates of all parameters", "none"),
        Remedy("beta2", "β2", {"optim.beta2": 0.999}, "v ← β2 · v + (1 − β2) · g²",
            "0.95, as in the control: Chameleon, Wortsman et al. [V]; 0.999: Adam, arXiv 1412.6980 [M]",
            "updates of all parameters", "none"),
        Remedy("warmup", "longer warm-up", {"optim.warmup_steps": 200},
            "lr_t = lr · (t + 1) / warmup_steps during warm-up",
            "Wortsman et al. 2023, arXiv 2309.14322 [V]", "updates of all parameters", "none"),
        Remedy("decay_gains", "weight decay on gains", {"optim.decay_gains": True},
            "weight decay on gains, biases and scales too; with gain 1 + w, on w",
            "Qwen3-Next, with zero-centered gains [S]",
            "gains; with QK-Norm also the bound of the attention logits", "none"),
        Remedy("no_decay_embeddings", "no weight decay on embeddings", {"optim.decay_embeddings": False},
            "no weight decay on the embedding matrix", "OLMo 2, arXiv 2501.00656 [S]", "embedding matrix",
            "none"),
        Remedy("muon", "Muon for the matrices of the blocks", {"optim.matrices": "muon"},
            "W ← W − 0.2 lr √max(A, B) · orthogonalized(momentum), W of shape (A, B); all others: AdamW",
            "Kimi K2, arXiv 2507.20534 (with QK-Clip: MuonClip) [S]; torch.optim.Muon [V]",
            "updates of the matrices of the blocks", "five products of square matrices per matrix and step"),
        Remedy("adamh", "fixed-norm matrices (AdamH)", {"optim.matrices": "adamh"},
            "W' = W − lr |W| u / |u|, W ← W' |W| / |W'|, u Adam's update; no weight decay",
            "AdamH in Levanter [S]", "the matrices of the blocks, whose Frobenius norms never change",
            "three norms of every matrix"),
        Remedy("update_clip", "update clipping (StableAdamW)", {"optim.update_clip": True},
            "lr ← lr / max(1, √mean(g² / max(v, eps²))) for each tensor", "arXiv 2304.13013, Alg. 2 [S]",
            "updates of all parameters", "a pass over every gradient; no fused optimizer"),
        Remedy("adagc", "gradient clipping by tensor (AdaGC)", {"optim.adagc": 1.05},
            "g ← g min(1, 1.05 γ / |g|), γ ← 0.98 γ + 0.02 |g| for each tensor, after the warm-up",
            "AdaGC, arXiv 2502.11034 [S]", "gradients of all parameters", "a norm of every gradient"),
        Remedy("skip_step", "skipped steps", {"optim.skip_step": 6.0},
            "no update where the loss or |g| is more than 6 standard deviations above the mean of the last 128 steps",
            "SkipStep in OLMo-core [S]", "whole updates", "none"),
        Remedy("msign", "orthogonalized attention matrices (MSign)", {"optim.msign_every": 100},
            "every 100 steps W ← U Vᵀ |W| / |U Vᵀ|, W = U S Vᵀ, for W_q, W_k, W_v and W_o",
            "MSign, arXiv 2602.01734 [V]", "singular values of W_q, W_k, W_v and W_o",
            "a singular value decomposition of every matrix, every 100 steps"),
        Remedy("split_second_moment", "second moments by modality", {"optim.split_second_moment": True},
            "W ← W − lr · Σ_a m_a / (√v_a + eps): moments of g_a, the gradient of modality a's losses",
            "ours, for an experiment; AdamW with unequal gradients of the modalities: arXiv 2605.16165 [A]",
            "updates of all parameters", "a set of moments for each modality"),
    ),
    "untying": (
        Remedy("untie_norms", "norms by modality", {"model.per_modality.norms": True},
            "norm_m(x) for a token of modality m: separate gains and biases, also in the final norm",
            "Mixture-of-Transformers, arXiv 2411.04996 [V]", STREAM + ", and the input of the head",
            "every norm once per modality"),
        Remedy("untie_qk_norm", "QK-Norm by modality",
            {"model.qk_norm.kind": "rms", "model.per_modality.qk_norm": True},
            "q ← gain_m · q / √(mean(q²) + eps) for a token of modality m; k likewise",
            "Mixture-of-Transformers, arXiv 2411.04996 [V], which unties it with the rest", QK,
            "every QK-Norm once per modality"),
        Remedy("untie_qk", "W_q and W_k by modality", {"model.per_modality.qk": True},
            "q = W_q,m x, k = W_k,m x for a token of modality m",
            "Mixture-of-Transformers, arXiv 2411.04996 [V]", QK, "all copies process all tokens"),
        Remedy("untie_mlp", "FFN by modality", {"model.per_modality.mlp": True},
            "mlp_m(x) for a token of modality m", "Mixture-of-Transformers, arXiv 2411.04996 [V]", "MLP",
            "all copies process all tokens"),
        Remedy("separate_ends", "first and last layers by modality",
            {"model.separate_first": 1, "model.separate_last": 1},
            "x_m ← layer_m(x_m) in the first N and the last M layers: all weights by modality, attention to tokens of"
            " the same modality only",
            "Uni-X, arXiv 2509.24365 [S]", "whole layers at both ends",
            "all copies process all tokens; a mask, which sdpa_flash does not support"),
    ),
    "init": (
        Remedy("embed_init", "initial embeddings by modality",
            {"model.embed_init.text": 8.0, "model.embed_init.image": 8.0},
            "initial std of the modality's embedding rows · factor; 8 = √d_model of configs/demo.yaml, for std 1",
            "Spike No More, arXiv 2312.16903 [S]", "initial embedding matrix", "none"),
        Remedy("embed_scale", "scaled embeddings by modality",
            {"model.embed_scale.text": 8.0, "model.embed_scale.image": 8.0},
            "x = factor · embedding in every forward pass; here 8 = √d_model of configs/demo.yaml",
            "ours, as a control: the factor by modality in the forward pass, not in the initial weights",
            "the input of the first layer", "a product by token"),
        Remedy("embed_norm", "normalized embeddings", {"model.embed_norm": True},
            "x = embedding / √(mean(embedding²) + eps): tokens of all modalities enter with norm √d_model",
            "Muse Glimmer in transformers, for text and for images [V]", "the input of the first layer",
            "a norm of the embeddings"),
        Remedy("embed_sqrt_d", "embeddings times √d_model", {"model.embed_sqrt_d": True},
            "x = √d_model · embedding in every forward pass",
            "Spike No More, arXiv 2312.16903 [S]; Gemma 2 and 3 in transformers [V]",
            "the input of the first layer", "a product by token"),
    ),
}
# The purpose of each remedy, in one line.
_PURPOSES = {
    "attn_scale_inverse": "keeps attention logits small at the start when head_dim is large",
    "attn_scale_none": "makes attention logits larger: a control that provokes the instability",
    "qk_norm_rms": "bounds attention logits by its gains; try it first when logits grow",
    "qk_norm_layer": "bounds attention logits, and removes the mean of queries and keys",
    "qk_norm_layer_bias": "QK-Norm as in the Chameleon paper",
    "qk_norm_l2": "bounds attention logits by one learned scale per layer",
    "qk_norm_l2_per_head": "bounds attention logits by one learned scale per head",
    "qk_norm_cosine": "bounds attention logits by a scale that cannot exceed a limit",
    "qk_norm_full": "bounds all heads together, as in OLMo 2: one head can still have larger logits than others",
    "qk_norm_no_gain": "bounds attention logits by √head_dim, with nothing to learn",
    "qk_norm_rms_per_head": "bounds attention logits, with separate gains for each head",
    "qk_norm_per_head": "QK-Norm as in Chameleon's code in transformers, with a gain and a bias for each head",
    "qk_norm_zero_centered": "bounds attention logits, with gains that weight decay pulls to 1",
    "qk_norm_after_rope": "bounds attention logits after the rotation, so the gain acts on rotated channels",
    "qkv_norm": "bounds attention logits and the values",
    "post_norm": "bounds what each sublayer adds to the residual stream",
    "sandwich": "bounds the input and the output of each sublayer",
    "deep_norm": "keeps the norm of the residual stream fixed, and makes updates of deep post-norm models small",
    "post_gain_zero": "lets each sublayer begin at zero and grow during training",
    "layer_norm": "norms that also remove the mean",
    "attn_softcap": "bounds the logits that attention uses, while q·k can still grow",
    "final_softcap": "bounds the output logits",
    "qk_clip": "shrinks W_q and W_k of a head only when its logits exceed a threshold; keeps the architecture",
    "sigma_reparam": "bounds the largest singular value of every matrix by a learned number",
    "sigmoid_attention": "removes the softmax over keys: tests whether its shift invariance causes norm growth",
    "attn_gate_element": "lets each channel of a head output zero even if all logits are small",
    "attn_gate_head": "lets a head output zero even if all its logits are small",
    "attn_sink": "lets a head attend to nothing even if all its logits are small",
    "head_scale": "lets the model scale the output of each head",
    "mlp_clamp": "limits outliers of the product in SwiGLU",
    "mlp_norm": "bounds the input of the MLP's last matrix",
    "z_loss": "keeps log Z of the output logits near 0; it does not act on attention",
    "residual_dropout": "regularizes; Chameleon-7B was trained with it and QK-Norm",
    "attn_dropout": "regularizes attention weights",
    "layer_scale": "lets each sublayer begin small and grow during training",
    "residual_gate": "keeps the residual stream from growing with depth",
    "depth_scale_norm": "makes later layers contribute less: scales down their inputs",
    "depth_scale_branch": "makes every layer contribute less if the model has more layers",
    "output_init_total": "begins with small sublayer outputs",
    "output_init_depth": "begins with small sublayer outputs, smaller in later layers",
    "decay_independent": "makes weight decay independent of the learning rate",
    "adam_eps": "lets Adam move parameters with tiny gradients",
    "beta2": "averages squared gradients over more steps",
    "warmup": "gives Adam's averages more steps before the learning rate is high",
    "decay_gains": "keeps norm gains, and with QK-Norm the bound of the logits, from growing",
    "no_decay_embeddings": "keeps embeddings from shrinking; small ones raise the gradients of the first layers",
    "muon": "an optimizer that makes the updates of matrices orthogonal",
    "adamh": "keeps the norm of every matrix fixed, so weights cannot grow",
    "update_clip": "shortens the step of a tensor whose gradients have just grown",
    "adagc": "clips the gradient of each tensor at its own recent norm",
    "skip_step": "leaves out steps whose loss or gradient norm is an outlier",
    "msign": "restores the rank of W_q, W_k, W_v and W_o at regular intervals",
    "split_second_moment": "gives each modality its own second moments in Adam: tests one explanation of norm growth",
    "untie_norms": "gives each modality its own norms",
    "untie_qk_norm": "gives each modality its own bound of the attention logits",
    "untie_qk": "gives each modality its own queries and keys",
    "untie_mlp": "gives each modality its own MLP",
    "separate_ends": "keeps the modalities apart in the first and last layers, where their gradients conflict most",
    "embed_init": "begins with larger embeddings, so that the first norm amplifies gradients less",
    "embed_scale": "makes embeddings larger: multiplies them by a constant in every forward pass",
    "embed_norm": "makes the tokens of all modalities enter with the same norm",
    "embed_sqrt_d": "makes embeddings larger: multiplies them by √d_model in every forward pass",
}
# fmt: on

REMEDIES: tuple[Remedy, ...] = tuple(
    replace(remedy, group=group, purpose=_PURPOSES[remedy.key])
    for group, remedies in _GROUPS.items()
    for remedy in remedies
)


def main(argv: list[str] | None = None) -> int:
    """Print every remedy with its flags, formula and source.

    Raises:
        UserError: there is an argument other than ``--help``.
    """
    OneSentenceParser(
        prog="python -m mmqk.remedies",
        description="Print every published remedy: the flags that switch it on, its formula, its source.",
        epilog="docs/remedies.md adds the cost of each remedy, and the implementation that it was compared with.",
    ).parse_args(argv)
    print("Add the flags to: python -m mmqk.train --config configs/demo.yaml\n")
    for group, remedies in _GROUPS.items():
        print(group.upper())
        for remedy in remedies:
            print(f"  {remedy.title}")
            print(f"      {' '.join(remedy.flags)}")
            for text in (remedy.purpose, remedy.formula, f"on: {remedy.acts_on}", f"from: {remedy.source}"):
                print(textwrap.fill(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 10))
        print()
    print("; ".join(f"[{mark}] {meaning}" for mark, meaning in MARKS.items()))
    return 0


if __name__ == "__main__":
    run_main(main)
