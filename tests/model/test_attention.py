"""Compares attention and RoPE with written-out references."""

import math

import pytest
import torch

from mmqk.model import RopeScalingConfig
from mmqk.model.attention import apply_rope, rope_tables
from tests.model.attend import attention

B, H, T, K = 2, 3, 7, 4
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [5, 5, 5, 5, 5, 2, 2]])


def qkv(dtype=torch.float64, size=2.0):
    generator = torch.Generator().manual_seed(0)
    return [size * torch.randn(B, H, T, K, generator=generator, dtype=dtype) for _ in range(3)]


def written_out(q, k, v, scale, softcap=None, documents=None, window=T, cap_after_mask=False):
    """Compute attention one query at a time."""
    out = torch.zeros_like(q)
    for b, h, t in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(T)).tolist():
        weights = []
        for s in range(T):
            logit = scale * float(q[b, h, t] @ k[b, h, s])
            visible = t - window < s <= t and (documents is None or documents[b, s] == documents[b, t])
            if cap_after_mask and not visible:
                logit = -math.inf
            if softcap is not None:
                logit = softcap * math.tanh(logit / softcap)
            weights.append(math.exp(logit) if visible or cap_after_mask else 0.0)
        for s in range(T):
            out[b, h, t] += weights[s] / sum(weights) * v[b, h, s]
    return out


@pytest.mark.parametrize("backend", ["math", "sdpa"])
@pytest.mark.parametrize("window", [0, 3, T, T + 5])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_attention_equals_the_written_out_sum(backend, window, documents):
    for softcap in (None, 1.5) if backend == "math" else (None,):
        options = {"softcap": softcap, "scale": 0.5}
        ours = attention(*qkv(), window=window, document_BT=documents, backend=backend, **options)
        exact = written_out(*qkv(), documents=documents, window=window or T, **options)
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "wrong", [{"softcap": None}, {"cap_after_mask": True}, {"documents": None}, {"scale": 1.0}, {"window": 2}]
)
def test_the_written_out_sum_tells_variants_apart(wrong):
    ours = attention(*qkv(), scale=0.5, softcap=1.5, window=3, document_BT=DOCUMENTS)
    right = {"scale": 0.5, "softcap": 1.5, "documents": DOCUMENTS, "window": 3}
    assert (ours - written_out(*qkv(), **(right | wrong))).abs().max() > 1e-2


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_gradients_of_sdpa_are_those_of_math(documents):
    results = []
    for backend, scale in (("math", 0.4), ("sdpa", 0.4), ("sdpa", 0.41)):
        leaves = [x.requires_grad_() for x in qkv(torch.float32)]
        out = attention(*leaves, scale=scale, document_BT=documents, backend=backend)
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    for dense, fused, other in zip(*results, strict=True):
        torch.testing.assert_close(dense, fused, rtol=1e-4, atol=1e-4)
        assert (other - dense).abs().max() > 1e-3


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
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "max_position_embeddings": 4096}
    config = LlamaConfig(**sizes, rope_parameters=parameters)
    frequency, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angle = torch.arange(300)[:, None] * frequency

    def furthest(scaling):
        cos, signed_sin = rope_tables(300, 64, 5000.0, angle.device, scaling)
        half = torch.cat((cos[:, 0, :32] - angle.cos(), signed_sin[:, 0, 32:] - angle.sin()))
        return half.abs().max()

    assert furthest(RopeScalingConfig(*scaling)) < 1e-4
    assert furthest(RopeScalingConfig(kind, factor + 0.5, *scaling[2:])) > 0.02
    assert furthest(None) > 0.1


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
