"""Encode documents of texts and images as ids, for `mmqk.data.tokenize`, the token cache and ``data.read shards``.

```
text ── BPE ───────────────────────┐
image ── batches ── codes ── <boi>, <eoi> ┴─ joint vocabulary ── <eos> ──> ids
```
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mmqk.data.shards.images import Dropped
from mmqk.data.shards.samples import EMPTY_DOCUMENT
from mmqk.data.tokenizers.files import SPECIALS
from mmqk.data.tokens.folder import layout_of

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
        from mmqk.data.tokenizers.image import ImageTokenizer
        from mmqk.data.tokenizers.text import TextTokenizer

        self.layout = layout_of(tokenizers)
        self._text = TextTokenizer.load(tokenizers)
        self._images = ImageTokenizer.load(tokenizers) if images else None
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
