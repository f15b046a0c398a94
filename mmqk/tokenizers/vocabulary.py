"""The joint vocabulary: specials, then text ids, then image codes, one contiguous block a modality.

Specials count as text. Ids may be numbers, numpy arrays or torch tensors: placing is one addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIALS = ("<bos>", "<eos>", "<pad>", "<image>", "</image>")
BOS, EOS, PAD, BEGIN_IMAGE, END_IMAGE = range(len(SPECIALS))


@dataclass(frozen=True)
class JointVocabulary:
    """Places the ids of a text and of an image tokenizer in one vocabulary.

    Attributes:
        text_size: ids of the text tokenizer.
        image_size: codes of the image tokenizer.
    """

    text_size: int
    image_size: int

    @classmethod
    def load(cls, folder: str | Path) -> JointVocabulary:
        """The vocabulary of the tokenizers in ``folder``, from their sizes alone.

        Raises:
            UserError: a tokenizer is missing or cannot be read.
        """
        from mmqk.tokenizers.image import ImageTokenizer
        from mmqk.tokenizers.text import TextTokenizer

        return cls(TextTokenizer.load(folder).size, ImageTokenizer.read_config(folder).codes)

    @property
    def blocks(self) -> dict[str, int]:
        """Number of ids by modality, in id order: `ModelConfig.blocks`."""
        return {"text": len(SPECIALS) + self.text_size, "image": self.image_size}

    def text(self, ids: Any) -> Any:
        """Joint ids of text tokenizer ids."""
        return ids + len(SPECIALS)

    def image(self, codes: Any) -> Any:
        """Joint ids of image codes."""
        return codes + self.blocks["text"]

    def text_ids(self, joint: Any) -> Any:
        """Text tokenizer ids of joint ids; the inverse of `text`, meaningless for other blocks."""
        return joint - len(SPECIALS)

    def image_codes(self, joint: Any) -> Any:
        """Image codes of joint ids; the inverse of `image`, meaningless for other blocks."""
        return joint - self.blocks["text"]
