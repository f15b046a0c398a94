"""The transformers models that the recipes of 2025 and 2026 cite, as functions of tensors named like our parameters.

A part of the cited model is removed here, or set to mmqk's value, only if the comment at the head of the recipe lists
it as not supported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mmqk.model import EarlyFusionTransformer, ModelConfig
from tests.model.comparison import IDS_BT, Leaves, leaves_of
from tests.model.outside import gpt_oss_swiglu

V, D, F_, LAYERS, H, G = 48, 16, 32, 2, 2, 1
HEAD_DIM = {"muse_spark": 64, "muse_glimmer": 128, "gpt_oss": 8, "qwen3_next": 8, "kimi_k2": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZE: dict[str, Any] = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": F_, "num_hidden_layers": LAYERS, "num_attention_heads": H,
    "num_key_value_heads": G, "max_position_embeddings": 32, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2, "attn_implementation": "sdpa",
}  # fmt: skip
FULL = ["full_attention"] * LAYERS


def small(model: ModelConfig, name: str) -> ModelConfig:
    """Return a recipe's model at the size of the peers; the Muse models have their published head_dim."""
    return replace(
        model, vocab_sizes={"text": V}, d_model=D, d_ff=F_, n_layers=LAYERS, n_heads=H, n_kv_heads=G,
        d_head=HEAD_DIM[name],
    )  # fmt: skip


def leaves_for(config: ModelConfig, name: str) -> Leaves:
    """Return random fp64 weights with which every field has an effect: values near each eps, beyond each softcap and
    clamp.

    In Muse Spark, the norms after the sublayers use their gains differently from mmqk. These gains keep their initial
    value 0 and are not returned.
    """
    factors = {"embed": 0.05, "head": 8.0, "w_up": 4.0, "w_gate": 4.0}
    if config.qk_norm.kind == "rms":
        factors |= {"w_q": 0.02, "w_k": 0.02}
    left_out = "_post_norm" if name == "muse_spark" else "nothing"
    return {
        path: leaf * factors.get(path.split(".")[-2], 1.0)
        for path, leaf in leaves_of(lambda: EarlyFusionTransformer(config))().items()
        if left_out not in path
    }


def ours(config: ModelConfig, leaves: Leaves) -> Tensor:
    """Return mmqk's logits in training mode; a parameter that is not in ``leaves`` keeps its initial value."""
    model = EarlyFusionTransformer(config).double().train()
    own = {path: p.shape for path, p in model.named_parameters()}
    given = {path: leaf for path, leaf in leaves.items() if own.get(path) == leaf.shape}
    return functional_call(model, given, (IDS_BT,))


def theirs(name: str, leaves: Leaves) -> Tensor:
    """Return the logits, in training mode, of the model that a recipe cites."""
    with torch.random.fork_rng():
        model = {
            "muse_spark": muse, "muse_glimmer": muse, "gpt_oss": gpt_oss, "qwen3_next": qwen3_next, "kimi_k2": kimi_k2
        }[name](name).double().train()  # fmt: skip
    given = named(name, leaves)
    own = {path for path, _ in model.named_parameters() if "vision" not in path and "audio" not in path}
    assert own - set(given) == {path for path in own if "post_feedforward_layernorm" in path and "spark" in name}
    return functional_call(model, given, (IDS_BT,), {"use_cache": False}).logits


