"""Views of one sequence of a TokenBatch for the page: a strip of its T positions, and the segments of its documents.

The strip shows only the content of the batch: modality and padding of each position, trained targets, and the
beginnings of documents. Ids are decoded with mmqk's tokenizers, and images stand beside their originals.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmqk.data.batch import TokenBatch
from mmqk.data.shards.files import index_tar
from mmqk.data.shards.images import Dropped, load_image
from mmqk.data.shards.manifest import MANIFEST, load_manifest
from mmqk.data.shards.samples import pair_of
from mmqk.data.tokenizers.files import SPECIALS as OWN_SPECIALS
from mmqk.data.tokenizers.files import TextTokenizer, vocab_sizes_of
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.data.tokens.folder import SPECIAL_NAMES, Layout

BROKEN_CHARACTER = "\ufffd"
LONGEST_CHARACTER = 4  # a character has at most 4 bytes in UTF-8, so at most 4 tokens
LARGEST_PICTURE = 160  # longest side of an image on a page, in pixels
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
        self.grid, self.image_size = self._image.grid[0], self._image.image_size

    def words(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the text of each token. If a character has several tokens, they give one text."""
        words, pending = [], list[int]()
        for i in ids:
            pending.append(int(i) - len(OWN_SPECIALS))
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


def shard_of(folder: Path) -> Callable[[int], tuple[Path, int]]:
    """Return a function that gives the shard of training sample n of a folder with a manifest, and its number there."""
    shards = load_manifest(folder).splits.get("train", ())
    first_S = np.cumsum([0, *(shard.samples for shard in shards)])

    def find(n: int) -> tuple[Path, int]:
        s = int(np.searchsorted(first_S, n, side="right")) - 1
        return folder / shards[s].file, n - int(first_S[s])

    return find


def originals(folder: Path, size: int) -> Callable[[int], Image.Image | None]:
    """Return a function that gives the image of pair n of a folder of shards, in the size that the tokenizer encodes;
    None if it is not available, as in a folder without a manifest."""
    if not (folder / MANIFEST).exists():
        return lambda n: None
    find, index = shard_of(folder), cache(index_tar)

    def image(n: int) -> Image.Image | None:
        path, i = find(n)
        try:
            return load_image(pair_of(index(path).read(i))[0], size)
        except Dropped:
            return None

    return image


