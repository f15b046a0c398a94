"""Text to ids and back: byte-level BPE of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mmqk.store import UserError
from mmqk.tokenizers.files import TEXT_FILE, damaged, existing_file

BYTES = 256
"""Entries that every byte-level vocabulary starts with: one a byte, so that any text has ids."""


class TextTokenizer:
    """Byte-level BPE: every string is encoded without loss, whatever its script.

    There are no special entries: those belong to the joint vocabulary.

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
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception for every fault of a file
            raise damaged(path, error) from error

    @classmethod
    def train(cls, texts: Iterable[str], size: int = 1024) -> TextTokenizer:
        """Learn `size` entries from texts; the same texts in the same order give the same entries.

        Raises:
            UserError: `size` has no room for the 256 bytes, or the texts are too few to fill it.
        """
        if size < BYTES:
            raise UserError(f"{size} text entries cannot hold the bytes: --text-size is at least {BYTES}.")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        trained = cls(tokenizer)
        if trained.size != size:
            raise UserError(
                f"The texts gave {trained.size} entries of the {size} asked for: train on more text or lower"
                " --text-size."
            )
        return trained

    def encode(self, text: str) -> list[int]:
        """Ids of a text, each from 0 to size - 1."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that are no UTF-8 (half a character) become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids])

    def to_json(self) -> str:
        """The content of `text.json`."""
        return self._tokenizer.to_str(pretty=False) + "\n"
