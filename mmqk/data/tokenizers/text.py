"""Convert text to ids and back with byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mmqk.data.tokenizers.files import TEXT_FILE, damaged, existing_file
from mmqk.store import UserError

BYTES = 256
"""Number of entries for single bytes, which every byte-level vocabulary has, so any text has ids."""


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