def picture_uri(image: Image.Image) -> str:
    """Return the image as ``data:image/png;base64,...``, scaled down if it is large."""
    image = image.copy()
    image.thumbnail((LARGEST_PICTURE, LARGEST_PICTURE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def shaded(ids: Iterable[int] | np.ndarray, block: int, width: int = 0) -> Image.Image:
    """Return an image with one pixel per id, colored by the id within its block, in rows of ``width`` (0: one row).

    Args:
        ids: 0 to block - 1.
        block: number of ids in the block.
    """
    ids_N = np.asarray(ids, dtype=float)
    share_N, places = ids_N / max(block - 1, 1), np.linspace(0, 1, len(_SHADES))
    rgb_N3 = np.stack([np.interp(share_N, places, channel) for channel in _SHADES.T], axis=1)
    rows = -(-len(ids_N) // width) if width else 1
    full = np.full((rows * (width or len(ids_N)), 3), 255.0)
    full[: len(ids_N)] = rgb_N3
    return Image.fromarray(full.reshape(rows, -1, 3).round().astype(np.uint8))


# The Okabe-Ito palette for color-blind readers; the first two colors also differ in gray.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
PADDING, INK = "#d5dae0", "#1b1f24"
MOST_WORDS = 1500
MOST_IDS = 48
SPECIALS = dict(zip(SPECIAL_NAMES, ("<bos>", "<eos>", "<pad>", "<image>", "</image>"), strict=True))


class Viewer:
    """Makes views of sequences.

    Args:
        layout: layout of the ids.
        weights: loss weight by modality.
        decoder: mmqk's tokenizers; if None, the page shows ids instead of text and images.
        widths: columns by modality, for ids that form a grid.
    """

    def __init__(
        self, layout: Layout, weights: Mapping[str, float], decoder: IdDecoder | None, widths: Mapping[str, int]
    ) -> None:
        self.layout, self.decoder, self.weights, self.widths = layout, decoder, weights, widths
        self.names = list(layout.vocab_sizes)
        self.colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(self.names)}
        self._specials = {i: SPECIALS[n] for n in SPECIAL_NAMES if (i := getattr(layout, n)) is not None}

    def view(self, batch: TokenBatch, b: int, originals: Mapping[int, Image.Image | None]) -> dict[str, Any]:
        """Return the view of sequence ``b`` of a batch, which must have document numbers. ``originals`` maps a
        document number to the original image.

        Keys: ``filled``, the number of positions with a token; ``documents``, the segments of each document;
        ``targets``, a phrase for each modality with targets; ``bars`` of the strip, each (start, end, y, height,
        color): tokens, special tokens and targets; ``edges``, the positions where a further document begins.
        """
        assert batch.document_BT is not None
        ids_T, document_T = batch.ids_BT[b].numpy(), batch.document_BT[b].numpy()
        modality_T, valid_T = batch.modality_BT[b].numpy(), batch.valid_BT[b].numpy()
        masked_T = batch.target_mask_BT[b].numpy()
        target_T = batch.target_modality_BT[b].numpy()
        weight_T = np.array([self.weights[name] for name in self.names])[target_T]
        documents = []
        for number in range(int(document_T.max(initial=-1)) + 1):
            places = np.flatnonzero(document_T == number)
            runs, original = _runs(modality_T[places]), originals.get(number)
            documents.append([self._segment(ids_T[places[s:e]], m, original) for s, e, m in runs])
        targets = []
        for m, name in enumerate(self.names):
            if count := int((masked_T & (target_T == m)).sum()):
                targets.append(f"{count:,} {name}" + ("" if self.weights[name] > 0 else " (0 of them trained)"))
        colors = [*self.colors.values(), PADDING]  # -1, the last, is padding
        special_T = np.isin(ids_T, list(self._specials)) & valid_T
        state_T = np.where(masked_T, 2 * target_T + (weight_T > 0), -1)
        bars = [(s, e, 0, 14, colors[m]) for s, e, m in _runs(np.where(valid_T, modality_T, -1))]
        bars += [(s, e, 0, 14, INK) for s, e, special in _runs(special_T) if special]
        # A target of weight 0 is a thin line.
        bars += [(s, e, *((19, 10) if t % 2 else (23, 2)), colors[t // 2]) for s, e, t in _runs(state_T) if t >= 0]
        edges = np.flatnonzero(np.diff(document_T) != 0) + 1
        return {
            "filled": int(valid_T.sum()),
            "documents": documents,
            "targets": targets,
            "bars": bars,
            "edges": [int(x) for x in edges if document_T[x] >= 0],
        }

    def _segment(self, ids: np.ndarray, modality: int, original: Image.Image | None) -> dict[str, Any]:
        """Return consecutive tokens of one modality: as words, as an image with its codes, or as ids.

        Images are data URIs; ``words`` are (text, whether it is a special token); ``more`` is the number of tokens
        that are cut from ``words`` or ``ids``.
        """
        name, decoder = self.names[modality], self.decoder
        segment = {"modality": name, "tokens": len(ids), "color": self.colors[name], "trained": self.weights[name] > 0}
        if decoder is not None and modality == 0:
            return segment | {"words": self._words(ids[:MOST_WORDS], decoder), "more": max(0, len(ids) - MOST_WORDS)}
        local, block = ids - self.layout.edges[modality], self.layout.vocab_sizes[name]
        if decoder is not None and (image := decoder.picture(ids)) is not None:
            pictures = {"codes": shaded(local, block, decoder.grid), "decoded": image, "original": original}
            return segment | {what: picture_uri(p) for what, p in pictures.items() if p is not None}
        width = self.widths.get(name, 0)
        listed = " ".join(self._specials.get(int(i), str(i)) for i in ids[:MOST_IDS])
        codes = picture_uri(shaded(local, block, width))
        return segment | {"codes": codes, "grid": width > 0, "ids": listed, "more": max(0, len(ids) - MOST_IDS)}

    def _words(self, ids: np.ndarray, decoder: IdDecoder) -> list[tuple[str, bool]]:
        words: list[tuple[str, bool]] = []
        for start, end, special in _runs(np.isin(ids, list(self._specials))):
            if special:
                words += [(self._specials[int(i)], True) for i in ids[start:end]]
            else:
                words += [(word, False) for word in decoder.words(ids[start:end])]
        return words


def _runs(values: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (start, end, value) of every run of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values.astype(int))) + 1).tolist(), len(values)]
    return [(s, e, int(values[s])) for s, e in pairwise(edges) if e > s]
