"""Norms equal torch's in value and gradient, keep the dtype of the input, and round only once.

`test_peers` tests their variants.
"""

import pytest
import torch
import torch.nn.functional as F

from mmqk.model import QKNormConfig
from mmqk.model.norms import L2Norm, LayerNorm, LayerScale, RMSNorm, qk_norm

DIM, EPS = 24, 1e-5


def pair(kind, dtype=torch.float32, eps=EPS):
    """Return our norm and torch's, with the same random gains and biases."""
    ours, torchs = {
        "rms": (RMSNorm((DIM,), eps), torch.nn.RMSNorm(DIM, EPS)),
        "layer": (LayerNorm((DIM,), eps, bias=True), torch.nn.LayerNorm(DIM, EPS)),
    }[kind]
    generator = torch.Generator().manual_seed(1)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, 1.0, 0.3, generator=generator)
    torchs.load_state_dict(ours.state_dict())
    return ours.to(dtype), torchs.to(dtype)


def sample(*shape, dtype=torch.float32):
    return 0.5 + 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=dtype)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_equals_torch_in_value_and_gradient(kind, dtype, tolerance):
    ours, torchs = pair(kind, dtype)
    x = sample(3, 5, DIM, dtype=dtype).requires_grad_()
    upstream = sample(3, 5, DIM, dtype=dtype)
    y, reference = ours(x), torchs(x)
    torch.testing.assert_close(y, reference, rtol=0, atol=tolerance)
    grads = torch.autograd.grad(y, [x, *ours.parameters()], upstream)
    expected = torch.autograd.grad(reference, [x, *torchs.parameters()], upstream)
    for grad, reference_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference_grad, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_another_epsilon_is_seen(kind):
    ours, torchs = pair(kind, eps=1e-3)
    x = sample(3, DIM)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours(x), torchs(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_input_gives_the_fp32_result_rounded_once(kind, autocast):
    ours, torchs = pair(kind)
    x = sample(64, DIM).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = ours(x)
    assert y.dtype == torch.bfloat16
    once = torchs(x.float()).bfloat16()
    # fp32 sums in another order move only a few values across a bf16 rounding boundary.
    assert (y != once).float().mean() < 0.01
    if kind == "rms":
        normalized = F.rms_norm(x.float(), (DIM,), eps=EPS)
        twice = (torchs.weight * normalized.bfloat16()).bfloat16()
        assert (y != twice).float().mean() > 0.1


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_fp32_input_stays_fp32_under_autocast(kind):
    ours, _ = pair(kind)
    x = sample(8, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, ours(x))


H = 3
OTHERS = {
    "zero-centered": (
        RMSNorm((DIM,), EPS, gain="zero_centered"),
        lambda x, w: F.rms_norm(x, (DIM,), 1 + w, EPS),
    ),
    "no gain": (LayerNorm((DIM,), EPS, gain="none"), lambda x: F.layer_norm(x, (DIM,), eps=EPS)),
    "l2": (L2Norm(DIM, EPS, scale=4.0, scale_shape=(1,)), lambda x, w: w * F.normalize(x, dim=-1)),
    "clamped": (
        L2Norm(DIM, EPS, scale=4.0, scale_shape=(1,), maximum=5.0),
        lambda x, w: w.exp().clamp(max=5.0) * F.normalize(x, dim=-1),
    ),
    "layer scale": (LayerScale(DIM, 0.3), lambda x, w: w * x),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_norm_rounds_once_and_keeps_the_dtype(name):
    ours, formula = OTHERS[name]
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.1
    x = sample(64, DIM)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            wide, narrow = ours(x), ours(x.bfloat16())
        assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
        torch.testing.assert_close(wide, formula(x, *ours.parameters()), rtol=0, atol=1e-5)
        once = formula(x.bfloat16().float(), *ours.parameters()).bfloat16()
        assert (narrow != once).float().mean() < 0.01
    twice = x.bfloat16() * formula(x.bfloat16(), *(p.bfloat16() for p in ours.parameters()))
    assert (narrow != twice).float().mean() > 0.1


@pytest.mark.parametrize(
    ("config", "shape", "gain"),
    [
        (QKNormConfig("rms"), (DIM,), (DIM,)),
        (QKNormConfig("layer", gain="per_head", bias=True), (DIM,), (H, DIM)),
        (QKNormConfig("rms", "full"), (H, DIM), (DIM,)),
        (QKNormConfig("rms", "full", "per_head"), (H, DIM), (H, DIM)),
        (QKNormConfig("rms", gain="none"), (DIM,), None),
        (QKNormConfig("l2"), (DIM,), (1,)),
        (QKNormConfig("l2", gain="per_head", scale_max=100.0), (DIM,), (H, 1)),
    ],
)
def test_shapes_of_what_is_normalized_and_of_gain_and_bias(config, shape, gain):
    norm = qk_norm(config, H, DIM, "q")
    assert norm.shape == shape
    assert (None if norm.weight is None else tuple(norm.weight.shape)) == gain
    assert (None if norm.bias is None else tuple(norm.bias.shape)) == (gain if config.bias else None)
    assert str(gain).strip("None") in repr(norm)
    assert isinstance(qk_norm(config, H, DIM, "v"), torch.nn.Identity)
    # With kind l2, only the queries have a learned scale.
    assert (list(qk_norm(config, H, DIM, "k").parameters()) == []) == (gain is None or config.kind == "l2")
