"""Turn one shard into one part of a token folder, in each process of `mmqk.data.tokenize`.

```
sample ── places (image bytes, texts) ── squares, ids ── batches of images ── documents by split ──> part
```

A part depends only on its shard and the job, not on the process or on earlier parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmqk.data.tokens.folder import SPLITS, Layout, TokenWriter, layout_of
from mmqk.shards.images import Dropped, Fit, load_image
from mmqk.shards.lines import read_lines
from mmqk.shards.manifest import sha256_file
from mmqk.shards.samples import (
    EMPTY_DOCUMENT,
    interleaved_of,
    pair_of,
    text_of,
    unread_fields,
    unread_reason,
)
from mmqk.shards.tars import TarIndex, index_tar
from mmqk.shards.unread import EXAMPLES, OF_DROPPED, UNUSED, Unread
from mmqk.store import hash_fraction

IMAGES_A_BATCH = 64
# Beyond this many tokens a part continues in another file, which bounds memory.
TOKENS_A_FILE = 2**25
REPORT_EVERY_SECONDS = 0.2

Place = bytes | str
Report = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Job:
    """Settings of all shards.

    Attributes:
        kind: pair, interleaved or text.
        tokenizers: folder of the tokenizers.
        out: the token folder.
        val_fraction: share of the documents that go to val, by a hash of their content.
        fit: how images fit into the square, see `load_image`.
        max_pixels: cap on a decoded image.
        caption_field: see `pair_of`.
    """

    kind: str
    tokenizers: Path
    out: Path
    val_fraction: float
    fit: Fit
    max_pixels: int
    caption_field: str | None


@dataclass(frozen=True)
class ShardPart:
    """A file and the name of its part."""

    part: str
    path: Path


def split_of(identity: bytes, val_fraction: float) -> str:
    """The split of a document; equal content falls into the same split in every shard."""
    return "val" if hash_fraction(identity) < val_fraction else "train"


class Encoder:
    """The tokenizers and the writer of one job.

    Raises:
        UserError: the tokenizers are missing or damaged.
    """

    def __init__(self, job: Job) -> None:
        from mmqk.tokenizers import ImageTokenizer, JointVocabulary, TextTokenizer, tokenizers_hash

        self.job = job
        self.layout: Layout = layout_of(job.tokenizers)
        self.writer = TokenWriter(job.out, job.kind, self.layout, tokenizers_hash(job.tokenizers))
        self._vocabulary = JointVocabulary.load(job.tokenizers)
        self._text = TextTokenizer.load(job.tokenizers)
        self._images = None if job.kind == "text" else ImageTokenizer.load(job.tokenizers)

    def shard(self, shard: ShardPart, report: Report) -> dict[str, Any]:
        """Write the part of one shard.

        Args:
            shard: the file.
            report: called at intervals and before each write with samples, dropped samples, share of the file read.

        Returns:
            The shard's record: file, size, sha256, samples, documents by split, dropped by reason, examples; of an
            archive also the number of its files, and the files that no document uses.

        Raises:
            UserError: the shard cannot be read to its end. OSError: the part cannot be written.
        """
        part, kind = _Part(self, shard.part, report), self.job.kind
        index = None if kind == "text" else index_tar(shard.path)
        unread, files = (Unread(), {}) if index is None else (index.unread, {"files": index.files})
        for key, fields, make, share in _samples(self.job, shard.path if index is None else index):
            part.samples += 1
            try:
                identity, places = make()
                part.add(split_of(identity, self.job.val_fraction), places)
                left, reason = unread_fields(kind, fields), UNUSED
            except Dropped as dropped:
                part.drop(dropped.reason, key)
                left, reason = fields, OF_DROPPED
            for field in left:
                unread.add(unread_reason(kind, field, reason), f"{key}.{field}")
            part.report(share)
        part.write()
        return {
            "file": shard.path.name,
            "size": shard.path.stat().st_size,
            "sha256": sha256_file(shard.path),
            "samples": part.samples,
            "documents": part.documents,
            "dropped": dict(sorted(part.dropped.items())),
            "examples": part.examples,
            **files,
            "unread": asdict(unread),
        }

    def square(self, content: bytes) -> np.ndarray:
        """An image file as a uint8 square (H, W, 3)."""
        assert self._images is not None
        return np.asarray(load_image(content, self._images.image_size, self.job.fit, self.job.max_pixels))

    def images(self, squares: list[np.ndarray]) -> np.ndarray:
        """Encode squares to ids with the marks around each image: (images, codes + 2)."""
        import torch

        assert self._images is not None
        pixels_BCHW = torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).contiguous().float() / 255
        codes_BN = self._vocabulary.image(self._images.encode(pixels_BCHW).numpy())
        begin_B1, end_B1 = (
            np.full((len(squares), 1), mark) for mark in (self.layout.begin_image, self.layout.end_image)
        )
        return np.concatenate([begin_B1, codes_BN, end_B1], axis=1).astype(self.writer.dtype)

    def text(self, text: str) -> np.ndarray:
        """Joint ids of a text."""
        return np.array(self._vocabulary.text(self._text.encode(text)), dtype=self.writer.dtype)


class _Part:
    """The documents of one shard that are not written yet."""

    def __init__(self, encoder: Encoder, name: str, report: Report) -> None:
        self._encoder, self._name, self._report = encoder, name, report
        self.samples = 0
        self.documents = dict.fromkeys(SPLITS, 0)
        self.dropped: dict[str, int] = {}
        self.examples: dict[str, list[str]] = {}
        self._pending: list[tuple[str, list[np.ndarray]]] = []  # split, pieces of a document
        self._squares: list[np.ndarray] = []
        self._slots: list[tuple[list[np.ndarray], int]] = []  # destinations of the squares' ids
        self._tokens = 0
        self._files = 0
        self._share = 0.0
        self._reported = time.monotonic()

    def add(self, split: str, places: list[Place]) -> None:
        """Add a document; it is dropped as a whole if one of its images is dropped."""
        encoder = self._encoder
        loaded = [encoder.square(p) if isinstance(p, bytes) else encoder.text(p) for p in places]
        if not any(map(len, loaded)):
            raise Dropped(EMPTY_DOCUMENT)
        pieces = [*loaded, np.array([encoder.layout.eos], dtype=encoder.writer.dtype)]
        self._pending.append((split, pieces))
        self.documents[split] += 1
        for place, piece in enumerate(loaded):
            if isinstance(places[place], str):
                self._tokens += len(piece)
                continue
            self._squares.append(piece)
            self._slots.append((pieces, place))
            if len(self._squares) == IMAGES_A_BATCH:
                self._encode()
        if self._tokens >= TOKENS_A_FILE:
            self.write()

    def drop(self, reason: str, key: str) -> None:
        """Count a sample that is not used."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(key)

    def report(self, share: float) -> None:
        """Report the progress of the shard if the interval has passed."""
        self._share = share
        if (now := time.monotonic()) - self._reported >= REPORT_EVERY_SECONDS:
            self._reported = now
            self._report(self.samples, sum(self.dropped.values()), share)

    def write(self) -> None:
        """Write the pending documents as one file per split."""
        self._encode()
        self._report(self.samples, sum(self.dropped.values()), self._share)
        # "_" sorts after ".", so that files are read in the order in which they were written.
        name = f"{self._name}_{self._files:06d}" if self._files else self._name
        for split in SPLITS:
            documents = [np.concatenate(pieces) for of, pieces in self._pending if of == split]
            if documents:
                self._encoder.writer.add_part(split, name, documents)
        self._pending.clear()
        self._tokens = 0
        self._files += 1

    def _encode(self) -> None:
        if not self._squares:
            return
        for (pieces, place), ids in zip(self._slots, self._encoder.images(self._squares), strict=True):
            pieces[place] = ids
            self._tokens += len(ids)
        self._squares.clear()
        self._slots.clear()


Sample = tuple[str, list[str], Callable[[], tuple[bytes, list[Place]]], float]


def _samples(job: Job, source: Path | TarIndex) -> Iterator[Sample]:
    """Key, fields, a function that gives identity and places or raises Dropped, and the share of the file read."""
    if isinstance(source, Path):
        for number, line, share in read_lines(source):
            if line.strip():
                yield f"line {number}", [], partial(_text_document, line), share
        return
    for i, (key, sample) in enumerate(source):
        yield key, list(sample), partial(_document, job, sample), (i + 1) / len(source)


def _document(job: Job, sample: dict[str, bytes]) -> tuple[bytes, list[Place]]:
    if job.kind == "interleaved":
        return sample.get("json", b""), interleaved_of(sample)
    content, caption = pair_of(sample, job.caption_field)
    return content, [content, caption]


def _text_document(line: bytes) -> tuple[bytes, list[Place]]:
    text = text_of(line)
    return text.encode(), [text]
