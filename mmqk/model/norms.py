"""RMSNorm and LayerNorm over the last axis, computed in fp32 whatever the precision around them.

Rounding order: `(w * x_normalised).to(x.dtype)`, all of it in fp32 (OLMo 2, Gemma). Llama, Qwen3 and
Chameleon round first, `w * x_normalised.to(x.dtype)`; in bf16 a quarter of the elements differ.

The result has the dtype of the input. torch's own norms return fp32 under CUDA autocast (not under CPU
autocast), so that a QK-Norm arm would run its attention in another precision than its control.
"""

import torch
from torch import Tensor, nn


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` itself in fp32 and fp64, in fp32 when it is narrower."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """`w * x / sqrt(mean(x^2) + eps)` over the last axis (Zhang & Sennrich 2019, arXiv 1910.07467, Eq. 4)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of `x`, of any leading shape; the result has the dtype of `x`."""
        with torch.autocast(x.device.type, enabled=False):
            wide = at_least_fp32(x)
            rms_inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            return (self.weight * (wide * rms_inverse)).to(x.dtype)

    def extra_repr(self) -> str:
        """Width and epsilon."""
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(nn.Module):
    """`w * (x - mean) / sqrt(var + eps) + b` over the last axis (Ba et al. 2016, arXiv 1607.06450, Eq. 4)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of `x`, of any leading shape; the result has the dtype of `x`."""
        with torch.autocast(x.device.type, enabled=False):
            wide = at_least_fp32(x)
            centred = wide - wide.mean(-1, keepdim=True)
            std_inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
            return (self.weight * (centred * std_inverse) + self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        """Width and epsilon."""
        return f"{self.weight.numel()}, eps={self.eps}"
