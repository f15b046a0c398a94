"""Compares every remedy of the model with an outside implementation or with its written-out formula.

The comparison is in fp64, with random gains, biases and scales. The values and the gradients of the input and of
every parameter agree within the stated tolerance. The values of each named wrong variant differ by more than 10 times
this tolerance.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model import comparison, outside
from tests.model.block_peers import BLOCK_PEERS
from tests.model.comparison import EXACT, FP32_INSIDE, TINY, Comparison, attention, compare, norm, qk
from tests.versions import older


def attention_peer(remedy, name, tolerance, fields, theirs, wrong):
    """Return the comparison of an attention layer. With QK-Norm, each control changes fields of QKNormConfig."""
    if "qk_norm" in fields:
        wrong = {what: {"qk_norm": replace(fields["qk_norm"], **changes)} for what, changes in wrong.items()}
    return compare((remedy,) if remedy else (), name, tolerance, attention, fields, theirs, wrong)


def one_layer_norm_a_head(leaves):
    """Apply torch's LayerNorm with a gain and a bias for each head."""
    heads = zip(comparison.split(leaves["x"]).unbind(-2), leaves["weight"], leaves["bias"], strict=True)
    return torch.cat([F.layer_norm(x, (comparison.K,), gain, bias, 1e-5) for x, gain, bias in heads], -1)


