"""The token cache: tokenize shards once, into token folders under ``.cache/tokens``.

A run opens its sources here (`open_source`): a token folder as it is, and a folder of shards with a manifest through
the cache. The cache is made in one process; `mmqk.data.tokenize` is the command for sets that need several.
`ShuffledPairs` and `Captions` are the documents of ``data.pairing`` shuffled and captions.
"""

from __future__ import annotations

import glob
import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from filelock import FileLock
from PIL import Image

from mmqk.data.mixture import random_stream
from mmqk.data.shards.manifest import IMAGE_SIZE, MANIFEST, manifest_hash, read_pairs, read_text
from mmqk.data.tokenizers.files import read_config, tokenizers_hash
from mmqk.data.tokens.encode import DocumentEncoder
from mmqk.data.tokens.folder import (
    SPLITS,
    TokenStore,
    TokenWriter,
    is_token_folder,
    layout_of,
    open_tokens,
    read_header,
    tokens_hash,
)
from mmqk.store import UserError, new_folder
from mmqk.store.files import writing

FORMAT = 3
# Seed of the permutation of `ShuffledPairs`, which is the same for every run.
SHUFFLE_SEED = 26


def source_hash(folder: Path, kind: str) -> str:
    """Return the hash (10 hex digits) of the samples of a source, which is a folder of shards or of tokens.

    Raises:
        UserError: the folder has neither shards with a manifest nor tokens.
    """
    if is_token_folder(folder):
        return tokens_hash(folder)
    if not folder.exists() and not glob.has_magic(str(folder)) and "{" not in str(folder):
        raise UserError(f"{folder} does not exist: check the path, or make a token folder there.")
    if kind == "interleaved" or not (folder / MANIFEST).exists():
        what = {"interleaved": "--interleaved --shards", "text": "--text"}.get(kind, "--shards")
        online = "; or read tars as they are with --data.read shards" if kind == "pair" else ""
        raise UserError(
            f"{folder} is neither a token folder nor a folder of shards with a manifest: make a token folder with"
            f" mmqk data tokenize {what} PATTERN --out FOLDER{online}."
        )
    return manifest_hash(folder)


def open_source(kind: str, folder: Path, tokenizers: Path, root: Path) -> dict[str, TokenStore]:
    """Open the documents of a source by split, from a token folder or from the token cache of shards.

    Shards that are not in the token cache are tokenized first.

    Args:
        kind: pair, text or interleaved.
        folder: token folder, or shards with their manifest.
        tokenizers: folder of the tokenizers.
        root: folder of the cache.

    Raises:
        UserError: shards, tokenizers or the cache folder cannot be read or written, or do not match.
    """
    made_by = tokenizers_hash(tokenizers)
    if is_token_folder(folder):
        header = read_header(folder)
        if header.kind != kind:
            raise UserError(f"{folder} has documents of kind {header.kind}, not {kind}: give another folder.")
        if header.tokenizers != made_by:
            raise UserError(
                f"The tokenizers of {folder} ({header.tokenizers or 'of another program'}) differ from those"
                f" in {tokenizers} ({made_by}): set --data.tokenizers to the folder of the tokenizers that made"
                f" {folder}, or tokenize the shards again."
            )
        return open_tokens(folder, root)
    digest = hashlib.sha256(f"{FORMAT}/{kind}/{manifest_hash(folder)}/{made_by}".encode()).hexdigest()[:10]
    made = root / digest
    if not is_token_folder(made):
        _make(kind, folder, tokenizers, made_by, made)
    try:
        return open_tokens(made, root)
    except UserError as error:
        raise UserError(
            f"The token cache {made} does not match its shards and tokenizers: delete it, and it is made again"
            f" ({error})"
        ) from None


def _make(kind: str, folder: Path, tokenizers: Path, made_by: str, made: Path) -> None:
    if kind == "pair" and (size := read_config(tokenizers).image_size) != IMAGE_SIZE:
        raise UserError(
            f"The tokenizers of {tokenizers} take images of {size} px, and data.pairs reads {folder} as images of"
            f" {IMAGE_SIZE} px: make a token folder with mmqk data tokenize --shards '{folder / '*.tar'}'"
            f" --tokenizers {tokenizers} --out FOLDER."
        )
    with ExitStack() as stack:
        with writing(f"The token cache {made.parent}", "set --data.cache."):
            made.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(f"{made}.lock"))
        if is_token_folder(made):  # another process made it before this one got the lock
            return
        with new_folder(made) as folder_of_tokens:
            writer = TokenWriter(folder_of_tokens, kind, layout_of(tokenizers), made_by)
            encoder = DocumentEncoder(tokenizers, images=kind == "pair")
            for split in SPLITS:
                line = f"tokenizing the {split} shards of {folder} (once; kept in {made})"
                print(line, file=sys.stderr, flush=True)
                for places in _documents(kind, folder, split):
                    encoder.add(places)
                writer.add_part(split, "00000", encoder.take())
            writer.finish(about={"from": str(folder)})
            if made.exists():  # an incomplete cache from a process that was killed
                shutil.rmtree(made)


def _documents(kind: str, folder: Path, split: str) -> Iterator[list[str | Image.Image]]:
    """Yield the texts and images of each document of shards."""
    if kind == "pair":
        return ([pair.image, pair.caption] for pair in read_pairs(folder, split))
    return ([text] for text in read_text(folder, split))


class ShuffledPairs:
    """Pairs in which every image has the caption of another pair of its split.

    The captions are permuted in one cycle, so each image and each caption occurs once and no pair keeps its caption.
    The permutation depends on the number of pairs only.

    Args:
        pairs: the documents of a split.

    Raises:
        ValueError: there is only one pair.
    """

    def __init__(self, pairs: TokenStore) -> None:
        n = len(pairs)
        if n == 1:
            raise ValueError("data.pairing 'shuffled' needs two pairs in each split: hold out more, or none.")
        self.image_tokens = pairs.image_tokens if n else 0
        self._pairs = pairs
        order = random_stream(SHUFFLE_SEED, n).permutation(n)
        self.caption_of_N = np.empty(n, dtype=np.int64)
        self.caption_of_N[order] = np.roll(order, 1)
        self.lengths_N = pairs.lengths_N[self.caption_of_N]  # all images have the same length
        self.tokens = int(self.lengths_N.sum())

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, n: int) -> np.ndarray:
        """Return the ids of document n, int64."""
        caption = self._pairs[int(self.caption_of_N[n])][self.image_tokens :]
        return np.concatenate([self._pairs[n][: self.image_tokens], caption])


class Captions:
    """The captions of pairs, without their images.

    Args:
        pairs: the documents of a split.
    """

    image_tokens = 0

    def __init__(self, pairs: TokenStore) -> None:
        self._pairs = pairs
        self._removed = pairs.image_tokens if len(pairs) else 0
        self.lengths_N = pairs.lengths_N - self._removed
        self.tokens = int(self.lengths_N.sum())

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, n: int) -> np.ndarray:
        """Return the ids of document n, int64."""
        return self._pairs[n][self._removed :]
