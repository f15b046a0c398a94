"""The joint vocabulary: special tokens and text entries, then image codes.

```
id    0     1     2     3       4        5 ...            5 + text_size ...
      <bos> <eos> <pad> <image> </image> BPE entries      image codes
      └──────────── text block ─────────────────────────┘ └─ image block ─┘
```

Special tokens count as text. The block of an id decides its modality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from mmqk.store import DamagedFile, read_json
from mmqk.tokenizers.files import TEXT_FILE, damaged, existing_file
from mmqk.tokenizers.image_config import read_config

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 2**28  # largest size of text.json
SPECIALS = ("<bos>", "<eos>", "<pad>", "<image>", "</image>")
BOS, EOS, PAD, BEGIN_IMAGE, END_IMAGE = range(len(SPECIALS))

Ids = TypeVar("Ids", np.ndarray, "Tensor", list[int])


@dataclass(frozen=True)
class JointVocabulary:
    """Maps text ids and image codes to one range of ids, and back.

    All methods accept and return numpy arrays or torch tensors of any shape, or lists of int. They do not check the
    ids.

    Attributes:
        text_size: entries of the text tokenizer.
        image_size: codes of the image tokenizer.
    """

    text_size: int
    image_size: int

    @classmethod
    def load(cls, folder: Path | str) -> JointVocabulary:
        """Return the vocabulary of the two tokenizers in a folder. It depends only on their sizes.

        Raises:
            UserError: a tokenizer file is missing or damaged.
        """
        path = existing_file(folder, TEXT_FILE)
        try:
            record = read_json(path, {"model": {"vocab": {"*": int}}}, most=MOST_BYTES) or {}
            text_size = len(record["model"]["vocab"])
        except (DamagedFile, KeyError) as error:
            why = error.why if isinstance(error, DamagedFile) else f"there is no {error}"
            raise damaged(path, why) from error
        return cls(text_size=text_size, image_size=read_config(folder).codes)

    @property
    def size(self) -> int:
        """Number of ids: special tokens, text entries and image codes."""
        return len(SPECIALS) + self.text_size + self.image_size

    @property
    def vocab_sizes(self) -> dict[str, int]:
        """Size of each modality's contiguous block, in order; the first block starts at id 0."""
        return {"text": len(SPECIALS) + self.text_size, "image": self.image_size}

    @property
    def image_offset(self) -> int:
        """The id of image code 0, which is the end of the text block."""
        return len(SPECIALS) + self.text_size

    def text(self, ids: Ids) -> Ids:
        """Convert ids of the text tokenizer to joint ids."""
        return _shift(ids, len(SPECIALS))

    def image(self, codes: Ids) -> Ids:
        """Convert image codes to joint ids."""
        return _shift(codes, self.image_offset)

    def text_ids(self, joint: Ids) -> Ids:
        """Convert joint ids to ids of the text tokenizer, the inverse of `text`; special tokens become negative."""
        return _shift(joint, -len(SPECIALS))

    def image_codes(self, joint: Ids) -> Ids:
        """Convert joint ids to image codes, the inverse of `image`; ids of text become negative."""
        return _shift(joint, -self.image_offset)


def _shift(ids: Ids, offset: int) -> Ids:
    if isinstance(ids, Sequence):
        return cast(Ids, [int(i) + offset for i in ids])
    return ids + offset
