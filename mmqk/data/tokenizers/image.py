"""Convert images to codes and back with a vector-quantized autoencoder (van den Oord et al., 1711.00937).

`mmqk.data.tokenizers.train_image` trains it.

Shapes: B images, C channels, H height, W width, G grid side, N = G * G codes per image, V codes in the
codebook, D code width.
"""

from __future__ import annotations

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from mmqk.data.tokenizers.files import IMAGE_FILE, ImageTokenizerConfig, damaged, existing_file, read_config

# Largest number of distances from vectors to codes in memory at a time (64 MB).
DISTANCES = 2**24


class ImageTokenizer(nn.Module):
    """Converts images to a grid of codes and back; by default 64 px images to a grid of 8x8 codes.

    ```
    images_BCHW ── encoder ── channel norm ── project ── nearest code ──> codes_BN
    codes_BN    ── codebook ── decoder ──> images_BCHW
    ```

    Attributes:
        grid: (G, G), rows and columns of codes.
        size: number of codes in the codebook.
        image_size: side of an image in pixels.
    """

    def __init__(self, config: ImageTokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.grid = (config.grid, config.grid)
        self.size = config.codes
        self.image_size = config.image_size
        # The first stages of ConvNeXt-atto (Liu et al., 2201.03545) map (B, 3, S, S) to a list of feature maps. The
        # stride is 4 after one stage and doubles with each further stage.
        self.encoder = timm.create_model(
            "convnext_atto",
            pretrained=False,
            features_only=True,
            out_indices=tuple(range(config.doublings - 1)),
            ls_init_value=1.0,  # timm's default 1e-6 is for very deep networks and needs more steps in this one
        )
        self.project = nn.Conv2d(self.encoder.feature_info.channels()[-1], config.code_dim, 1)  # type: ignore
        self.decoder = Decoder(config.code_dim, config.decoder_width, config.doublings, config.decoder_depth)
        self.codebook_VD = nn.Buffer(torch.zeros(config.codes, config.code_dim))

    @classmethod
    def load(cls, folder: Path | str) -> ImageTokenizer:
        """Read `image.safetensors` of a tokenizer folder. The result is in evaluation mode, with frozen fp32 weights.

        Raises:
            UserError: the file is missing, damaged, or not an image tokenizer.
        """
        config = read_config(folder)
        path = existing_file(folder, IMAGE_FILE)
        tokenizer = cls(config)
        try:
            tokenizer.load_state_dict(load_file(path))
        except (SafetensorError, OSError, MemoryError, RuntimeError) as error:
            raise damaged(path, str(error).splitlines()[0]) from error
        return tokenizer.eval().requires_grad_(False)

    def to_bytes(self) -> bytes:
        """Return the content of `image.safetensors`: weights in fp16, the configuration in the metadata."""
        weights = {name: w.detach().cpu().half().contiguous() for name, w in self.state_dict().items()}
        return save(weights, self.config.metadata())

    def features(self, images_BCHW: Tensor) -> Tensor:
        """Return the vectors before quantization, (B, D, G, G); pixels are in [0, 1]."""
        h_BCHW = self.encoder(images_BCHW * 2 - 1)[-1]
        # The norm fixes the scale of the vectors. It has no weights, because the projection after it has weights.
        h_BHWC = h_BCHW.permute(0, 2, 3, 1)
        return self.project(F.layer_norm(h_BHWC, h_BHWC.shape[-1:]).permute(0, 3, 1, 2))

    def quantize(self, z_BDHW: Tensor) -> Tensor:
        """Return the nearest code of each vector by Euclidean distance, row-major, (B, N) int64."""
        z_BND = z_BDHW.flatten(2).transpose(1, 2)
        # Compare |z - c|^2 without |z|^2, which is equal for all codes. Chunks limit the memory.
        squares_V, codes_DV = self.codebook_VD.square().sum(1), self.codebook_VD.T
        parts = z_BND.flatten(0, 1).split(max(1, DISTANCES // self.size))
        return torch.cat([(squares_V - 2 * z @ codes_DV).argmin(-1) for z in parts]).view(z_BND.shape[:2])

    @torch.no_grad()
    def encode(self, images_BCHW: Tensor) -> Tensor:
        """Return the codes of images with pixels in [0, 1]: (B, N) int64, row-major."""
        return self.quantize(self.features(images_BCHW.float()))

    @torch.no_grad()
    def decode(self, codes_BN: Tensor) -> Tensor:
        """Return the images of codes (B, N): (B, 3, image_size, image_size), fp32 in [0, 1]."""
        z_BND = self.codebook_VD[codes_BN.long()]
        return self.decoder(z_BND.transpose(1, 2).unflatten(2, self.grid)).clamp(0, 1)


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
