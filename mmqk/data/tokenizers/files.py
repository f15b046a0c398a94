"""The two files of a tokenizer folder, the shape of an image tokenizer, and the joint vocabulary, without torch.

The joint vocabulary has special tokens and text entries, then image codes.

```
id    0     1     2     3       4        5 ...            5 + text_size ...
      <bos> <eos> <pad> <image> </image> BPE entries      image codes
      └──────────── text block ─────────────────────────┘ └─ image block ─┘
```

Special tokens count as text. The block of an id decides its modality.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mmqk.model.ranges import check_fields, number
from mmqk.store import UserError

TEXT_FILE = "text.json"
IMAGE_FILE = "image.safetensors"
HASH_DIGITS = 10

TRAIN_COMMAND = "mmqk data tokenizers"
SPECIALS = ("<bos>", "<eos>", "<pad>", "<image>", "</image>")
BOS, EOS, PAD, BEGIN_IMAGE, END_IMAGE = range(len(SPECIALS))
FORMAT = "mmqk image tokenizer 1"
METADATA_KEY = "mmqk"
STRIDES = (4, 8, 16, 32)
"""Pixels per code after each of the four stages of ConvNeXt."""


def existing_file(folder: Path | str, name: str) -> Path:
    """Return the path of one tokenizer file.

    Raises:
        UserError: the folder has no such file.
    """
    path = Path(folder) / name
    if not path.is_file():
        raise UserError(
            f"The tokenizer file {path} is missing: give the folder that has it, or train it with `{TRAIN_COMMAND}`."
        )
    return path


def damaged(path: Path, why: object) -> UserError:
    """Return the error for a tokenizer file that exists but cannot be used."""
    reason = " ".join(str(why).split()).rstrip(".")
    return UserError(
        f"The tokenizer file {path} cannot be used ({reason}): restore it or train it again with"
        f" `{TRAIN_COMMAND} --overwrite`."
    )


def tokenizers_hash(folder: Path | str) -> str:
    """Return the hash of the bytes of both files (10 hex digits), on which the name of a token cache depends.

    Raises:
        UserError: one of the files is missing.
    """
    digest = hashlib.sha256()
    for name in (TEXT_FILE, IMAGE_FILE):
        content = existing_file(folder, name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:HASH_DIGITS]


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
    def images_at_once(self) -> int:
        """Number of images to encode or decode at once, which bounds memory: as many pixels as 256 images of 64 px,
        and 2**25 distances to codes."""
        return max(1, min(256 * 64**2 // self.image_size**2, 2**25 // (self.grid**2 * self.codes)))

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
            about = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
        if about.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        return ImageTokenizerConfig(**about["config"])
    except (SafetensorError, OSError, MemoryError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise damaged(path, error) from error


def vocab_sizes_of(folder: Path | str) -> dict[str, int]:
    """Return the size of each modality's contiguous block, in order; the first block starts at id 0.

    The joint id of a text token is its id in the text tokenizer plus ``len(SPECIALS)``; that of an image code is the
    code plus the size of the text block.

    Args:
        folder: the folder of the two tokenizers.

    Raises:
        UserError: a tokenizer file is missing or damaged.
    """
    path = existing_file(folder, TEXT_FILE)
    try:
        entries = len(json.loads(path.read_bytes())["model"]["vocab"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, repr(error)) from error
    return {"text": len(SPECIALS) + entries, "image": read_config(folder).codes}
