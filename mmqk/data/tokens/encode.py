"""Encode documents of texts and images as ids, and open the documents of a source.

```
text ── BPE ─────────────────────────────────────┐
image ── batches ── codes ── <image>, </image> ──┴── joint vocabulary ── <eos> ──> ids
```

`open_source` opens a token folder as it is, and a folder of shards with a manifest through the token cache: a token
folder under ``.cache/tokens``, made once in one process. `mmqk data tokenize` is for sets that need several.
"""

from __future__ import annotations

import glob
import hashlib
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from filelock import FileLock
from PIL import Image

from mmqk.data.mixture import random_stream
from mmqk.data.shards.images import MAX_PIXELS, Dropped, Fit, load_image
from mmqk.data.shards.manifest import IMAGE_SIZE, MANIFEST, manifest_hash, read_pairs, read_text
from mmqk.data.shards.samples import EMPTY_DOCUMENT
from mmqk.data.tokenizers.files import SPECIALS, read_config, tokenizers_hash
from mmqk.data.tokenizers.text import TextTokenizer
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
        fit, max_pixels: as for `load_image`.

    Attributes:
        layout: layout of the ids.
        tokens: number of encoded tokens that `take` has not returned yet, without ``<eos>``.

    Raises:
        UserError: the tokenizers are missing or damaged.
    """

    def __init__(self, tokenizers: Path, images: bool = True, fit: Fit = "crop", max_pixels: int = MAX_PIXELS) -> None:
        self.layout = layout_of(tokenizers)
        self._text = TextTokenizer.load(tokenizers)
        self._images, self._fit, self._max_pixels = None, fit, max_pixels
        if images:
            from mmqk.data.tokenizers.image import ImageTokenizer  # imports timm, which takes seconds

            self._images = ImageTokenizer.load(tokenizers)
        self.clear()

    def clear(self) -> None:
        """Remove the documents that `take` has not returned yet."""
        self.tokens = 0
        self._documents: list[list[np.ndarray]] = []  # ids of each text or image, then <eos>
        self._waiting: list[tuple[Image.Image, list[np.ndarray], int]] = []  # image, document, index in document

    def add(self, places: Sequence[str | bytes | Image.Image]) -> None:
        """Add a document of texts, image files and RGB images of the tokenizer's size, in order.

        Raises:
            Dropped: the document has no tokens, or an image file cannot be used.
        """
        texts = (self._text.encode(place) if isinstance(place, str) else [] for place in places)
        document = [np.array(ids, dtype=self.layout.dtype) + len(SPECIALS) for ids in texts]
        images = [(self._loaded(place), document, n) for n, place in enumerate(places) if not isinstance(place, str)]
        tokens = sum(map(len, document))
        if not tokens and not images:
            raise Dropped(EMPTY_DOCUMENT)
        self.tokens += tokens
        document.append(np.array([self.layout.eos], dtype=self.layout.dtype))
        self._documents.append(document)
        for image in images:
            self._waiting.append(image)
            if len(self._waiting) == IMAGES_A_BATCH:
                self._encode_images()

    def _loaded(self, image: bytes | Image.Image) -> Image.Image:
        assert self._images is not None
        if isinstance(image, bytes):
            return load_image(image, self._images.image_size, self._fit, self._max_pixels)
        return image

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
                if kind == "pair":
                    for pair in read_pairs(folder, split):
                        encoder.add([pair.image, pair.caption])
                else:
                    for text in read_text(folder, split):
                        encoder.add([text])
                writer.add_part(split, "00000", encoder.take())
            writer.finish(about={"from": str(folder)})
            if made.exists():  # an incomplete cache from a process that was killed
                shutil.rmtree(made)


# Seed of the permutation of `ChangedPairs`, which is the same for every run.
SHUFFLE_SEED = 26


class ChangedPairs:
    """The pairs of a split with another `data.pairing` than matched.

    shuffled: every image has the caption of another pair. The captions are permuted in one cycle, so each image and
    each caption occurs once and no pair keeps its caption. The permutation depends on the number of pairs only.
    captions: the captions without the images.

    Attributes:
        caption_of_N: the pair whose caption each image has; None without images.

    Raises:
        ValueError: there is only one pair to shuffle.
    """

    def __init__(self, pairs: TokenStore, pairing: str) -> None:
        n = len(pairs)
        self._pairs, self._image = pairs, pairs.image_tokens if n else 0
        self.image_tokens = 0
        self.caption_of_N: np.ndarray | None = None
        self.lengths_N = pairs.lengths_N - self._image
        if pairing == "shuffled":
            if n == 1:
                raise ValueError("data.pairing 'shuffled' needs two pairs in each split: hold out more, or none.")
            order = random_stream(SHUFFLE_SEED, n).permutation(n)
            self.caption_of_N = np.empty(n, dtype=np.int64)
            self.caption_of_N[order] = np.roll(order, 1)
            self.image_tokens = self._image
            self.lengths_N = pairs.lengths_N[self.caption_of_N]  # all images have the same length
        self.tokens = int(self.lengths_N.sum())

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, n: int) -> np.ndarray:
        """Return the ids of document n, int64."""
        caption = self._pairs[n if self.caption_of_N is None else int(self.caption_of_N[n])][self._image :]
        return np.concatenate([self._pairs[n][: self.image_tokens], caption])
