"""The image tokenizer's encoder and decoder in plain torch.

The encoder restates the first stages of ConvNeXt (Liu et al., 2201.03545, Fig. 4; the layout of timm's
`features_only` models) under timm's own parameter names, so that weights trained through timm load here and
an image can be tokenized where timm is not installed. The decoder is a stack of residual blocks.

Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmqk.tokenizers.image_config import CONVNEXT_WIDTHS, STEM_STRIDE

CONVNEXT_DEPTHS = (2, 2, 6, 2)
"""Blocks in each of the four stages of timm's `convnext_atto`."""


class LayerNorm2d(nn.Module):
    """LayerNorm over the channels of a (B, C, H, W) tensor."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BHWC = x_BCHW.permute(0, 2, 3, 1)
        return F.layer_norm(x_BHWC, self.weight.shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class PointwiseMlp(nn.Module):
    """1x1 convolution, GELU, 1x1 convolution."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, hidden, 1)
        self.fc2 = nn.Conv2d(hidden, channels, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BCHW)))


class ConvNeXtBlock(nn.Module):
    """One ConvNeXt block.

    ```
    x ──┬── conv_dw 7x7 ── norm ── fc1 ── GELU ── fc2 ── · gamma ──(+)──>
        └──────────────────────────────────────────────────────────┘
    ```
    """

    def __init__(self, channels: int, gamma: float = 1.0) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), gamma))
        self.conv_dw = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = LayerNorm2d(channels)
        self.mlp = PointwiseMlp(channels, 4 * channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW + self.gamma[:, None, None] * self.mlp(self.norm(self.conv_dw(x_BCHW)))


class ConvNeXtStage(nn.Module):
    """Halve the side length (except in the first stage), then some blocks."""

    def __init__(self, channels_in: int, channels: int, depth: int, downsample: bool) -> None:
        super().__init__()
        self.downsample: nn.Module = nn.Identity()
        if downsample:
            self.downsample = nn.Sequential(LayerNorm2d(channels_in), nn.Conv2d(channels_in, channels, 2, 2))
        self.blocks = nn.Sequential(*(ConvNeXtBlock(channels) for _ in range(depth)))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.blocks(self.downsample(x_BCHW))


class ConvNeXtFeatures(nn.Module):
    """The first `stages` stages of ConvNeXt-atto: (B, 3, S, S) to (B, C, S/stride, S/stride).

    The stride is 4 after one stage and doubles with each further one. Parameter names are those of
    `timm.create_model("convnext_atto", features_only=True, out_indices=range(stages))`.
    """

    def __init__(self, stages: int) -> None:
        super().__init__()
        if not 1 <= stages <= len(CONVNEXT_WIDTHS):
            raise ValueError(f"stages is {stages}; ConvNeXt has 1 to {len(CONVNEXT_WIDTHS)}")
        self.stages = stages
        self.channels = CONVNEXT_WIDTHS[stages - 1]
        self.stem_0 = nn.Conv2d(3, CONVNEXT_WIDTHS[0], STEM_STRIDE, STEM_STRIDE)
        self.stem_1 = LayerNorm2d(CONVNEXT_WIDTHS[0])
        for i in range(stages):
            before = CONVNEXT_WIDTHS[max(i - 1, 0)]
            stage = ConvNeXtStage(before, CONVNEXT_WIDTHS[i], CONVNEXT_DEPTHS[i], downsample=i > 0)
            self.add_module(f"stages_{i}", stage)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.stem_1(self.stem_0(x_BCHW))
        for i in range(self.stages):
            x_BCHW = self.get_submodule(f"stages_{i}")(x_BCHW)
        return x_BCHW


class ResidualBlock(nn.Module):
    """x + conv(GELU(conv(norm(x)))), both 3x3: on a CPU a third of the time of a ConvNeXt block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = LayerNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW + self.conv2(F.gelu(self.conv1(self.norm(x_BCHW))))


class Decoder(nn.Module):
    """Code vectors on the grid back to pixels.

    ```
    (B, D, G, G) ── 3x3 ── blocks ── [1x1, shuffle x2, block] ... ── norm ── 3x3, shuffle x2 ──> (B, 3, S, S)
    ```

    Each doubling of the side halves the width; the last one leads straight to pixels.
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
