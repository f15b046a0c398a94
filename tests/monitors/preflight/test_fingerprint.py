"""The QK-Norm of a model is read from what it does: models of transformers, and norms written by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmqk.monitors.foreign.inputs import Inputs
from mmqk.monitors.preflight.reading import fingerprint, read_calls
from tests.monitors.attach.nets import D, H, Layer, Net, batches
from tests.monitors.preflight.families import rotated

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD_DIM = SIZES | {"head_dim": 16}
WORDS = {
    "Llama": (SIZES, "QK-Norm: none"),
    "Qwen3": (HEAD_DIM, "QK-Norm: RMS norm per head, before RoPE, gains q_norm.weight (16), k_norm.weight (16)"),
    "Olmo2": (
        SIZES,
        "QK-Norm: RMS norm over the full width, before RoPE, gains q_norm.weight (64), k_norm.weight (32)",
    ),
    "Phi": (
        HEAD_DIM | {"num_key_value_heads": 4, "num_hidden_layers": 16, "qk_layernorm": True},
        "QK-Norm: layer norm per head, before RoPE, gains q_layernorm.weight (16), q_layernorm.bias (16), "
        "k_layernorm.weight (16), k_layernorm.bias (16)",
    ),
    "Cohere": (
        SIZES | {"use_qk_norm": True},
        "QK-Norm: layer norm per head, before RoPE, gains q_norm.weight (64), k_norm.weight (32)",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", WORDS)
def test_models_of_transformers(family, dtype):
    torch.manual_seed(0)
    arguments, words = WORDS[family]
    config = getattr(transformers, f"{family}Config")(**arguments, attn_implementation="sdpa")
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(torch.randn_like(p) / 10)
    ids = torch.randint(96, (3, 12))
    assert fingerprint(read_calls(Inputs(model, (), {"input_ids": ids, "use_cache": False}))) == words


K = D // H


def rms(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x * (x.square().mean(dim, keepdim=True) + 1e-6).rsqrt()


class Attention(nn.Module):
    """Attention with a norm that a function of (x_BHTK, gain_K) computes."""

    def __init__(self, norm):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.a = nn.Parameter(1 + torch.rand(K))
        self.norm = norm

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        qkv = F.linear(x, weight=self.qkv.weight, bias=self.qkv.bias)  # all arguments may have names
        q, k, v = (y.unflatten(-1, (H, K)).transpose(1, 2) for y in qkv.chunk(3, -1))
        y = F.scaled_dot_product_attention(self.norm(q, self.a), self.norm(k, self.a), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def net_of(norm) -> Net:
    net = Net([])
    torch.manual_seed(0)
    net.layers = nn.ModuleList(Layer(Attention(norm)) for _ in range(2))
    return net


BY_HAND = {
    "none": (lambda x, a: x, "none"),
    "scaled": (lambda x, a: 3 * rotated(x), "none"),
    "rms before": (lambda x, a: rotated(a * rms(x, -1)), "RMS norm per head, before RoPE, gains a (8)"),
    "rms after": (lambda x, a: a * rms(rotated(x), -1), "RMS norm per head, after RoPE, gains a (8)"),
    "rms without rope": (lambda x, a: a * rms(x, -1), "RMS norm per head, gains a (8)"),
    "cosine": (lambda x, a: F.normalize(x, dim=-1), "RMS norm per head, no gain"),
    "layer": (lambda x, a: F.layer_norm(rotated(x), (K,)), "layer norm per head, no gain"),
    "tokens": (lambda x, a: rms(x, 2), "RMS norm over tokens (wrong axis), no gain"),
    "heads": (lambda x, a: rms(x, 1), "RMS norm over heads (wrong axis), no gain"),
    "full": (lambda x, a: x * x.square().mean((1, 3), True).rsqrt(), "RMS norm over the full width, no gain"),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_norms_written_by_hand(name):
    norm, words = BY_HAND[name]
    net, (ids,) = net_of(norm), batches(1, B=2)
    before = {n: p.clone() for n, p in net.state_dict().items()}
    calls = read_calls(Inputs(net, (ids,), {}))
    assert fingerprint(calls) == f"QK-Norm: {words}"
    assert all(torch.equal(p, before[n]) for n, p in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    if name == "scaled":
        assert calls[0].q.factor == pytest.approx(3, rel=1e-5)
