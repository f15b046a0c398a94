"""Encoder and decoder of the image tokenizer: timm's ConvNeXt and a stack of residual blocks.

Shapes: B batch, C channels, H height, W width, S image side, D code width, G grid side.
"""

from __future__ import annotations

from typing import Any

import timm
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn


def encoder(stages: int) -> Any:
    """Return the first `stages` stages of ConvNeXt-atto (Liu et al., 2201.03545).

    It maps (B, 3, S, S) to a list of feature maps. The last map is (B, C, S/stride, S/stride). The stride is 4 after
    one stage and doubles with each further stage.
    """
    return timm.create_model(
        "convnext_atto",
        pretrained=False,
        features_only=True,
        out_indices=tuple(range(stages)),
        ls_init_value=1.0,  # timm's default 1e-6 is for very deep networks and needs more steps in this one
    )


class ResidualBlock(nn.Module):
    """x + conv(GELU(conv(norm(x)))) with 3x3 convolutions; on a CPU, three times as fast as a ConvNeXt block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = LayerNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW + self.conv2(F.gelu(self.conv1(self.norm(x_BCHW))))


class Decoder(nn.Module):
    """Maps code vectors on the grid to pixels.

    ```
    (B, D, G, G) ── 3x3 ── blocks ── [1x1, shuffle x2, block] ... ── norm ── 3x3, shuffle x2 ──> (B, 3, S, S)
    ```

    Each doubling of the side halves the number of channels; the last doubling gives the pixels.
    """

    def __init__(self, code_dim: int, width: int, doublings: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(code_dim, width, 3, padding=1)
        layers: list[nn.Module] = [ResidualBlock(width) for _ in range(depth)]
        for _ in range(doublings - 1):
            layers += [nn.Conv2d(width, 2 * width, 1), nn.PixelShuffle(2)]
            width //= 2
            layers.append(ResidualBlock(width))
        self.layers = nn.Sequential(*layers)
        self.norm = LayerNorm2d(width)
        self.head = nn.Conv2d(width, 3 * 4, 3, padding=1)

    def forward(self, z_BCHW: Tensor) -> Tensor:
        return F.pixel_shuffle(self.head(self.norm(self.layers(self.stem(z_BCHW)))), 2)
