"""Code that is optimized for a CPU equals the plain form bit for bit, gradients included."""

import pytest
import torch
from torch import Tensor

from mmqk.model.attention import apply_rope, rope_tables
from mmqk.model.norms import LayerNorm, RMSNorm


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
def test_norms(kind, plain, width):
    torch.manual_seed(0)
    norm = kind((width,), 1e-6)
    x, gain = torch.randn(3, 50, width) * 4, torch.randn(width)

    def ours(x: Tensor, gain: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": gain}, (x,))

    wanted = both(lambda x, gain: plain(x, gain, 1e-6), x, gain)
    assert same(both(ours, x, gain), wanted)
    assert not same(both(lambda x, gain: plain(x, gain, 1e-4), x, gain), wanted)  # the control


@pytest.mark.parametrize("heads", [1, 3])
def test_rotary_positions(heads):
    torch.manual_seed(0)
    rope = rope_tables(40, 16, 10000.0, torch.device("cpu"))
    x = torch.randn(2, 40, heads, 16)
    wanted = both(lambda x: plain_rope(x, rope), x)
    assert same(both(lambda x: apply_rope(x, rope), x), wanted)
    later = tuple(t.roll(1, dims=0) for t in rope)
    assert not same(both(lambda x: apply_rope(x, later), x), wanted)