AFTER, EPS, NONE = {"place": "after_rope"}, {"eps": 1e-3}, {"kind": "none"}
XT, TIMM_RMS = outside.x_transformers_attention, "timm AttentionRope with torch RMSNorm"
PEERS: list[Comparison] = [
    attention_peer("qk_norm_rms", TIMM_RMS, EXACT, qk("rms") | {"n_kv_heads": 2},
        outside.timm_attention(nn.RMSNorm, 2, eps=1e-5),
        {"norm after RoPE": AFTER, "another epsilon": EPS, "no gain": {"gain": "none"}, "no norm": NONE}),
    attention_peer("qk_norm_layer", "timm AttentionRope with torch LayerNorm", EXACT, qk("layer"),
        outside.timm_attention(nn.LayerNorm, eps=1e-5, bias=False),
        {"norm after RoPE": AFTER, "another epsilon": EPS, "mean left in": {"kind": "rms"}}),
    attention_peer("qk_norm_layer_bias", "timm AttentionRope with torch LayerNorm", EXACT, qk("layer", bias=True),
        outside.timm_attention(nn.LayerNorm, eps=1e-5),
        {"norm after RoPE": AFTER, "another epsilon": EPS, "no bias": {"bias": False}}),
    attention_peer("qk_norm_no_gain", TIMM_RMS, EXACT, qk("rms", gain="none"),
        outside.timm_attention(nn.RMSNorm, eps=1e-5, elementwise_affine=False),
        {"another epsilon": EPS, "LayerNorm": {"kind": "layer"}, "no norm": NONE}),
    attention_peer("qk_norm_rms_per_head", "x-transformers Attention(qk_rmsnorm)", FP32_INSIDE,
        qk("rms", gain="per_head", eps=TINY), XT(qk_rmsnorm=True),
        {"norm after RoPE": AFTER, "another epsilon": EPS, "over all heads": {"scope": "full"}}),
    attention_peer("qk_norm_zero_centered", "x-transformers Attention(qk_rmsnorm)", FP32_INSIDE,
        qk("rms", gain="zero_centered", eps=TINY), XT(True, qk_rmsnorm=True),
        {"norm after RoPE": AFTER, "gain w instead of 1 + w": {"gain": "shared"}}),
    attention_peer("qkv_norm", "x-transformers Attention(qk_rmsnorm, value_rmsnorm)", FP32_INSIDE,
        qk("rms", gain="per_head", eps=TINY, normalize_v=True), XT(qk_rmsnorm=True, value_rmsnorm=True),
        {"values as they are": {"normalize_v": False}, "norm after RoPE": AFTER}),
    attention_peer("qk_norm_full", "transformers Olmo2Attention", FP32_INSIDE,
        qk("rms", "full", "per_head") | {"n_kv_heads": 2}, outside.OLMO2,
        {"each head by itself": {"scope": "head"}, "norm after RoPE": AFTER, "another epsilon": EPS}),
    attention_peer("qk_norm_after_rope", "transformers HunYuanDenseV1Attention", FP32_INSIDE,
        qk("rms", place="after_rope") | {"n_kv_heads": 2},
        outside.HUNYUAN,
        {"norm before RoPE": {"place": "before_rope"}, "another epsilon": EPS}),
    attention_peer("qk_norm_l2", "x-transformers Attention(qk_norm)", EXACT,
        qk("l2", gain="none", scale_init=7.0, eps=1e-12), XT(qk_norm=True, qk_norm_scale=7.0),
        {"another scale": {"scale_init": 7.1}, "RMSNorm": {"kind": "rms"}}),
    attention_peer("qk_norm_l2", "x-transformers Attention(qk_norm, qk_norm_dim_scale)", EXACT,
        qk("l2", eps=1e-12), XT(qk_norm=True, qk_norm_dim_scale=True),
        {"fixed scale": {"gain": "none"}, "its logarithm": {"scale_max": 1e9}}),
    attention_peer("qk_norm_l2_per_head", "x-transformers Attention(qk_norm, qk_norm_dim_scale)", EXACT,
        qk("l2", gain="per_head", eps=1e-12), XT(qk_norm=True, qk_norm_dim_scale=True),
        {"fixed scale": {"gain": "none"}, "its logarithm": {"scale_max": 1e9}}),
    attention_peer("qk_norm_cosine", "timm WindowAttention of Swin V2", EXACT,
        qk("l2", gain="per_head", scale_init=99.0, scale_max=100.0, eps=1e-12) | {"positions": False},
        outside.swin_v2_attention,
        {"no clamp": {"scale_max": 1e9}, "another clamp": {"scale_max": 99.5}, "no logarithm": {"scale_max": None}}),
    attention_peer("attn_scale_none", "torch scaled_dot_product_attention", EXACT,
        {"attn_scale": "none", "n_kv_heads": 2}, outside.torch_attention(1.0, 2),
        {"1 / sqrt(head_dim)": {"attn_scale": "rsqrt"}, "1 / head_dim": {"attn_scale": "inverse"}}),
    attention_peer("attn_scale_inverse", "torch scaled_dot_product_attention", EXACT,
        {"attn_scale": "inverse"}, outside.torch_attention(1 / comparison.K),
        {"1 / sqrt(head_dim)": {"attn_scale": "rsqrt"}, "no scale": {"attn_scale": "none"}}),
    attention_peer("attn_softcap", "x-transformers Attention(softclamp_logits)", FP32_INSIDE, {"attn_softcap": 0.7},
        XT(softclamp_logits=True, logit_softclamp_value=0.7),
        {"no cap": {"attn_softcap": None}, "another cap": {"attn_softcap": 0.75}}),
    attention_peer("sigmoid_attention", "x-transformers Attention(sigmoid)", EXACT, {"attention": "sigmoid"},
        XT(sigmoid=True, bias=-math.log(comparison.T)),
        {"softmax": {"attention": "softmax"}, "bias 0": XT(sigmoid=True),
         "bias of another length": XT(sigmoid=True, bias=-math.log(comparison.T - 1))}),
    attention_peer("attn_gate_element", "transformers MuseGlimmerTextAttention", FP32_INSIDE,
        {"attn_gate": "element", "n_kv_heads": 2} | qk("rms", gain="none"), outside.GLIMMER,
        {"no QK-Norm": NONE}),
    attention_peer("attn_gate_element", "x-transformers Attention(gate_values)", FP32_INSIDE, {"attn_gate": "element"},
        XT(gate_values=True), {"without": attention()[1]}),
    attention_peer(
        "attn_gate_head", "x-transformers Attention(gate_values_headwise)", FP32_INSIDE, {"attn_gate": "head"},
        XT(gate_values=True, gate_values_headwise=True), {"without": attention()[1]},
    ),
    attention_peer("attn_sink", "transformers GptOssAttention", FP32_INSIDE, {"attn_sink": True, "n_kv_heads": 2},
        outside.GPT_OSS, {"no sink": {"attn_sink": False}}),
    attention_peer("attn_sink", "x-transformers Attention(head_learned_sink)", FP32_INSIDE, {"attn_sink": True},
        XT(head_learned_sink=True), {"no sink": {"attn_sink": False}}),
    attention_peer("head_scale", "x-transformers Attention(head_scale)", FP32_INSIDE, {"head_scale": True},
        XT(head_scale=True), {"no factor": {"head_scale": False}}),
    attention_peer(None, "x-transformers Attention(max_attend_past)", FP32_INSIDE, {"window": 3}, XT(max_attend_past=2),
        {"no window": {"window": 0}, "a window of 2": {"window": 2}}),
]  # fmt: skip

