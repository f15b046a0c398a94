"""Norms over the last axes, always computed in at least fp32, and LayerScale.

Rounding order: `(w * x_normalized).to(x.dtype)`, with the product in fp32 (OLMo 2, Gemma). Llama, Qwen3 and
Chameleon round first, `w * x_normalized.to(x.dtype)`; in bf16 a quarter of the elements differ.

The result has the dtype of the input. torch's norms return fp32 under CUDA autocast (not under CPU autocast): with
them, an arm with QK-Norm would compute attention in a different precision from its control.
"""

import math

import torch
from torch import Tensor, nn

from .config import ModelConfig, QKNormConfig


def at_least_fp32(x: Tensor) -> Tensor:
    """Return `x` in fp32, or unchanged in fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Norm(nn.Module):
    """`gain * normalize(x) + bias` over the last axes; the subclasses define `normalize`.

    Args:
        shape: The last axes of the input, which are normalized together.
        eps: See the subclasses.
        gain_shape: Shape of gain and bias, broadcast over the input; `shape` by default.
        gain: plain (the parameter itself), zero_centered (1 + the parameter) or none.
        gain_init: Initial value of the gain.
        bias: Whether to add a bias, initially 0.

    Attributes:
        initial: Initial value of each parameter, by name, for `init_weights`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        eps: float,
        *,
        gain_shape: tuple[int, ...] | None = None,
        gain: str = "plain",
        gain_init: float = 1.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        gain_shape = shape if gain_shape is None else gain_shape
        self.shape, self.eps, self.offset = shape, eps, float(gain == "zero_centered")
        self.axes = tuple(range(-len(shape), 0))
        self.initial = {"weight": gain_init - self.offset, "bias": 0.0}
        first = torch.full(gain_shape, self.initial["weight"])
        self.weight = None if gain == "none" else nn.Parameter(first)
        self.bias = nn.Parameter(torch.zeros(gain_shape)) if bias else None

    def normalize(self, wide: Tensor) -> Tensor:
        """Normalize ``wide``, which is in at least fp32, without gain and bias."""
        raise NotImplementedError

    def mean(self, wide: Tensor) -> Tensor:
        """Return the mean over the normalized axes, which become axes of size 1.

        Unlike that of torch.mean, the backward pass divides the gradient first and then expands it.
        """
        return wide.sum(self.axes, keepdim=True) / math.prod(self.shape)

    def gain(self) -> Tensor | None:
        """Return the factor on the normalized input, or None if there is no gain."""
        if self.weight is None or not self.offset:
            return self.weight
        return self.offset + at_least_fp32(self.weight)  # in bf16, rounding the sum would lose the weight

    def longest(self) -> Tensor:
        """Return an upper bound on the L2 norm of the output of one head, for any input."""
        gain = self.gain()
        unit = math.prod(self.shape) ** 0.5
        length = torch.tensor(unit) if gain is None else unit * gain.abs().max()
        return length if self.bias is None else length + self.bias.norm(dim=-1).max()

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axes of `x`, of any leading shape; the result has the dtype of `x`."""
        with torch.autocast(x.device.type, enabled=False):
            y = self.normalize(at_least_fp32(x))
            gain = self.gain()
            y = y if gain is None else gain * y
            return (y if self.bias is None else y + self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the normalized shape, epsilon, gain and bias."""
        gain = "none" if self.weight is None else f"{'1 + ' if self.offset else ''}{tuple(self.weight.shape)}"
        return f"{self.shape}, eps={self.eps}, gain={gain}, bias={self.bias is not None}"


class RMSNorm(Norm):
    """`x / sqrt(mean(x^2) + eps)` with gain (Zhang & Sennrich 2019, arXiv 1910.07467, Eq. 4)."""

    def normalize(self, wide: Tensor) -> Tensor:
        return wide * torch.rsqrt(self.mean(wide.square()) + self.eps)


class LayerNorm(Norm):
    """`(x - mean) / sqrt(var + eps)` with gain and bias (Ba et al. 2016, arXiv 1607.06450, Eq. 4)."""

    def normalize(self, wide: Tensor) -> Tensor:
        centered = wide - self.mean(wide)
        return centered * torch.rsqrt(self.mean(centered.square()) + self.eps)


