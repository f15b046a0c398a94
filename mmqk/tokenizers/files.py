"""The two files of a tokenizer folder and their hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mmqk.store import UserError, read_regular

TEXT_FILE = "text.json"
IMAGE_FILE = "image.safetensors"
HASH_DIGITS = 10

TRAIN_COMMAND = "python -m mmqk.tokenizers.train"


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
        content = read_regular(existing_file(folder, name))
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:HASH_DIGITS]
