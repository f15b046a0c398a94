"""Encode documents of texts and images as ids, and open the documents of a source.

```
text ── BPE ───────────────────────┐
image ── batches ── codes ── <boi>, <eoi> ┴─ joint vocabulary ── <eos> ──> ids
```

`open_source` opens a token folder as it is, and a folder of shards with a manifest through the token cache: a token
folder under ``.cache/tokens``, made once in one process. `mmqk data tokenize` is for sets that need several.
"""

from __future__ import annotations

import glob
import hashlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from filelock import FileLock
from PIL import Image

from mmqk.data.shards.images import Dropped
from mmqk.data.shards.manifest import IMAGE_SIZE, MANIFEST, manifest_hash, read_pairs, read_text
from mmqk.data.shards.samples import EMPTY_DOCUMENT
from mmqk.data.tokenizers.files import SPECIALS, TextTokenizer, read_config, tokenizers_hash
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

IMAGES_A_BATCH = 64


class DocumentEncoder:
    """Encodes documents with the tokenizers of a folder. Images are encoded in full batches.

    Args:
        tokenizers: folder of the tokenizers.
        images: whether documents may have images.

    Attributes:
        layout: layout of the ids.
        tokens: number of encoded tokens that `take` has not returned yet, without ``<eos>``.

    Raises:
        UserError: the tokenizers are missing or damaged.
    """

    def __init__(self, tokenizers: Path, images: bool = True) -> None:
        self.layout = layout_of(tokenizers)
        self._text = TextTokenizer.load(tokenizers)
        self._images = None
        if images:
            from mmqk.data.tokenizers.image import ImageTokenizer  # imports timm, which takes seconds

            self._images = ImageTokenizer.load(tokenizers)
        self.clear()

    @property
    def image_size(self) -> int:
        """Side of the images in pixels."""
        assert self._images is not None
        return self._images.image_size

    def clear(self) -> None:
        """Remove the documents that `take` has not returned yet."""
        self.tokens = 0
        self._documents: list[list[np.ndarray]] = []  # ids of each text or image, then <eos>
        self._waiting: list[tuple[Image.Image, list[np.ndarray], int]] = []  # image, document, index in document

    def add(self, places: Sequence[str | Image.Image]) -> None:
        """Add a document of texts and RGB images in order.

        Raises:
            Dropped: the document has no tokens.
        """
        texts = (self._text.encode(place) if isinstance(place, str) else [] for place in places)
        document = [np.array(ids, dtype=self.layout.dtype) + len(SPECIALS) for ids in texts]
        tokens = sum(map(len, document))
        if not tokens and all(isinstance(place, str) for place in places):
            raise Dropped(EMPTY_DOCUMENT)
        self.tokens += tokens
        document.append(np.array([self.layout.eos], dtype=self.layout.dtype))
        self._documents.append(document)
        for n, place in enumerate(places):
            if not isinstance(place, str):
                self._waiting.append((place, document, n))
                if len(self._waiting) == IMAGES_A_BATCH:
                    self._encode_images()

    def take(self) -> list[np.ndarray]:
        """Return the ids of each document added since the last call."""
        self._encode_images()
        documents = [np.concatenate(document) for document in self._documents]
        self.clear()
        return documents

    def _encode_images(self) -> None:
        """Encode the pending images; the codes of each image stand between two boundary tokens."""
        import torch

        if not self._waiting:
            return
        assert self._images is not None
        pixels_BHWC = np.stack([np.asarray(image) for image, _, _ in self._waiting])
        pixels_BCHW = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2).contiguous().float() / 255
        codes_BN = self._images.encode(pixels_BCHW).numpy() + self.layout.vocab_sizes["text"]
        begin, end = self.layout.begin_image, self.layout.end_image
        for codes_N, (_, document, n) in zip(codes_BN, self._waiting, strict=True):
            document[n] = np.array([begin, *codes_N, end], dtype=self.layout.dtype)
            self.tokens += len(document[n])
        self._waiting.clear()


FORMAT = 3


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
