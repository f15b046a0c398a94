"""The token cache: shards go through the tokenizers once, into arrays under ``.cache/tokens/<hash>``."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmqk.data.shards import manifest_hash, read_pairs, read_text
from mmqk.store import UserError

FORMAT = 1
ENCODE_BATCH = 64


@dataclass(frozen=True)
class TokenCache:
    """One split as arrays, memory-mapped. N pairs, G image codes each.

    Attributes:
        codes_NG: image codes, row-major over the grid, ids of the image tokenizer.
        captions: ids of the text tokenizer, all captions end to end.
        offsets: N + 1 places in ``captions``.
        text: ids of the text tokenizer, all documents end to end, each closed by -1.
    """

    codes_NG: np.ndarray
    captions: np.ndarray
    offsets: np.ndarray
    text: np.ndarray

    def caption(self, item: int) -> np.ndarray:
        return self.captions[self.offsets[item] : self.offsets[item + 1]]


def cache_hash(pairs: Path, text: Path, tokenizers: Path) -> str:
    """What the cache depends on: both manifests and both tokenizers (10 hex digits)."""
    from mmqk.tokenizers import tokenizers_hash

    parts = [str(FORMAT), manifest_hash(pairs), manifest_hash(text), tokenizers_hash(tokenizers)]
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:10]


def open_cache(
    pairs: Path, text: Path, tokenizers: Path, root: Path, say: Callable[[str], None] | None = None
) -> dict[str, TokenCache]:
    """The cache of these shards under these tokenizers, by split, made first if it does not exist.

    Raises:
        UserError: shards, tokenizers or the cache folder cannot be read or written.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    digest = cache_hash(pairs, text, tokenizers)
    folder = root / digest
    if not (folder / "meta.json").exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = open(root / f"{digest}.lock", "w")  # noqa: SIM115 (closed by the with below)
        except OSError as error:
            raise UserError(
                f"The token cache {root} cannot be written ({error.strerror}): set --data.cache."
            ) from error
        with lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not (folder / "meta.json").exists():
                _build(folder, pairs, text, tokenizers, digest, say)
    return {split: _load(folder, split, digest) for split in ("train", "val")}


def _build(folder: Path, pairs: Path, text: Path, tokenizers: Path, digest: str, say) -> None:
    from mmqk.tokenizers import ImageTokenizer, TextTokenizer

    text_tokenizer, image_tokenizer = TextTokenizer.load(tokenizers), ImageTokenizer.load(tokenizers)
    scratch = Path(tempfile.mkdtemp(prefix=f"{digest}-", dir=folder.parent))
    try:
        counts = {}
        for split in ("train", "val"):
            say(f"tokenizing the {split} shards of {pairs} and {text} (once; kept in {folder})")
            arrays = _encode_pairs(pairs, split, text_tokenizer, image_tokenizer)
            documents = [[*text_tokenizer.encode(document), -1] for document in read_text(text, split)]
            arrays["text"] = np.array([i for ids in documents for i in ids], dtype=np.int32)
            for name, array in arrays.items():
                np.save(scratch / f"{split}-{name}.npy", array)
            counts[split] = {"pairs": len(arrays["codes"]), "text_tokens": len(arrays["text"])}
        meta = {
            "hash": digest,
            "text_size": text_tokenizer.size,
            "image_size": image_tokenizer.size,
            "counts": counts,
        }
        (scratch / "meta.json").write_text(json.dumps(meta, indent=1))
        if folder.exists():  # half a cache, left by a process that was killed
            shutil.rmtree(folder)
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _encode_pairs(pairs: Path, split: str, text_tokenizer, image_tokenizer) -> dict[str, np.ndarray]:
    import torch
    from torchvision.transforms.functional import pil_to_tensor

    codes: list[np.ndarray] = []
    captions: list[list[int]] = []
    images: list[torch.Tensor] = []

    def encode() -> None:
        if images:
            codes.append(image_tokenizer.encode(torch.stack(images).float() / 255).numpy().astype(np.int32))
            images.clear()

    for pair in read_pairs(pairs, split):
        captions.append(text_tokenizer.encode(pair.caption))
        images.append(pil_to_tensor(pair.image))
        if len(images) == ENCODE_BATCH:
            encode()
    encode()
    lengths = [len(ids) for ids in captions]
    return {
        "codes": np.concatenate(codes),
        "captions": np.array([i for ids in captions for i in ids], dtype=np.int32),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    }


def _load(folder: Path, split: str, digest: str) -> TokenCache:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        arrays = {
            name: np.load(folder / f"{split}-{name}.npy", mmap_mode="r")
            for name in ("codes", "captions", "offsets", "text")
        }
        consistent = (
            meta["hash"] == digest
            and arrays["codes"].max(initial=0) < meta["image_size"]
            and arrays["captions"].max(initial=0) < meta["text_size"]
            and arrays["text"].max(initial=0) < meta["text_size"]
            and arrays["offsets"][-1] == len(arrays["captions"])
            and len(arrays["offsets"]) == len(arrays["codes"]) + 1
        )
    except (OSError, ValueError, KeyError, EOFError):
        consistent = False
    if not consistent:
        raise UserError(
            f"The token cache {folder} does not match its shards and tokenizers: delete it, and it is made again."
        )
    return TokenCache(arrays["codes"], arrays["captions"], arrays["offsets"], arrays["text"])
