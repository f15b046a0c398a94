"""The configuration of an image tokenizer, and a function that reads it. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mmqk.ranges import check_fields, number
from mmqk.store import parse_json
from mmqk.tokenizers.files import IMAGE_FILE, damaged, existing_file

FORMAT = "mmqk image tokenizer 1"
METADATA_KEY = "mmqk"
STRIDES = (4, 8, 16, 32)
"""Pixels per code after each of the four stages of ConvNeXt."""


@dataclass(frozen=True)
class ImageTokenizerConfig:
    """Shape of an image tokenizer.

    Attributes:
        image_size: side of an image in pixels.
        grid: side of the grid of codes; image_size / grid is 4, 8, 16 or 32.
        codes: entries of the codebook.
        code_dim: width of a code vector.
        decoder_width: channels of the decoder at the size of the grid; each doubling of the side halves them.
        decoder_depth: number of residual blocks of the decoder at the size of the grid.
    """

    image_size: int = number(64, 4, 4096)
    grid: int = number(8, 1, 1024)
    codes: int = number(512, 2, 2**24)
    code_dim: int = number(32, 1, 2**14)
    decoder_width: int = number(160, 1, 2**14)
    decoder_depth: int = number(2, 0, 256)

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.image_size % self.grid or self.stride not in STRIDES:
            grids = [str(self.image_size // s) for s in reversed(STRIDES) if self.image_size % s == 0]
            fit = f"use {' or '.join(grids)}" if grids else "use images whose side is a multiple of 4"
            raise ValueError(f"a grid of {self.grid} does not fit {self.image_size} px images: {fit}")
        if self.decoder_width % 2 ** (self.doublings - 1):
            raise ValueError(f"decoder_width {self.decoder_width} cannot be halved {self.doublings - 1} times")

    @property
    def stride(self) -> int:
        """Pixels from one code to the next."""
        return self.image_size // self.grid

    @property
    def doublings(self) -> int:
        """Number of times the decoder doubles the side: log2 of the stride."""
        return self.stride.bit_length() - 1

    @property
    def stages(self) -> int:
        """Number of encoder stages that gives this stride."""
        return self.doublings - 1


def read_config(folder: Path | str) -> ImageTokenizerConfig:
    """Return the configuration stored in a folder's `image.safetensors`, without its weights.

    Raises:
        UserError: the file is missing, damaged, or not an image tokenizer.
    """
    path = existing_file(folder, IMAGE_FILE)
    try:
        with safe_open(path, framework="numpy") as file:
            about = parse_json((file.metadata() or {}).get(METADATA_KEY, "{}"))
        if about.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        return ImageTokenizerConfig(**about["config"])
    except (SafetensorError, OSError, MemoryError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise damaged(path, error) from error
