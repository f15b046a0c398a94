"""Compares attention, RoPE and QK-Norm with written-out references, and checks known bounds and symmetries."""

import math

import pytest
import torch

from mmqk.model import ModelConfig, QKNormConfig, RopeScalingConfig
from mmqk.model.attention import Attention, apply_rope, rope_tables
from mmqk.model.backends import mask_of
from tests.model.attend import attention

B, H, T, K = 2, 3, 7, 4
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [5, 5, 5, 5, 5, 2, 2]])


def qkv(dtype=torch.float64, size=2.0):
    generator = torch.Generator().manual_seed(0)
    return [size * torch.randn(B, H, T, K, generator=generator, dtype=dtype) for _ in range(3)]


def written_out(q, k, v, scale, softcap=None, documents=None, cap_after_mask=False):
    """Compute attention one query at a time."""
    out = torch.zeros_like(q)
    for b, h, t in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(T)).tolist():
        weights = []
        for s in range(T):
            logit = scale * float(q[b, h, t] @ k[b, h, s])
            visible = s <= t and (documents is None or documents[b, s] == documents[b, t])
            if cap_after_mask and not visible:
                logit = -math.inf
            if softcap is not None:
                logit = softcap * math.tanh(logit / softcap)
            weights.append(math.exp(logit) if visible or cap_after_mask else 0.0)
        for s in range(T):
            out[b, h, t] += weights[s] / sum(weights) * v[b, h, s]
    return out


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_math_equals_the_written_out_sum(softcap, documents):
    q, k, v = qkv()
    ours = attention(q, k, v, scale=0.5, softcap=softcap, document_BT=documents)
    torch.testing.assert_close(ours, written_out(q, k, v, 0.5, softcap, documents), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "wrong", [{"softcap": None}, {"cap_after_mask": True}, {"documents": None}, {"scale": 1.0}]
)
def test_the_written_out_sum_tells_variants_apart(wrong):
    q, k, v = qkv()
    ours = attention(q, k, v, scale=0.5, softcap=1.5, document_BT=DOCUMENTS)
    reference = written_out(q, k, v, **({"scale": 0.5, "softcap": 1.5, "documents": DOCUMENTS} | wrong))
    assert (ours - reference).abs().max() > 1e-2


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_sdpa_equals_math_in_value_and_gradient(documents):
    results = []
    for backend in ("math", "sdpa"):
        leaves = [x.requires_grad_() for x in qkv(torch.float32)]
        out = attention(*leaves, scale=0.4, document_BT=documents, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, fused, tolerance in zip(*results, (1e-6, 1e-4, 1e-4, 1e-4), strict=True):
        torch.testing.assert_close(ours, fused, rtol=tolerance, atol=tolerance)
    q, k, v = qkv(torch.float32)
    assert (attention(q, k, v, scale=0.41, backend="sdpa") - attention(q, k, v, scale=0.4)).abs().max() > 1e-3


@pytest.mark.parametrize(("softcap", "bounded"), [(3.0, True), (None, False)])
def test_softcap_bounds_how_much_more_a_key_can_weigh(softcap, bounded):
    q = torch.full((1, 1, 2, K), 50.0)
    k = torch.stack([torch.full((K,), 1.0), torch.full((K,), -1.0)])[None, None]
    v = torch.eye(2, K)[None, None]
    weight = attention(q.double(), k.double(), v.double(), scale=0.5, softcap=softcap)[0, 0, 1]
    log_ratio = float(weight[0].log() - weight[1].log())
    assert (log_ratio <= 2 * 3.0 + 1e-9) == bounded


def test_what_a_backend_cannot_do_is_refused_by_name():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"sdpa.*attn_softcap 30"):
        Attention(ModelConfig(attn_softcap=30.0), "sdpa")
    with pytest.raises(ValueError, match=r"sdpa.*attn_softcap 30"):
        attention(q, k, v, scale=1.0, softcap=30.0, backend="sdpa")
    with pytest.raises(ValueError, match=r"sdpa.*attention sigmoid"):
        Attention(ModelConfig(attention="sigmoid"), "sdpa")
    with pytest.raises(ValueError, match=r"math, sdpa.*'flash'"):
        Attention(ModelConfig(), "flash")
    with pytest.raises(TypeError, match="one dtype"):
        attention(q.float(), k, v, scale=1.0)


def complex_rope(x_BTHK, theta, interleaved=False):
    """Apply RoPE to each pair of channels as a complex number times exp(i * position * theta^(-2 pair / K))."""
    half = x_BTHK.shape[-1] // 2
    position = torch.arange(x_BTHK.shape[1], dtype=torch.float64)[:, None, None]
    turn = torch.exp(1j * position * theta ** (-2 * torch.arange(half, dtype=torch.float64) / (2 * half)))
    real, imaginary = (x_BTHK[..., 0::2], x_BTHK[..., 1::2]) if interleaved else x_BTHK.split(half, -1)
    turned = torch.complex(real, imaginary) * turn
    if interleaved:
        return torch.stack((turned.real, turned.imag), -1).flatten(-2)
    return torch.cat((turned.real, turned.imag), -1)


