"""Pairs read from their shards while training, by member offset, without a token cache.

Every image is decoded and encoded each time it is read, which costs milliseconds: for one look at a data set, or
for one pass over one that is too large to keep twice. Anything longer is faster from tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmqk.data.images import Dropped, load_image
from mmqk.data.manifest import MANIFEST, load_manifest, manifest_hash
from mmqk.data.samples import pair_of
from mmqk.data.tars import TarIndex, expand, index_tar
from mmqk.data.tokens import Layout, layout_of
from mmqk.store import UserError, hash_fraction, identity_hash


class OnlinePairs:
    """Pairs of one split as documents, made when they are asked for. N documents.

    Stands in for a `TokenStore` of kind pair, but knows no lengths.

    Args:
        shards: indices of the shards.
        samples_N2: shard and sample of each document.
        tokenizers: folder of the tokenizers.
    """

    kind = "pair"
    lengths_N = None
    tokens = None

    def __init__(self, shards: Sequence[TarIndex], samples_N2: np.ndarray, tokenizers: Path) -> None:
        self.shards, self.samples_N2, self.tokenizers = shards, samples_N2, tokenizers
        self.layout: Layout = layout_of(tokenizers)

    def __len__(self) -> int:
        return len(self.samples_N2)

    def __getstate__(self) -> dict[str, Any]:
        # A loader worker loads its own tokenizers.
        return {k: v for k, v in self.__dict__.items() if k != "_loaded"}

    @cached_property
    def _loaded(self) -> tuple[Any, Any, Any]:
        from mmqk.tokenizers import ImageTokenizer, JointVocabulary, TextTokenizer

        folder = self.tokenizers
        return TextTokenizer.load(folder), ImageTokenizer.load(folder), JointVocabulary.load(folder)

    @cached_property
    def image_tokens(self) -> int:
        """Tokens that an image takes, its marks included."""
        from mmqk.tokenizers.image import read_config

        return read_config(self.tokenizers).grid ** 2 + 2

    def __getitem__(self, n: int) -> np.ndarray:
        """Ids of document n.

        Raises:
            UserError: its sample has no readable image or caption.
        """
        from torchvision.transforms.functional import pil_to_tensor

        text, image, vocabulary = self._loaded
        s, i = self.samples_N2[n]
        shard = self.shards[s]
        try:
            content, caption = pair_of(shard.read(i))
            pixels = pil_to_tensor(load_image(content, image.image_size))
        except Dropped as dropped:
            raise UserError(
                f"sample {shard.keys[i]} of shard {shard.path} cannot be used ({dropped.reason}): tokenize the shards"
                " with python -m mmqk.data.tokenize, which drops and counts such samples"
            ) from None
        codes = image.encode(pixels[None].float() / 255)[0].numpy()
        words = vocabulary.text(text.encode(caption))
        begin, end = self.layout.begin_image, self.layout.end_image
        return np.array([begin, *vocabulary.image(codes), end, *words, self.layout.eos])


def open_online(shards: str, tokenizers: Path, cache: Path, val_share: float) -> dict[str, OnlinePairs]:
    """The pairs of shards by split.

    Args:
        shards: a folder with a manifest, whose splits are kept, or a pattern of tars, of which ``val_share`` is
            held out by a hash of the sample's key.
        tokenizers: folder of the tokenizers.
        cache: where the shards' indices are kept.
        val_share: between 0 and 1.

    Raises:
        UserError: shards are missing or damaged.
    """
    if (Path(shards) / MANIFEST).exists():
        splits = load_manifest(shards).splits
        by_split = {
            s: [_index(Path(shards) / p.file, cache) for p in splits.get(s, ())] for s in ("train", "val")
        }
        return {split: OnlinePairs(found, _all(found), tokenizers) for split, found in by_split.items()}
    found = [_index(path, cache) for path in expand([shards])]
    everything = _all(found)
    held_out = np.array(
        [hash_fraction(found[s].keys[i].encode()) < val_share for s, i in everything], dtype=bool
    )
    return {
        "train": OnlinePairs(found, everything[~held_out], tokenizers),
        "val": OnlinePairs(found, everything[held_out], tokenizers),
    }


def online_hash(shards: str) -> str:
    """Identity of the samples: the manifest's, or names and sizes of the tars (10 hex digits)."""
    if (Path(shards) / MANIFEST).exists():
        return manifest_hash(shards)
    return identity_hash({path.name: path.stat().st_size for path in expand([shards])})


def _all(shards: Sequence[TarIndex]) -> np.ndarray:
    places = [np.stack([np.full(len(t), s), np.arange(len(t))], axis=1) for s, t in enumerate(shards)]
    return np.concatenate([np.zeros((0, 2), dtype=np.int64), *places])


def _index(path: Path, cache: Path) -> TarIndex:
    """The index of a shard, kept for the next time: the walk over the headers of a large one takes seconds."""
    if not path.is_file():
        raise UserError(f"shard {path} is missing: check the path.")
    about = path.stat()
    name = f"{path.resolve()}/{about.st_size}/{about.st_mtime_ns}"
    kept = cache / "index" / f"{hashlib.sha256(name.encode()).hexdigest()[:20]}.npz"
    try:
        with np.load(kept) as arrays:
            return TarIndex(
                path,
                arrays["keys"].tolist(),
                about.st_size,
                arrays["fields"].tolist(),
                arrays["extent"],
                arrays["first"],
            )
    except (OSError, ValueError, KeyError):
        pass  # never made, or half written
    index = index_tar(path)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(".partial.npz")
        np.savez(
            partial,
            keys=np.array(index.keys, dtype=np.str_),
            fields=np.array(index._fields, dtype=np.str_),
            extent=index._extent_N2,
            first=index._first,
        )
        partial.replace(kept)
    except OSError:
        pass  # it is made again the next time
    return index