class L2Norm(Norm):
    """`scale * x / max(|x|, eps)` over one axis (Henry et al. 2020, arXiv 2010.04245; Swin V2, 2111.09883).

    Args:
        width: Size of the axis.
        eps: The smallest length.
        scale: The scale, or the initial value of a learned scale.
        scale_shape: Shape of the learned scale, broadcast over the input; None for a fixed scale.
        maximum: The largest learned scale. If this is set, the trained parameter is the logarithm of the scale, and
            it is clamped.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        scale: float = 1.0,
        scale_shape: tuple[int, ...] | None = None,
        maximum: float | None = None,
    ) -> None:
        super().__init__(
            (width,),
            eps,
            gain_shape=scale_shape,
            gain="none" if scale_shape is None else "plain",
            gain_init=scale if maximum is None else math.log(scale),
        )
        self.fixed, self.maximum = scale if scale_shape is None else 1.0, maximum

    def normalize(self, wide: Tensor) -> Tensor:
        return self.fixed * wide / wide.norm(dim=-1, keepdim=True).clamp_min(self.eps)

    def gain(self) -> Tensor | None:
        if self.weight is None or self.maximum is None:
            return self.weight
        return self.weight.clamp_max(math.log(self.maximum)).exp()

    def extra_repr(self) -> str:
        """Return the fields of `Norm`, and the scale."""
        scale = self.fixed if self.weight is None else "learned"
        return f"{super().extra_repr()}, scale={scale}, maximum={self.maximum}"

    def longest(self) -> Tensor:
        gain = self.gain()
        return torch.tensor(self.fixed) if gain is None else gain.abs().max()


class LayerScale(nn.Module):
    """A learned factor on each channel (Touvron et al. 2021, arXiv 2103.17239, section 2), or on each head."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), initial))
        self.initial = {"weight": initial}

    def forward(self, x: Tensor) -> Tensor:
        """Scale the last axis; the result has the dtype of `x`."""
        with torch.autocast(x.device.type, enabled=False):
            return (self.weight * at_least_fp32(x)).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the width and the initial value."""
        return f"{self.weight.numel()}, initial={self.initial['weight']:g}"


class ResidualGate(nn.Module):
    """`sqrt(1 - b^2) x + b f` with `b = sigmoid(w / temperature)` by channel (Muse Spark).

    As in Muse Spark, 1 - b^2 is at least 1e-3.
    """

    def __init__(self, width: int, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.weight = nn.Parameter(torch.zeros(width))
        self.initial = {"weight": 0.0}

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Return the new residual stream, in the dtype of `x`."""
        with torch.autocast(x.device.type, enabled=False):
            w = at_least_fp32(self.weight) / self.temperature
            b = torch.sigmoid(w)
            a = (torch.sigmoid(-w) * (1 + b)).clamp_min(1e-3).sqrt()  # 1 - b^2 without cancellation
            return (a * at_least_fp32(x) + b * at_least_fp32(branch)).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the width and temperature."""
        return f"{self.weight.numel()}, temperature={self.temperature:g}"


def stream_norm(config: ModelConfig, gain_init: float = 1.0, width: int | None = None) -> Norm:
    """Return a norm over the model width, or over ``width``, of the kind `config.norm`."""
    kind = {"rms": RMSNorm, "layer": LayerNorm}[config.norm]
    return kind(
        (width or config.d_model,), config.norm_eps, gain=config.norm_gain, gain_init=gain_init, bias=config.norm_bias
    )


def qk_norm(config: QKNormConfig, heads: int, head_dim: int, role: str) -> nn.Module:
    """Return the norm of queries, keys or values (role q, k or v), whose last axes are heads and head_dim."""
    if config.kind == "none" or (role == "v" and not config.normalize_v):
        return nn.Identity()
    if config.kind == "l2":
        if role != "q":  # only the queries have the scale
            return L2Norm(head_dim, config.eps)
        shape = {"none": None, "shared": (1,), "per_head": (heads, 1)}[config.gain]
        return L2Norm(head_dim, config.eps, scale=config.scale_init, scale_shape=shape, maximum=config.scale_max)
    kind = {"rms": RMSNorm, "layer": LayerNorm}[config.kind]
    return kind(
        (head_dim,) if config.scope == "head" else (heads, head_dim),
        config.eps,
        gain_shape=(heads, head_dim) if config.gain == "per_head" else (head_dim,),
        gain=config.gain if config.gain in ("none", "zero_centered") else "plain",
        bias=config.bias,
    )
