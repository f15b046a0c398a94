"""The files of a tokenizer folder: the text tokenizer, the shape of the image tokenizer, and the joint vocabulary of
both. No torch.

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
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mmqk.model.ranges import check_fields, number
from mmqk.store import UserError

TEXT_FILE = "text.json"
IMAGE_FILE = "image.safetensors"

TRAIN_COMMAND = "mmqk data tokenizers"
SPECIALS = ("<bos>", "<eos>", "<pad>", "<image>", "</image>")
BOS, EOS, PAD, BEGIN_IMAGE, END_IMAGE = range(len(SPECIALS))
FORMAT = "mmqk image tokenizer 1"
# Entries for single bytes, which every byte-level vocabulary has, so that any text has ids.
BYTES = 256
STRIDES = (4, 8, 16, 32)  # pixels per code after each of the four stages of ConvNeXt


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
    return digest.hexdigest()[:10]


class TextTokenizer:
    """Byte-level BPE, which encodes every string without loss.

    It has no special tokens; the joint vocabulary adds them.

    Attributes:
        size: number of entries; ids are 0 to size - 1.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()

    @classmethod
    def load(cls, folder: Path | str) -> TextTokenizer:
        """Read `text.json` of a tokenizer folder.

        Raises:
            UserError: the file is missing or is not a tokenizer.
        """
        path = existing_file(folder, TEXT_FILE)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every error in a file
            raise damaged(path, error) from error
        # The block of text in the joint vocabulary has one id for each entry of the model.
        if sorted(tokenizer.get_vocab().values()) != list(range(tokenizer.get_vocab_size(with_added_tokens=False))):
            raise damaged(path, "model.vocab does not have all ids from 0 on, or there are added tokens")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer)

    @classmethod
    def train(cls, texts: Iterable[str], size: int = 1024) -> TextTokenizer:
        """Train a vocabulary of `size` entries on texts, or of fewer if the texts give no more. The same texts in the
        same order give the same entries.

        Raises:
            UserError: `size` is below 256 (one entry per byte).
        """
        if size < BYTES:
            raise UserError(f"--text-size is {size}: give at least {BYTES}, one entry per byte.")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, each from 0 to size - 1."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 (part of a character) become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids])

    def to_json(self) -> str:
        """Return the content of `text.json`."""
        return self._tokenizer.to_str(pretty=False) + "\n"


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

    def metadata(self) -> dict[str, str]:
        """Return the metadata of `image.safetensors`."""
        # Use a single key: safetensors writes several keys in any order, but equal tokenizers must give equal bytes.
        return {"mmqk": json.dumps({"format": FORMAT, "config": asdict(self)})}


def read_config(folder: Path | str) -> ImageTokenizerConfig:
    """Return the configuration stored in a folder's `image.safetensors`, without its weights.

    Raises:
        UserError: the file is missing, damaged, or not an image tokenizer.
    """
    path = existing_file(folder, IMAGE_FILE)
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get("mmqk", "{}"))
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
