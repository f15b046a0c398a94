"""Small models of every variant, shared by the tests of the model."""

from dataclasses import replace

import torch

from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig, RopeScalingConfig

BLOCKS = {"text": 11, "image": 6, "sound": 4}
V = 21
SMALL = {"vocab_sizes": BLOCKS, "d_model": 16, "n_layers": 3, "n_heads": 4}
L2 = QKNormConfig("l2", eps=1e-6)

VARIANTS = {
    "llama": {},
    "chameleon": {"qk_norm": QKNormConfig("layer", bias=True), "mlp": "gelu"},
    "swin": {"qk_norm": QKNormConfig("rms", eps=1e-6), "pre_norm": False, "post_norm": True, "d_ff": 40},
    "sandwich, capped": {"post_norm": True, "attn_softcap": 0.8, "final_softcap": 2.0},
    "scale of its own": {"attn_scale": 0.3, "d_head": 6, "tie_embeddings": True, "embed_sqrt_d": True},
    "layer norm": {"norm": "layer", "norm_bias": True, "post_norm": True, "layer_scale": 0.4},
    "olmo": {"qk_norm": QKNormConfig("rms", "full", "per_head"), "pre_norm": False, "post_norm": True,
             "n_kv_heads": 2},
    "gemma": {
        "norm_gain": "zero_centered", "post_norm": True, "qk_norm": QKNormConfig("rms", gain="zero_centered"),
        "mlp": "geglu", "n_kv_heads": 1, "window": 4, "global_every": 2, "local_rope_theta": 30.0,
        "rope_scaling": RopeScalingConfig("linear", 3.0), "embed_scale": {"text": 2.0, "image": 0.5},
        "embed_sqrt_d": True,
    },
    "after rope": {"qk_norm": QKNormConfig("rms", place="after_rope"), "window": 3},
    "qkv norm": {"qk_norm": QKNormConfig("layer", bias=True, normalize_v=True), "n_kv_heads": 2},
    "l2": {"qk_norm": replace(L2, normalize_v=True)},
    "l2 per head": {"qk_norm": replace(L2, gain="per_head"), "n_kv_heads": 2},
    "cosine": {"qk_norm": replace(L2, gain="per_head", scale_max=11.0), "pre_norm": False, "post_norm": True},
    "sigmoid": {"attention": "sigmoid", "qk_norm": QKNormConfig("rms"), "window": 5, "attn_softcap": 3.0},
    "sigma reparam": {"weight_reparam": "sigma"},
    "untied": {
        "per_modality": PerModalityConfig(norms=True, qk_norm=True, qk=True, mlp=True), "norm": "layer",
        "norm_bias": True, "post_norm": True, "n_kv_heads": 2,
        "qk_norm": QKNormConfig("layer", gain="per_head", bias=True),
    },
    "untied, everything else": {
        "per_modality": PerModalityConfig(qk_norm=True, qk=True, mlp=True), "weight_reparam": "sigma",
        "reparam_gamma": "one", "attention": "sigmoid", "layer_scale": 0.5, "embed_scale": {"image": 3.0},
        "qk_norm": replace(L2, gain="per_head", scale_max=30.0, normalize_v=True), "final_softcap": 2.0,
    },
    "deep norm": {"deep_norm": True, "pre_norm": False, "layer_scale": 0.4, "norm": "layer", "norm_bias": True},
    "separated ends": {
        "separate_first": 1, "separate_last": 1, "qk_norm": QKNormConfig("rms", gain="per_head", normalize_v=True),
        "n_kv_heads": 2, "layer_scale": 0.5, "window": 5,
    },
}  # fmt: skip


def build(seed=0, backend="math", **fields):
    """Return a small model in eval mode with random gains, biases and scales, because unit gains would hide a wrong
    order of operations."""
    model = EarlyFusionTransformer(ModelConfig(**(SMALL | fields)), backend, seed).eval()
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "norm" in name:
            parameter.data += torch.empty_like(parameter).uniform_(-0.3, 0.3, generator=generator)
        elif ".copies." in name:  # copies start equal, which would hide the use of a wrong copy
            parameter.data += 0.1 * torch.empty_like(parameter).normal_(generator=generator)
    return model


def refuses_sdpa(fields):
    """Return whether backend sdpa cannot compute this variant."""
    return fields.get("attn_softcap") is not None or fields.get("attention") == "sigmoid"


def ids_of(*shape, seed=0, low=0, high=V):
    """Return random ids, by default of all modalities."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
