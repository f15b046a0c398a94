"""Decode ids to text and images, and load the original images."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mmqk.data.shards.images import Dropped, load_image
from mmqk.data.shards.manifest import MANIFEST, load_manifest
from mmqk.data.shards.samples import pair_of
from mmqk.data.shards.tars import index_tar
from mmqk.data.tokenizers.files import SPECIALS, vocab_sizes_of
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.data.tokenizers.text import TextTokenizer

BROKEN_CHARACTER = "\ufffd"
LONGEST_CHARACTER = 4  # a character has at most 4 bytes in UTF-8, so at most 4 tokens
LARGEST_PICTURE = 160  # longest side of an image on a page, in pixels
# An image counts as the original if the tokenizer encodes it to at least this share of the codes in the data. Some
# codes may differ: the batch size affects the rounding, which matters if a vector is almost as close to another code.
SAME_CODES = 0.9
# Five colors of Viridis, which color-blind readers can tell apart.
_SHADES = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], dtype=float)


class IdDecoder:
    """Decodes joint ids with mmqk's tokenizers.

    Args:
        tokenizers: folder of the tokenizers.

    Raises:
        UserError: a tokenizer file is missing or damaged.
    """

    def __init__(self, tokenizers: Path | str) -> None:
        self._text, self._image = TextTokenizer.load(tokenizers), ImageTokenizer.load(tokenizers)
        self._first_code = vocab_sizes_of(tokenizers)["text"]
        self.grid = self._image.grid[0]

    def words(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the text of each token. If a character has several tokens, they give one text."""
        words, pending = [], list[int]()
        for i in ids:
            pending.append(int(i) - len(SPECIALS))
            word = self._text.decode(pending)
            if BROKEN_CHARACTER not in word or len(pending) == LONGEST_CHARACTER:
                words.append(word)
                pending = []
        return [*words, self._text.decode(pending)] if pending else words

    def picture(self, ids: np.ndarray) -> Image.Image | None:
        """Decode joint ids to an image; return None if they are not a whole image."""
        if len(ids) != self.grid**2:
            return None
        codes_1N = torch.from_numpy(np.asarray(ids - self._first_code, dtype=np.int64))[None]
        pixels_HWC = self._image.decode(codes_1N)[0].permute(1, 2, 0)
        return Image.fromarray((pixels_HWC * 255).round().byte().numpy())

    def agrees(self, image: Image.Image, ids: np.ndarray) -> bool:
        """Return whether the tokenizer encodes this image to these ids, up to the tolerance `SAME_CODES`."""
        pixels_1CHW = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
        codes = self._image.encode(pixels_1CHW)[0].numpy()
        return bool((codes == ids - self._first_code).mean() >= SAME_CODES)

    @property
    def image_size(self) -> int:
        """Side of an image in pixels."""
        return self._image.image_size


class Originals:
    """The training images of a folder of image-caption shards, by index of the pair.

    Args:
        folder: folder of shards with a manifest. Any other folder gives no images.
    """

    def __init__(self, folder: Path | str) -> None:
        is_shards = (Path(folder) / MANIFEST).exists()
        shards = load_manifest(folder).splits.get("train", ()) if is_shards else ()
        self._paths = [Path(folder) / shard.file for shard in shards]
        self._first = np.cumsum([0, *(shard.samples for shard in shards)])
        self._index = cache(index_tar)

    def image(self, item: int, size: int) -> Image.Image | None:
        """Return the image of pair ``item`` in the size that the tokenizer encodes; None if it is not available."""
        if not 0 <= item < self._first[-1]:
            return None
        shard = int(np.searchsorted(self._first, item, side="right")) - 1
        index = self._index(self._paths[shard])
        try:
            sample = index.read(item - int(self._first[shard]))
            return load_image(pair_of(sample)[0], size)
        except (Dropped, IndexError):
            return None


class Pictures:
    """Makes PNG data URIs for a page, up to a limit on their total size.

    Args:
        room: largest total number of bytes of all PNG files.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self.left_out = 0

    def uri(self, image: Image.Image | None) -> str:
        """Return the image as ``data:image/png;base64,...``, scaled down if it is large. Return an empty string if
        the image is None or would exceed the limit."""
        if image is None:
            return ""
        if max(image.size) > LARGEST_PICTURE:
            image = image.copy()
            image.thumbnail((LARGEST_PICTURE, LARGEST_PICTURE), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        image.save(buffer, "PNG", optimize=True)
        content = buffer.getvalue()
        if len(content) > self._room:
            self.left_out += 1
            return ""
        self._room -= len(content)
        return "data:image/png;base64," + base64.b64encode(content).decode()


def shaded(ids: Iterable[int] | np.ndarray, block: int, width: int = 0, by_rank: bool = False) -> Image.Image:
    """Return an image with one pixel per id, colored by the id within its block, in rows of ``width`` (0: one row).

    Args:
        ids: 0 to block - 1.
        block: number of ids in the block.
        by_rank: color on a log scale, for ids sorted by decreasing frequency.
    """
    ids_N = np.asarray(ids, dtype=float)
    top = max(block - 1, 1)
    share_N = np.log1p(ids_N) / np.log1p(top) if by_rank else ids_N / top
    places = np.linspace(0, 1, len(_SHADES))
    rgb_N3 = np.stack([np.interp(share_N, places, channel) for channel in _SHADES.T], axis=1)
    rows = -(-len(ids_N) // width) if width else 1
    full = np.full((rows * (width or len(ids_N)), 3), 255.0)
    full[: len(ids_N)] = rgb_N3
    return Image.fromarray(full.reshape(rows, -1, 3).round().astype(np.uint8))
