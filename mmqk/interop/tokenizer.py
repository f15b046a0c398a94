"""Export the text tokenizer of a run for transformers' AutoTokenizer."""

from __future__ import annotations

import json
from typing import Any

from mmqk.data.tokenizers.files import BOS, EOS, PAD, SPECIALS, TextTokenizer, tokenizers_hash
from mmqk.store import UserError, find_file


def tokenizer_files(folder: Any, recorded: Any) -> tuple[dict[str, str], str]:
    """Return the contents of tokenizer.json and tokenizer_config.json by file name, and a sentence about the files.

    If the tokenizer of the run is not available, there are no files and the sentence gives the reason. The ids are
    those of the joint vocabulary: first the special tokens, then the text entries. The files have no entries for
    image codes, which have no text.

    Args:
        folder: ``data.tokenizers`` in the configuration of the run.
        recorded: hash of the tokenizers in the identity of the run.
    """
    if not isinstance(folder, str) or not recorded:
        return {}, "no tokenizer is included, because run.json names none"
    try:
        present = tokenizers_hash(find_file(folder))
    except UserError:  # a file is missing
        present = ""
    if present != recorded:
        return {}, (
            f"no tokenizer is included, because {folder:.200} does not have the tokenizers of the run"
            f" ({recorded!s:.40})"
        )
    content = json.loads(TextTokenizer.load(find_file(folder)).to_json())
    vocabulary = content["model"]["vocab"]
    shifted = {text: id + len(SPECIALS) for text, id in vocabulary.items()}
    content["model"]["vocab"] = {text: id for id, text in enumerate(SPECIALS)} | shifted
    content["added_tokens"] = [
        {"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for id, text in enumerate(SPECIALS)
    ]  # fmt: skip
    content["post_processor"] = None
    names = {"bos_token": SPECIALS[BOS], "eos_token": SPECIALS[EOS], "pad_token": SPECIALS[PAD]}
    loader = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {"tokenizer.json": content, "tokenizer_config.json": loader | names}
    texts = {name: json.dumps(value, indent=1, ensure_ascii=False) + "\n" for name, value in files.items()}
    return texts, "tokenizer.json has the text tokenizer; images are ids of the image tokenizer"