def named(name: str, leaves: Leaves) -> dict[str, Tensor]:
    """Return the leaves with the parameter names and shapes of the cited model."""
    muse = name.startswith("muse")
    names = [
        ("blocks.", "model.layers."), ("embed.", "model.embed_tokens."), ("final_norm.", "model.norm."),
        ("head.", "lm_head."), ("attention.w_g.", "self_attn.gate_proj."), ("attention.w_", "self_attn.w_"),
        ("attention.sink.weight", "self_attn.sinks"), ("attention.", "self_attn."), ("w_q.", "q_proj."),
        ("w_k.", "k_proj."), ("w_v.", "v_proj."), ("w_o.", "o_proj."), ("w_gate.", "gate_proj."),
        ("w_up.", "up_proj."), ("w_down.", "down_proj."), ("attn_pre_norm.", "input_layernorm."),
        ("mlp_pre_norm.", "pre_feedforward_layernorm." if muse else "post_attention_layernorm."),
        ("attn_post_norm.", "post_attention_layernorm."), ("mlp_post_norm.", "post_feedforward_layernorm."),
        ("attn_residual_gate.weight", "post_attention_residual_gate.gate"),
        ("mlp_residual_gate.weight", "post_feedforward_residual_gate.gate"),
    ]  # fmt: skip
    given = {}
    for path, leaf in leaves.items():
        for old, new in names:
            path = path.replace(old, new)
        given[path.replace("model.", "model.language_model.") if muse else path] = leaf
    if muse:
        given["model.language_model.norm.weight"] = 1 + leaves["final_norm.weight"]
    if name == "qwen3_next":  # in q_proj, the rows of a head's gate follow those of its queries
        for layer in range(LAYERS):
            q, g = (leaves[f"blocks.{layer}.attention.w_{n}.weight"].view(H, -1, D) for n in "qg")
            given[f"model.layers.{layer}.self_attn.q_proj.weight"] = torch.cat((q, g), 1).flatten(0, 1)
            del given[f"model.layers.{layer}.self_attn.gate_proj.weight"]
    return given


def muse(name: str) -> nn.Module:
    """Return Muse Spark or Muse Glimmer without windows, NoPE layers, the eps of QK-Norm and output_multiplier.

    Spark is also without experts, `o_norm` and gains after the sublayers.
    """
    import transformers

    kind, spark = {"muse_spark": ("MuseSpark", True), "muse_glimmer": ("MuseGlimmer", False)}[name]
    dense = {"mlp_layer_types": ["dense"] * LAYERS} if spark else {}
    text = getattr(transformers, f"{kind}TextConfig")(
        **SIZE, **dense, layer_types=FULL, rope_parameters=dict(ROPE), layer_rope_theta=[ROPE["rope_theta"]] * LAYERS,
        output_multiplier=1.0, post_norm_eps=1e-5,
    )  # fmt: skip
    vision = getattr(transformers, f"{kind}VisionConfig")(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    parts = {"text_config": text, "vision_config": vision, "out_hidden_size": 32, "projector_hidden_size": 8}
    if spark:
        parts["audio_config"] = transformers.MuseSparkAudioConfig(
            hidden_sizes=(4, 4, 4, 4), depths=(1, 1, 1, 1), out_hidden_size=D
        )
    config = getattr(transformers, f"{kind}Config")(**parts, image_token_id=V - 1, video_token_id=V - 2)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    for layer in model.model.language_model.layers:
        layer.self_attn.qk_norm.eps = 0.0
        if spark:
            layer.self_attn.o_norm = nn.Identity()
    return model


class DenseSwiGLU(nn.Module):
    """gpt-oss's clamped SwiGLU as one MLP, with alpha 1 and without `up + 1`."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj, self.up_proj = (nn.Linear(D, F_, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(F_, D, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        leaves = {f"w_{n}.weight": getattr(self, f"{n}_proj").weight for n in ("gate", "up", "down")}
        return gpt_oss_swiglu(self.limit)(leaves | {"x": x}), None


def gpt_oss(name: str) -> nn.Module:
    """Return gpt-oss with one MLP in place of its experts, without biases and windows."""
    import transformers

    config = transformers.GptOssConfig(
        **SIZE | {"attn_implementation": "eager"}, head_dim=HEAD_DIM[name], layer_types=FULL, attention_bias=False,
        rope_parameters=dict(ROPE), num_local_experts=1,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = DenseSwiGLU(config.swiglu_limit)
    return model


def qwen3_next(name: str) -> nn.Module:
    """Return Qwen3-Next with attention and a dense MLP in every layer, and RoPE on whole heads."""
    import transformers

    config = transformers.Qwen3NextConfig(
        **SIZE, head_dim=HEAD_DIM[name], layer_types=FULL, mlp_only_layers=list(range(LAYERS)),
        rope_parameters=ROPE | {"partial_rotary_factor": 1.0},
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


def kimi_k2(name: str) -> nn.Module:
    """Return DeepSeek-V3 with Llama's attention in place of its latent attention, and a dense MLP in every layer."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = transformers.DeepseekV3Config(
        **SIZE, qk_rope_head_dim=HEAD_DIM[name], first_k_dense_replace=LAYERS, num_mtp_layers=0,
        rope_parameters=dict(ROPE),
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    for i, layer in enumerate(model.model.layers):
        layer.self_attn = LlamaAttention(config, i)
    return model
