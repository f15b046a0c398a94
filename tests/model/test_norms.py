"""Norms keep the dtype of the input and round only once; code that is optimized for a CPU equals the plain form bit
for bit. `test_peers` compares the values of norms with those of torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmqk.model.attention import apply_rope, rope_tables
from mmqk.model.norms import L2Norm, LayerNorm, LayerScale, RMSNorm

DIM, EPS = 24, 1e-5
NORMS = {
    "rms": (RMSNorm((DIM,), EPS), lambda x, w: F.rms_norm(x, (DIM,), w, EPS)),
    "zero-centered": (RMSNorm((DIM,), EPS, gain="zero_centered"), lambda x, w: F.rms_norm(x, (DIM,), 1 + w, EPS)),
    "layer": (LayerNorm((DIM,), EPS, bias=True), lambda x, w, b: F.layer_norm(x, (DIM,), w, b, EPS)),
    "no gain": (LayerNorm((DIM,), EPS, gain="none"), lambda x: F.layer_norm(x, (DIM,), eps=EPS)),
    "l2": (L2Norm(DIM, EPS, scale=4.0, scale_shape=(1,)), lambda x, w: w * F.normalize(x, dim=-1)),
    "clamped": (
        L2Norm(DIM, EPS, scale=4.0, scale_shape=(1,), maximum=5.0),
        lambda x, w: w.exp().clamp(max=5.0) * F.normalize(x, dim=-1),
    ),
    "layer scale": (LayerScale(DIM, 0.3), lambda x, w: w * x),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_rounds_once_and_keeps_the_dtype(name):
    ours, formula = NORMS[name]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.1 * torch.rand(parameter.shape, generator=generator)
    x = 0.5 + 2 * torch.randn(64, DIM, generator=generator)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            wide, narrow = ours(x), ours(x.bfloat16())
        assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
        torch.testing.assert_close(wide, formula(x, *ours.parameters()), rtol=0, atol=1e-5)
        once = formula(x.bfloat16().float(), *ours.parameters()).bfloat16()
        # fp32 sums in another order move only a few values across a bf16 rounding boundary.
        assert (narrow != once).float().mean() < 0.01
    if name == "rms":  # the control: the normalized input is rounded before the gain
        normalized = F.rms_norm(x.bfloat16().float(), (DIM,), eps=EPS)
        twice = (ours.weight * normalized.bfloat16()).bfloat16()
        assert (narrow != twice).float().mean() > 0.1


def plain_rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def plain_layer(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return plain_rms(x - x.mean(-1, keepdim=True), gain, eps)


def plain_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    return x * rope[0] + x.roll(x.shape[-1] // 2, dims=-1) * rope[1]


def both(function, *inputs: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the inputs for a random output gradient."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    torch.manual_seed(5)
    out.backward(torch.randn_like(out))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("kind", "plain"), [(RMSNorm, plain_rms), (LayerNorm, plain_layer)])
@pytest.mark.parametrize("width", [64, 24])  # a division by 64 is exact, a division by 24 rounds
def test_norms_equal_the_plain_form(kind, plain, width):
    torch.manual_seed(0)
    norm = kind((width,), 1e-6)
    x, gain = torch.randn(3, 50, width) * 4, torch.randn(width)

    def ours(x: Tensor, gain: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": gain}, (x,))

    wanted = both(lambda x, gain: plain(x, gain, 1e-6), x, gain)
    assert same(both(ours, x, gain), wanted)
    assert not same(both(lambda x, gain: plain(x, gain, 1e-4), x, gain), wanted)  # the control


@pytest.mark.parametrize("heads", [1, 3])
def test_rope_equals_the_plain_form(heads):
    torch.manual_seed(0)
    rope = rope_tables(40, 16, 10000.0, torch.device("cpu"))
    x = torch.randn(2, 40, heads, 16)
    wanted = both(lambda x: plain_rope(x, rope), x)
    assert same(both(lambda x: apply_rope(x, rope), x), wanted)
    later = tuple(t.roll(1, dims=0) for t in rope)
    assert not same(both(lambda x: apply_rope(x, later), x), wanted)
