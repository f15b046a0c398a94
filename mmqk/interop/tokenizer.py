"""Export the text tokenizer of a run for transformers' AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmqk.store import DamagedFile, read_run
from mmqk.tokenizers.files import TEXT_FILE, tokenizers_hash
from mmqk.tokenizers.text import TextTokenizer
from mmqk.tokenizers.vocabulary import BOS, EOS, PAD, SPECIALS


def tokenizer_files(run: Path) -> tuple[dict[str, str], str]:
    """Return the contents of tokenizer.json and tokenizer_config.json by file name, and a sentence about the files.

    If the tokenizer of the run is not available, there are no files and the sentence gives the reason. The ids are
    those of the joint vocabulary: first the special tokens, then the text entries. The files have no entries for
    image codes, which have no text.
    """
    try:
        record: dict[str, Any] = read_run(run) or {}
    except DamagedFile as damaged:
        return {}, f"no tokenizer is included, because {damaged}"
    data = ((record.get("details") or {}).get("config") or {}).get("data") or {}
    recorded = ((record.get("identity") or {}).get("data") or {}).get("tokenizers")
    folder = data.get("tokenizers")
    if not isinstance(folder, str) or not recorded:
        return {}, "no tokenizer is included, because run.json names none"
    if not (Path(folder) / TEXT_FILE).is_file() or tokenizers_hash(folder) != recorded:
        return {}, (
            f"no tokenizer is included, because {folder:.200} does not have the tokenizers of the run"
            f" ({recorded!s:.40})"
        )
    content = json.loads(TextTokenizer.load(folder).to_json())
    vocabulary = content["model"]["vocab"]
    shifted = {text: id + len(SPECIALS) for text, id in vocabulary.items()}
    content["model"]["vocab"] = {text: id for id, text in enumerate(SPECIALS)} | shifted
    content["added_tokens"] = [
        {"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for id, text in enumerate(SPECIALS)
    ]  # fmt: skip
    names = {"bos_token": SPECIALS[BOS], "eos_token": SPECIALS[EOS], "pad_token": SPECIALS[PAD]}
    loader = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {"tokenizer.json": content, "tokenizer_config.json": loader | names}
    texts = {name: json.dumps(value, indent=1, ensure_ascii=False) + "\n" for name, value in files.items()}
    return texts, "tokenizer.json has the text tokenizer; images are ids of the image tokenizer"
