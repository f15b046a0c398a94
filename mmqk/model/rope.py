"""Rotary position embeddings. Shapes are in the names: B batch, T tokens, H heads, K head_dim."""

import math

import torch
from torch import Tensor

from .config import RopeScalingConfig
from .norms import at_least_fp32

Rope = tuple[Tensor, Tensor]  # cosine and signed sine of every position's angles


def rope_tables(
    T: int, K: int, theta: float, device: torch.device, scaling: RopeScalingConfig | None = None, heads: int = 1
) -> Rope:
    """Return the cosine and signed sine of every position's angles, fp32, (T, 1, K) each (RoFormer, arXiv
    2104.09864).

    Channel i pairs with i + K/2 (the half-split layout of Hugging Face's Llama); pair i rotates by
    `position * theta^(-2i/K)`. The sine is negative in the first half, which `apply_rope` relies on.

    On a CPU the tables are (T, heads, K), because a product with a factor that is broadcast over heads would take
    three times as long.
    """
    frequency = theta ** (torch.arange(0, K, 2, dtype=torch.float32, device=device) / -K)
    if scaling is not None and scaling.kind != "none":
        frequency = _scaled(frequency, scaling)
    angle_TK2 = torch.arange(T, dtype=torch.float32, device=device)[:, None] * frequency
    cos, sin = angle_TK2.cos(), angle_TK2.sin()
    cos_T1K, signed_sin_T1K = torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
    if device.type != "cpu":
        return cos_T1K, signed_sin_T1K
    return cos_T1K.expand(-1, heads, -1).contiguous(), signed_sin_T1K.expand(-1, heads, -1).contiguous()


def _scaled(frequency: Tensor, scaling: RopeScalingConfig) -> Tensor:
    slow = frequency / scaling.factor
    if scaling.kind == "linear":
        return slow
    # Number of rotations of this pair within the length of the original training.
    turns = scaling.original_length * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequency + (1 - kept) * slow


def apply_rope(x_BTHK: Tensor, rope: Rope) -> Tensor:
    """Rotate every pair of channels by its position's angle, in fp32; the result has the input's dtype."""
    cos_THK, signed_sin_THK = (t[:, : x_BTHK.shape[2]] for t in rope)  # keys may have fewer heads than queries
    wide = at_least_fp32(x_BTHK)
    swapped = wide.roll(wide.shape[-1] // 2, dims=-1)
    return (wide * cos_THK + swapped * signed_sin_THK).to(x_BTHK.dtype)
