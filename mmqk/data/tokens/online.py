"""Read pairs from the shards during training, by offset, without a token cache.

Each read decodes and encodes its image again, which takes milliseconds. Use it to try out a data set, or for one pass
over a data set that is too large to store twice. Longer training is faster from a token folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmqk.data.shards.archives import TarIndex, expand, index_tar
from mmqk.data.shards.images import Dropped, load_image
from mmqk.data.shards.manifest import MANIFEST, SHARE, checked_shards, default_share, load_manifest, manifest_hash
from mmqk.data.shards.samples import IMAGE_FIELDS, REASONS, ReasonCounts, count_unread, pair_of, printable
from mmqk.data.tokenizers.files import read_config
from mmqk.data.tokens.encode import DocumentEncoder
from mmqk.store import UserError, identity_hash, replacing

# A run ends with an error if more than this share of all samples is unusable. With LEAST_UNUSABLE or more unusable
# samples it also ends if they are more than this share of the samples read so far. A single unusable sample is always
# skipped.
MOST_UNUSABLE = 0.1
LEAST_UNUSABLE = 10
NAMED = 5


class Account:
    """Records which of N samples a run has read and which are unusable, in memory that loader workers share.

    Attributes:
        total: N, the number of samples in all splits.
        state_N: 0 for a sample that was not read yet, 1 for one that was used, and 2 plus the number of its
            reason in `REASONS` for an unusable one.
    """

    def __init__(self, total: int) -> None:
        import torch

        self.total = total
        self.state_N = torch.zeros(total, dtype=torch.uint8).share_memory_()

    def skip(self, number: int, reason: str, name: str) -> None:
        """Record that a sample cannot be used; the first few such samples are named on stderr.

        Raises:
            UserError: too many samples cannot be used.
        """
        self.state_N[number] = 2 + REASONS.index(reason)
        tried, bad = int((self.state_N > 0).sum()), int((self.state_N > 1).sum())
        if bad > max(1, MOST_UNUSABLE * self.total) or (bad >= LEAST_UNUSABLE and bad > MOST_UNUSABLE * tried):
            raise UserError(
                f"{bad} of the {tried} samples read so far cannot be used, more than {MOST_UNUSABLE:.0%}"
                f" (the last one is {name}: {reason}): repair the shards, or tokenize them with python -m"
                " mmqk.data.tokenize, which drops and counts such samples"
            )
        if bad <= NAMED:
            more = "; further ones are only counted" if bad == NAMED else ""
            print(f"{name} is skipped ({reason}){more}", file=sys.stderr, flush=True)

    def reasons(self, start: int, end: int) -> dict[int, str]:
        """Return the reason for each skipped sample from ``start`` to ``end``, by its offset from ``start``."""
        state_N = self.state_N[start:end].numpy()
        return {i: REASONS[state_N[i] - 2] for i in np.flatnonzero(state_N > 1).tolist()}


class OnlinePairs:
    """Pairs of one split as documents that are encoded at each access. N documents.

    It can be used in place of a `TokenStore` of kind pair, but has no lengths. An unusable sample is replaced by the
    next usable sample of the split, so that a document depends only on its index.

    Args:
        shards: the `TarIndex` of each shard.
        samples_N2: for each document, the number of its shard and of its sample in the shard.
        tokenizers: folder of the tokenizers.
        account: records which samples of all splits were read and which are unusable.
        number: index of the first document of this split in ``account``.
    """

    lengths_N = None
    tokens = None

    def __init__(
        self, shards: Sequence[TarIndex], samples_N2: np.ndarray, tokenizers: Path, account: Account, number: int = 0
    ) -> None:
        self.shards, self.samples_N2, self.tokenizers = shards, samples_N2, tokenizers
        self.account, self._number = account, number

    def __len__(self) -> int:
        return len(self.samples_N2)

    def __getstate__(self) -> dict[str, Any]:
        # A loader worker loads its own tokenizers.
        return {k: v for k, v in self.__dict__.items() if k != "_encoder"}

    @cached_property
    def _encoder(self) -> DocumentEncoder:
        return DocumentEncoder(self.tokenizers)

    @cached_property
    def image_tokens(self) -> int:
        """Tokens of an image with its two boundary tokens."""
        return read_config(self.tokenizers).grid ** 2 + 2

    def unread(self) -> list[str]:
        """Return the lines to print about files in the shards that belong to no pair; empty if there are none."""
        unread = ReasonCounts()
        for shard in self.shards:
            unread.take(shard.unread, f"{shard.path.name}: ")
        return list(unread.unread_lines(sum(shard.files for shard in self.shards)))

    @property
    def skipped(self) -> dict[str, str]:
        """The reason for each skipped sample, by the name of the sample."""
        reasons_N = self.account.reasons(self._number, self._number + len(self))
        return {self._name(i): reason for i, reason in reasons_N.items()}

    def __getitem__(self, n: int) -> np.ndarray:
        """Return the ids of document n, or of the next document that can be used.

        Raises:
            UserError: too many samples, or all samples of the split, have no readable image or caption.
        """
        for i in itertools.chain(range(n, len(self)), range(n)):
            number = self._number + i
            if self.account.state_N[number] > 1:
                continue
            try:
                ids = self._ids(i)
            except Dropped as dropped:
                self.account.skip(number, dropped.reason, self._name(i, printable))
                continue
            self.account.state_N[number] = 1
            return ids
        raise UserError(
            f"none of the {len(self)} samples of a split can be used, such as {self._name(n, printable)}:"
            " repair the shards"
        )

    def place(self, n: int) -> tuple[str, str]:
        """Return the shard and the key of document n, or of the next document that can be used."""
        self[n]  # finds out which documents cannot be used
        state_N = self.account.state_N[self._number : self._number + len(self)]
        i = next(i for i in itertools.chain(range(n, len(self)), range(n)) if state_N[i] == 1)
        s, sample = self.samples_N2[i]
        return str(self.shards[s].path), self.shards[s].keys[sample]

    def _name(self, i: int, shown: Callable[[str], str] = str) -> str:
        s, sample = self.samples_N2[i]
        return f"sample {shown(self.shards[s].keys[sample])} of shard {self.shards[s].path}"

    def _ids(self, i: int) -> np.ndarray:
        s, sample = self.samples_N2[i]
        content, caption = pair_of(self.shards[s].read(sample))
        self._encoder.add([load_image(content, self._encoder.image_size), caption])
        return self._encoder.take()[0].astype(np.int64)


def open_online(shards: str, tokenizers: Path, cache: Path, val_fraction: float | None) -> dict[str, OnlinePairs]:
    """Open the pairs of shards by split.

    A manifest lists the shards of each split. With a pattern, a pair is held out if `mmqk.store.hash_fraction` of the
    bytes of its image file is below ``val_fraction``, as in ``mmqk.data.tokenize``. So equal image files are in one
    split, and a larger ``val_fraction`` holds out the same pairs and further ones.

    Args:
        shards: a folder with a manifest, or a pattern of tars.
        tokenizers: folder of the tokenizers.
        cache: folder in which the shards' indices are stored.
        val_fraction: as for `held_out_share`; for a pattern only.

    Raises:
        UserError: shards are missing or damaged, or differ from the manifest.
    """
    if (Path(shards) / MANIFEST).exists():
        by_split = {split: _of_manifest(Path(shards), split, cache) for split in ("train", "val")}
        splits = {split: (indices, _samples_of(indices)) for split, indices in by_split.items()}
    else:
        stored = [_index(path, cache) for path in expand([shards])]
        indices = [k.index for k in stored]
        samples_N2 = _samples_of(indices)
        held_out = _fractions(stored) < held_out_share(shards, cache, val_fraction)
        splits = {"train": (indices, samples_N2[~held_out]), "val": (indices, samples_N2[held_out])}
    account, stores, number = Account(sum(len(samples) for _, samples in splits.values())), {}, 0
    for split, (indices, samples_N2) in splits.items():
        stores[split] = OnlinePairs(indices, samples_N2, tokenizers, account, number)
        number += len(samples_N2)
    return stores


def held_out_share(shards: str, cache: Path, given: float | None) -> float:
    """Return the share of the pairs to hold out: ``given``, or the default for the samples of a pattern.

    Raises:
        UserError: shards are missing or damaged.
    """
    if given is not None:
        return given
    if (Path(shards) / MANIFEST).exists():
        return SHARE  # unused: the manifest has the splits
    return default_share(_fractions([_index(path, cache) for path in expand([shards])]).tolist())


def online_hash(shards: str, cache: Path) -> str:
    """Return the identity of the samples (10 hex digits): the hash of the manifest, or of the names, sizes and
    content of the tars.

    Args:
        shards: as for `open_online`.
        cache: folder in which the shards' indices are stored; the first call reads all bytes of a pattern's tars.

    Raises:
        UserError: shards are missing or damaged.
    """
    if (Path(shards) / MANIFEST).exists():
        return manifest_hash(shards)
    stored = [_index(path, cache) for path in expand([shards])]
    return identity_hash({"shards": [[k.index.path.name, k.index.length, k.content] for k in stored]})


@dataclass(frozen=True)
class _StoredIndex:
    """The index of a shard of N samples, as the cache stores it.

    Attributes:
        index: the index, with the files that belong to no pair.
        digests_N: uint64, the first 8 bytes of the sha256 of each sample's image file, or of the sample's key if it
            has no image file.
        content: sha256 of all keys, fields and files.
        sha256: sha256 of the shard if it matched a manifest; empty if it was not compared with one.
    """

    index: TarIndex
    digests_N: np.ndarray
    content: str
    sha256: str = ""


def _fractions(stored: Sequence[_StoredIndex]) -> np.ndarray:
    """Return `mmqk.store.hash_fraction` of the image file of every sample: (N,)."""
    return np.concatenate([k.digests_N for k in stored]).astype(np.float64) / 2.0**64


def _samples_of(shards: Sequence[TarIndex]) -> np.ndarray:
    """Return for every sample the number of its shard and its number in the shard: (N, 2)."""
    places = [np.stack([np.full(len(t), s), np.arange(len(t))], axis=1) for s, t in enumerate(shards)]
    return np.concatenate([np.zeros((0, 2), dtype=np.int64), *places])


def _of_manifest(folder: Path, split: str, cache: Path) -> list[TarIndex]:
    """Return the shards of a split. Each is compared with the manifest once, and again after the shard changes."""
    shards = load_manifest(folder).splits.get(split, ())
    stored = [_load(folder / shard.file, cache) for shard in shards]
    if any(k is None or k.sha256 != shard.sha256 for k, shard in zip(stored, shards, strict=True)):
        checked_shards(folder, split)
    indices = []
    for old, shard in zip(stored, shards, strict=True):
        new = old or _read(folder / shard.file)
        if len(new.index) != shard.samples:
            raise UserError(
                f"shard {new.index.path} has {len(new.index)} samples, but the manifest lists {shard.samples}: write"
                f" the manifest again with mmqk data shards {folder}"
            )
        if new.sha256 != shard.sha256:
            _save(replace(new, sha256=shard.sha256), cache)
        indices.append(new.index)
    return indices


def _index(path: Path, cache: Path) -> _StoredIndex:
    """Return the index of a shard, from the cache if possible: indexing a large shard takes seconds or minutes."""
    if (stored := _load(path, cache)) is None:
        stored = _read(path)
        _save(stored, cache)
    return stored


def _place(path: Path, cache: Path) -> Path:
    """Return the file that stores the index of a shard; its name depends on the shard's path, size and modification
    time."""
    about = path.stat()
    name = f"{path.resolve()}/{about.st_size}/{about.st_mtime_ns}"
    return cache / "index" / f"{hashlib.sha256(name.encode()).hexdigest()[:20]}.npz"


def _read(path: Path) -> _StoredIndex:
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
        count_unread(index.unread, "pair", key, sample)
    # Big endian, as in hash_fraction.
    return _StoredIndex(index, np.frombuffer(digests, dtype=">u8").astype(np.uint64), content.hexdigest())


def _load(path: Path, cache: Path) -> _StoredIndex | None:
    try:
        with np.load(_place(path, cache)) as arrays:
            about = json.loads(arrays["about"].tobytes())
            extent_M2, first, unread = arrays["extent"], arrays["first"], ReasonCounts(**about["unread"])
            names = about["keys"], about["fields"]
            index = TarIndex(path, path.stat().st_size, *names, extent_M2, first, about["files"], unread)
            return _StoredIndex(index, arrays["digests"], about["content"], about["sha256"])
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None  # the stored index is missing, damaged or of an earlier version


def _save(stored: _StoredIndex, cache: Path) -> None:
    index = stored.index
    about = {"keys": index.keys, "fields": index.fields, "files": index.files, "unread": asdict(index.unread)}
    about |= {"content": stored.content, "sha256": stored.sha256}
    try:
        place = _place(index.path, cache)
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as file:
            np.savez(
                file,
                # Strings are JSON: an array would pad each string to the longest one and lose a NUL at its end.
                about=np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
                extent=index.extent_M2,
                first=index.first,
                digests=stored.digests_N,
            )
    except OSError:
        pass  # the next run indexes the shard again