def test_rope_equals_multiplication_of_complex_numbers():
    x_BTHK = torch.randn(2, 40, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ours = apply_rope(x_BTHK, rope_tables(40, 16, 500.0, x_BTHK.device))
    torch.testing.assert_close(ours, complex_rope(x_BTHK, 500.0), rtol=0, atol=1e-5)
    assert (ours - complex_rope(x_BTHK, 500.0, interleaved=True)).abs().max() > 0.1
    assert (ours - complex_rope(x_BTHK, 10000.0)).abs().max() > 0.1


@pytest.mark.parametrize("scaling", [("linear", 4.0), ("llama3", 8.0, 1.0, 4.0, 512)])
def test_scaled_rope_turns_by_the_frequencies_of_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, factor = scaling[:2]
    parameters = {"rope_type": kind, "rope_theta": 5000.0, "factor": factor}
    if kind == "llama3":
        parameters |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=4096, rope_parameters=parameters
    )
    frequency, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angle = torch.arange(300)[:, None] * frequency

    def furthest(scaling):
        cos, signed_sin = rope_tables(300, 64, 5000.0, angle.device, scaling)
        half = torch.cat((cos[:, 0, :32] - angle.cos(), signed_sin[:, 0, 32:] - angle.sin()))
        return half.abs().max()

    assert furthest(RopeScalingConfig(*scaling)) < 1e-4
    assert furthest(RopeScalingConfig(kind, factor + 0.5, *scaling[2:])) > 0.02
    assert furthest(None) > 0.1


def test_rope_keeps_lengths_and_depends_on_distance_alone():
    q_K, k_K = torch.randn(2, 16, generator=torch.Generator().manual_seed(4))
    rope = rope_tables(30, 16, 10000.0, q_K.device)
    q_TK, k_TK = (apply_rope(x.expand(1, 30, 1, 16), rope)[0, :, 0] for x in (q_K, k_K))
    torch.testing.assert_close(q_TK.norm(dim=-1), q_K.norm().expand(30))
    dots_TS = q_TK @ k_TK.T
    torch.testing.assert_close(dots_TS[5, 2], dots_TS[25, 22], rtol=0, atol=1e-5)
    assert abs(dots_TS[5, 2] - dots_TS[5, 1]) > 1e-3


def watched(config, scale_w_q=1.0, autocast=False):
    """Return the tensors of an attention layer with random gains, by site, and the layer itself."""
    torch.manual_seed(5)
    layer = Attention(config, "math")
    with torch.no_grad():
        for norm in (layer.q_norm, layer.k_norm):
            for parameter in norm.parameters():
                parameter.uniform_(0.5, 1.5)
        layer.w_q.weight *= scale_w_q
    sites = {}
    x_BTD = torch.randn(2, 9, config.d_model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        rope = rope_tables(9, config.head_dim, config.rope_theta, x_BTD.device)
        layer(x_BTD, rope, mask_of("math", 9, x_BTD.device), observe=sites.__setitem__)
    return sites, layer


@pytest.mark.parametrize("kind", ["none", "rms", "layer"])
def test_scaling_w_q_scales_the_logits_unless_qk_norm_holds_them(kind):
    config = ModelConfig(qk_norm=QKNormConfig(kind, eps=1e-12))
    one, seven = watched(config)[0]["q"], watched(config, scale_w_q=7.0)[0]["q"]
    torch.testing.assert_close(seven, one if kind != "none" else 7 * one, rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(seven, one if kind == "none" else 7 * one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "holds"), [("rms", True), ("none", False)])
def test_rms_qk_norm_bounds_the_logits(kind, holds):
    config = ModelConfig(qk_norm=QKNormConfig(kind))
    sites, layer = watched(config, scale_w_q=100.0)
    logits_BHTS = sites["q"] @ sites["k"].transpose(-1, -2) * layer.scale
    gain = [norm.weight.abs().max() if kind == "rms" else 1.0 for norm in (layer.q_norm, layer.k_norm)]
    bound = math.sqrt(config.head_dim) * gain[0] * gain[1]
    assert bool(logits_BHTS.abs().max() <= bound * (1 + 1e-5)) == holds


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_qk_norm_comes_before_rope_over_each_head(kind):
    config = ModelConfig(qk_norm=QKNormConfig(kind))
    sites, layer = watched(config)
    raw_BTHK = sites["q_raw"].transpose(1, 2)
    rope = rope_tables(9, config.head_dim, config.rope_theta, raw_BTHK.device)
    with torch.no_grad():
        right = apply_rope(layer.q_norm(raw_BTHK), rope).transpose(1, 2)
        wrong = layer.q_norm(apply_rope(raw_BTHK, rope)).transpose(1, 2)
    torch.testing.assert_close(sites["q"], right)
    assert (sites["q"] - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["none", "rms", "layer"])
def test_every_arm_attends_in_the_same_precision(kind):
    sites, _ = watched(ModelConfig(qk_norm=QKNormConfig(kind)), autocast=True)
    assert {sites[name].dtype for name in ("q", "k", "v")} == {torch.bfloat16}


def test_math_keeps_large_bf16_logits_exact_between_its_inputs_and_its_output():
    # The logits are about 64 and differ between keys by less than the spacing of bf16 numbers near 64.
    q, k, v = ((shift + x).bfloat16() for shift, x in zip((4, 4, 0), qkv(torch.float32, 0.05), strict=True))
    exact = attention(q.double(), k.double(), v.double(), scale=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        ours = attention(q, k, v, scale=1.0)
        rounded_logits = (q @ k.transpose(-1, -2)).float() + torch.full((T, T), -math.inf).triu(1)
        rounded = (torch.softmax(rounded_logits, -1).bfloat16() @ v).double()
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - exact).abs().max() <= exact.abs().max() * 2**-8
    assert (rounded - exact).abs().max() > exact.abs().max() * 2**-8