# Norms by themselves.
OTHER_EPS = {"norm_eps": 1e-3}
LAYER, RMS = {"norm": "layer", "norm_bias": True}, {"norm": "rms", "norm_bias": False}
PEERS += [
    compare(("layer_norm",), "torch LayerNorm", EXACT, norm, LAYER,
        lambda p: F.layer_norm(p["x"], (comparison.D,), p["weight"], p["bias"], 1e-5),
        {"RMSNorm": RMS, "no bias": {"norm_bias": False}, "another epsilon": OTHER_EPS}),
    compare(("qk_norm_full",), "torch RMSNorm over all heads", EXACT, norm, qk("rms", "full", "per_head"),
        lambda p: F.rms_norm(p["x"], (comparison.D,), p["weight"].flatten(), 1e-5),
        {"each head by itself": qk("rms", "head", "per_head"), "no gain": qk("rms", "full", "none"),
         "another epsilon": qk("rms", "full", "per_head", eps=1e-3)}),
    compare(("qk_norm_per_head",), "torch LayerNorm, one a head", EXACT, norm,
        qk("layer", gain="per_head", bias=True), one_layer_norm_a_head,
        {"over all heads": qk("layer", "full", "per_head", bias=True), "no bias": qk("layer", gain="per_head")}),
    compare(("qk_norm_zero_centered",), "torch RMSNorm of weight 1 + w", EXACT, norm, {"norm_gain": "zero_centered"},
        lambda p: F.rms_norm(p["x"], (comparison.D,), 1 + p["weight"], 1e-5),
        {"gain w": {"norm_gain": "plain"}, "no gain": {"norm_gain": "none"}, "another epsilon": OTHER_EPS}),
    compare(("qk_norm_no_gain",), "torch RMSNorm", EXACT, norm, {"norm_gain": "none"},
        lambda p: F.rms_norm(p["x"], (comparison.D,), eps=1e-5),
        {"another epsilon": OTHER_EPS, "LayerNorm": {"norm": "layer"}}),
    compare(("qk_norm_l2",), "torch normalize", EXACT, norm, qk("l2", eps=1e-6),
        lambda p: (p["weight"] * F.normalize(comparison.split(p["x"]), dim=-1)).flatten(-2),
        {"RMSNorm": qk("rms", gain="none"), "fixed scale": qk("l2", gain="none"), "cut": qk("l2", scale_max=1e9)}),
]  # fmt: skip

PEERS += BLOCK_PEERS


# The models of these references have their present form since transformers 5.20.
LATER = {"transformers " + n for n in ("MuseGlimmerTextAttention", "MuseSparkResidualGate", "GPT2Model")}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{', '.join(peer.remedies)}: {peer.name}")
def test_ours_is_theirs_and_a_wrong_variant_is_not(peer):
    if peer.name in LATER and older("transformers", "5.20"):
        pytest.skip("the reference needs transformers 5.20")
    leaves = peer.leaves()
    ours, theirs = comparison.outcome(peer.ours, leaves), comparison.outcome(peer.theirs, leaves)
    for name, a, b in zip(("value", *leaves), ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=peer.tolerance, msg=lambda m, name=name: f"{name}: {m}")
    assert peer.controls
    for wrong, control in peer.controls.items():
        with torch.no_grad():
            assert (control(leaves) - theirs[0]).abs().max() > 10 * peer.tolerance, wrong
