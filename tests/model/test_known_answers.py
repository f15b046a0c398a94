"""Checks properties that hold for any weights: bounds of logits with QK-Norm, and finite numbers at extreme weights."""

import pytest
import torch

from mmqk.model import EarlyFusionTransformer, ModelConfig, PerModalityConfig, QKNormConfig
from mmqk.model.attention import rope_tables
from mmqk.model.backends import mask_of
from mmqk.model.norms import qk_norm
from mmqk.monitors.own.probe import logit_bound
from tests.model.small import BLOCKS, build

T, H, K = 12, 4, 8
# All combinations of kind, scope, gain and bias of QK-Norm; after RoPE with one gain only.
EVERY_QK_NORM = [
    QKNormConfig(kind, scope, gain, bias, place=place)
    for kind in ("rms", "layer")
    for scope in ("head", "full")
    for gain in ("none", "shared", "per_head", "zero_centered")
    for bias in ((False, True) if kind == "layer" else (False,))
    for place in (("before_rope", "after_rope") if gain == "shared" else ("before_rope",))
] + [
    QKNormConfig("l2", gain=gain, place=place, scale_max=scale_max)
    for gain in ("none", "shared", "per_head")
    for place in ("before_rope", "after_rope")
    for scale_max in (None, 10.5)
]


def say(qk):
    """Return a name of a QK-Norm, for test ids."""
    return f"{qk.kind} {qk.scope} {qk.gain} {'bias ' * qk.bias}{qk.place} {qk.scale_max or ''}".strip()


def logits_of(qk, inputs_BTD, aligned=False, untied=False, n_kv_heads=0, noise=True):
    """Return the raw logits (B, H, T, S) of a model's first attention layer on these inputs, and the model."""
    untie = PerModalityConfig(qk_norm=untied and (qk.gain != "none" or qk.bias))
    shape = {"vocab_sizes": BLOCKS, "d_model": H * K, "n_heads": H, "n_layers": 1, "n_kv_heads": n_kv_heads}
    config = ModelConfig(**shape, qk_norm=qk, per_modality=untie)
    model = EarlyFusionTransformer(config).double()
    layer, generator = model.blocks[0].attention, torch.Generator().manual_seed(3)
    for norm in (layer.q_norm, layer.k_norm):
        for parameter in norm.parameters() if noise else ():
            parameter.data += torch.empty_like(parameter).uniform_(-0.5, 0.5, generator=generator)
    if aligned:
        for w in (layer.w_q.weight, layer.w_k.weight):
            w.data = torch.eye(H * K, dtype=torch.float64)[: len(w)]
    seen, modality_BT = {}, torch.arange(T).expand(len(inputs_BTD), T) % len(BLOCKS)
    with torch.no_grad():
        rope = rope_tables(T, K, 10000.0, inputs_BTD.device)
        layer(inputs_BTD, rope, mask_of("math", T, rope[0].device), modality_BT, seen.__setitem__)
    return config.attn_scale_value * seen["q"] @ seen["k"].transpose(-1, -2), model


def adversaries():
    """Return adversarial inputs: large values, heavy tails, single channels, constant rows, alternating signs."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(6, T, H * K, generator=generator, dtype=torch.float64)
    one_channel = torch.eye(H * K, dtype=torch.float64)[:T].expand(1, T, H * K)
    signs = torch.ones(1, T, H * K, dtype=torch.float64)
    signs[..., ::2] = -1
    return torch.cat((x, 1e4 * x, x**5, 1e3 * one_channel, signs, -50 * signs, torch.ones_like(signs)))


@pytest.mark.parametrize("qk", EVERY_QK_NORM, ids=say)
def test_the_bound_of_the_probe_holds_for_every_qk_norm(qk):
    for aligned, untied, n_kv_heads in ((False, False, 2), (True, False, 0), (True, True, 0)):
        logits, model = logits_of(qk, adversaries(), aligned, untied, n_kv_heads)
        bound = float(logit_bound(model, 0))
        assert logits.abs().max() <= bound * (1 + 1e-6)
        # Without the norm the same queries and keys exceed the bound.
        assert logits_of(QKNormConfig(), adversaries(), aligned)[0].abs().max() > bound


TIGHT = [qk for qk in EVERY_QK_NORM if not qk.bias and qk.scale_max is None]


@pytest.mark.parametrize("qk", TIGHT, ids=say)
def test_aligned_vectors_reach_the_bound(qk):
    # All initial gains are equal. Then these inputs give the longest possible normalized vector: an input with one
    # nonzero channel or, for LayerNorm, an input of alternating signs. At distance 0, query and key are this vector.
    logits, model = logits_of(qk, adversaries(), aligned=True, noise=False)
    bound = float(logit_bound(model, 0))
    if qk.scope == "full" and qk.kind == "layer":  # subtracting the mean moves a part of the norm to other heads
        assert 0.9 * bound / H < logits.abs().max() <= bound
    else:
        assert 0.999 * bound < logits.abs().max() <= bound * (1 + 1e-6)


def test_a_vector_of_no_length_stays_finite_in_every_norm():
    for qk in EVERY_QK_NORM:
        norm = qk_norm(qk, H, K, "q")
        x = torch.zeros(1, 1, H, K, requires_grad=True)
        y = norm(x)
        y.sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all(), say(qk)


def test_sigma_stays_fp32_under_autocast():
    layer = build(weight_reparam="sigma").blocks[0].attention.w_q
    outside = layer.sigma()
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer.sigma()
    assert inside.dtype == torch.float32 and torch.equal(inside, outside)
    rounded = layer.u.bfloat16() @ (layer.weight.bfloat16() @ layer.v.bfloat16())
    assert rounded.item() != outside.item()  # the control: in bf16 sigma has another value


@pytest.mark.parametrize("value", [0.0, 1e-25])
def test_a_matrix_of_next_to_nothing_gives_finite_numbers_and_recovers(value):
    layer = build(weight_reparam="sigma").blocks[0].attention.w_q
    with torch.no_grad():
        weight = layer.weight.clone()
        layer.weight.fill_(value)
        layer.power_step()
        assert layer(torch.ones(1, 16)).isfinite().all()
        layer.weight.copy_(weight)
        for _ in range(200):
            layer.power_step()
    torch.testing.assert_close(layer.sigma(), torch.linalg.matrix_norm(layer.weight, 2), rtol=1e-3, atol=0)


def test_the_clamp_of_the_cosine_scale_comes_before_the_exponential():
    """Without the clamp, a logarithm of 200 would overflow to a scale of inf with a NaN gradient."""
    norm = build(qk_norm=QKNormConfig("l2", scale_max=100.0)).blocks[0].attention.q_norm
    with torch.no_grad():
        norm.weight.fill_(200.0)
    out = norm(torch.randn(1, 2, 4, 4))
    out.sum().backward()
    assert norm.gain().item() == pytest.approx(100, rel=1e-5)
    assert (norm.weight.grad == 0).all()  # a scale at its maximum has no gradient
