"""Pairs read from their shards while training, by member offset, without a token cache.

Every image is decoded and encoded each time it is read, which costs milliseconds: for one look at a data set, or
for one pass over one that is too large to keep twice. Anything longer is faster from tokens.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmqk.data.images import Dropped, load_image
from mmqk.data.manifest import MANIFEST, checked_shards, load_manifest, manifest_hash
from mmqk.data.samples import IMAGE_FIELDS, pair_of
from mmqk.data.tars import TarIndex, expand, index_tar
from mmqk.data.tokens import Layout, layout_of
from mmqk.store import UserError, identity_hash


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

    A manifest's splits are kept. Under a pattern a pair is held out if the fraction (`mmqk.store.hash_fraction`)
    of its image file's bytes is below ``val_share``, the rule of ``mmqk.data.tokenize``: the same file under
    several keys or in several shards lies in one split, and a larger share holds out the same pairs and more.

    Args:
        shards: a folder with a manifest, or a pattern of tars.
        tokenizers: folder of the tokenizers.
        cache: where the shards' indices are kept.
        val_share: between 0 and 1; for a pattern only.

    Raises:
        UserError: shards are missing, damaged, or not those of the manifest.
    """
    if (Path(shards) / MANIFEST).exists():
        by_split = {split: _of_manifest(Path(shards), split, cache) for split in ("train", "val")}
        return {split: OnlinePairs(found, _all(found), tokenizers) for split, found in by_split.items()}
    kept = [_index(path, cache) for path in expand([shards])]
    found = [k.index for k in kept]
    everything = _all(found)
    digests_N = np.concatenate([k.digests_N for k in kept])
    held_out = digests_N.astype(np.float64) / 2.0**64 < val_share
    return {
        "train": OnlinePairs(found, everything[~held_out], tokenizers),
        "val": OnlinePairs(found, everything[held_out], tokenizers),
    }


def online_hash(shards: str, cache: Path) -> str:
    """Identity of the samples: the manifest's, or in their order the tars' names, sizes and contents (10 hex digits).

    Args:
        shards: as for `open_online`.
        cache: where the shards' indices are kept; the first time, a pattern's tars are read whole.

    Raises:
        UserError: shards are missing or damaged.
    """
    if (Path(shards) / MANIFEST).exists():
        return manifest_hash(shards)
    kept = [_index(path, cache) for path in expand([shards])]
    return identity_hash({"shards": [[k.index.path.name, k.index.length, k.content] for k in kept]})


@dataclass(frozen=True)
class _Kept:
    """What is kept of a shard."""

    index: TarIndex
    digests_N: (
        np.ndarray
    )  # uint64, the first 8 bytes of the sha256 of each image file (of the key without one)
    content: str  # sha256 of all keys, fields and files
    sha256: str = ""  # of the shard, once it was compared with a manifest


def _all(shards: Sequence[TarIndex]) -> np.ndarray:
    places = [np.stack([np.full(len(t), s), np.arange(len(t))], axis=1) for s, t in enumerate(shards)]
    return np.concatenate([np.zeros((0, 2), dtype=np.int64), *places])


def _of_manifest(folder: Path, split: str, cache: Path) -> list[TarIndex]:
    """The shards of a split, which are compared with the manifest as long as they have not been."""
    found = []
    shards = load_manifest(folder).splits.get(split, ())
    places = [_place(folder / shard.file, cache) for shard in shards]
    kept = [_load(folder / s.file, place) for s, place in zip(shards, places, strict=True)]
    if any(k is None or k.sha256 != shard.sha256 for k, shard in zip(kept, shards, strict=True)):
        checked_shards(folder, split)
    for old, place, shard in zip(kept, places, shards, strict=True):
        path = folder / shard.file
        new = old or _read(path)
        if len(new.index) != shard.samples:
            raise UserError(
                f"shard {path} holds {len(new.index)} samples, but its manifest says {shard.samples}: write the"
                f" manifest again with python -m mmqk.data.manifest {folder}"
            )
        if place is not None and new.sha256 != shard.sha256:
            _save(replace(new, sha256=shard.sha256), place)
        found.append(new.index)
    return found


def _index(path: Path, cache: Path) -> _Kept:
    """The index of a shard, kept for the next time: to read a large one takes seconds or minutes."""
    place = _place(path, cache)
    if place is None:
        raise UserError(f"shard {path} is missing: check the path.")
    if (kept := _load(path, place)) is None:
        kept = _read(path)
        _save(kept, place)
    return kept


def _place(path: Path, cache: Path) -> Path | None:
    """Where the index of a shard is kept; None if there is no shard."""
    if not path.is_file():
        return None
    about = path.stat()
    name = f"{path.resolve()}/{about.st_size}/{about.st_mtime_ns}"
    return cache / "index" / f"{hashlib.sha256(name.encode()).hexdigest()[:20]}.npz"


def _read(path: Path) -> _Kept:
    index = index_tar(path)
    digests = bytearray()
    content = hashlib.sha256()
    for key, sample in index:
        image = next((sample[field] for field in IMAGE_FIELDS if field in sample), key.encode())
        digests += hashlib.sha256(image).digest()[:8]
        content.update(f"{len(sample)} {len(key)} {key}".encode())
        for field, file in sample.items():
            content.update(f"{len(field)} {field} {len(file)} ".encode())
            content.update(file)
    # Big endian, as in hash_fraction.
    return _Kept(index, np.frombuffer(digests, dtype=">u8").astype(np.uint64), content.hexdigest())


def _load(path: Path, place: Path | None) -> _Kept | None:
    if place is None:
        return None
    try:
        with np.load(place) as arrays:
            index = TarIndex(
                path,
                arrays["keys"].tolist(),
                path.stat().st_size,
                arrays["fields"].tolist(),
                arrays["extent"],
                arrays["first"],
            )
            return _Kept(index, arrays["digests"], str(arrays["content"]), str(arrays["sha256"]))
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None  # never made, or damaged


def _save(kept: _Kept, place: Path) -> None:
    index = kept.index
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # In a folder of its own: other processes may be making the same index.
        with tempfile.TemporaryDirectory(prefix=f"{place.stem}-", dir=place.parent) as scratch:
            np.savez(
                partial := Path(scratch) / place.name,
                keys=np.array(index.keys, dtype=np.str_),
                fields=np.array(index._fields, dtype=np.str_),
                extent=index._extent_N2,
                first=index._first,
                digests=kept.digests_N,
                content=np.array(kept.content),
                sha256=np.array(kept.sha256),
            )
            partial.replace(place)
    except OSError:
        pass  # it is made again the next time
