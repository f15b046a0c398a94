"""The joint vocabulary: special tokens and text entries, then image codes.

```
id    0     1     2     3       4        5 ...            5 + text_size ...
      <bos> <eos> <pad> <image> </image> BPE entries      image codes
      └──────────── text block ─────────────────────────┘ └─ image block ─┘
```

Special tokens count as text. The block of an id decides its modality.
"""

from __future__ import annotations

from pathlib import Path

from mmqk.store import DamagedFile, read_json
from mmqk.tokenizers.files import TEXT_FILE, damaged, existing_file
from mmqk.tokenizers.image_config import read_config

MOST_BYTES = 2**28  # largest size of text.json
SPECIALS = ("<bos>", "<eos>", "<pad>", "<image>", "</image>")
BOS, EOS, PAD, BEGIN_IMAGE, END_IMAGE = range(len(SPECIALS))


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
        record = read_json(path, {"model": {"vocab": {"*": int}}}, most=MOST_BYTES) or {}
        entries = len(record["model"]["vocab"])
    except (DamagedFile, KeyError) as error:
        why = error.why if isinstance(error, DamagedFile) else f"there is no {error}"
        raise damaged(path, why) from error
    return {"text": len(SPECIALS) + entries, "image": read_config(folder).codes}
