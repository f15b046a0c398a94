"""Encode documents of texts and images as ids, and shards as parts of a token folder.

```
text ── BPE ───────────────────────┐
image ── batches ── codes ── <boi>, <eoi> ┴─ joint vocabulary ── <eos> ──> ids
```

The token cache and pairs that are read during training use `DocumentEncoder`; `mmqk data tokenize` uses `run_shards`.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmqk.data.shards.archives import index_tar, read_samples
from mmqk.data.shards.images import Dropped, Fit, load_image
from mmqk.data.shards.manifest import sha256_file, split_of
from mmqk.data.shards.samples import EMPTY_DOCUMENT, ReasonCounts, count_unread, document_of
from mmqk.data.tokenizers.files import SPECIALS, TextTokenizer, tokenizers_hash
from mmqk.data.tokens.folder import SPLITS, TokenWriter, layout_of
from mmqk.store import UserError

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


# Beyond this many tokens a part continues in another file, which bounds memory.
TOKENS_A_FILE = 2**25


@dataclass(frozen=True)
class TokenizeJob:
    """Settings that all shards share.

    Attributes:
        kind: pair, interleaved or text.
        tokenizers: folder of the tokenizers.
        out: the token folder.
        val_fraction: share of the documents that go to val, by a hash of their content.
        fit: how images fit into the square, see `load_image`.
        max_pixels: largest number of pixels of an image; larger images are dropped.
        caption_field: see `pair_of`.
    """

    kind: str
    tokenizers: Path
    out: Path
    val_fraction: float
    fit: Fit
    max_pixels: int
    caption_field: str | None


def run_shards(
    job: TokenizeJob, shards: Mapping[str, Path], workers: int
) -> Generator[tuple[str, str, Any], None, None]:
    """Tokenize shards in worker processes, or in this process if workers is 0, and yield the results of `Encoder`.

    Closing the iterator ends the workers.

    Raises:
        UserError: the tokenizers cannot be used, or a worker was killed.
    """
    import torch
    from torch.utils.data import DataLoader

    left = dict(shards)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # results must not depend on the number of threads; a loader's workers have one each
    options: dict[str, Any] = {"batch_size": None, "num_workers": workers, "in_order": False}
    if workers:  # torch's threads do not exist in a forked process
        options |= {"multiprocessing_context": "spawn", "prefetch_factor": 1, "worker_init_fn": _begin}
    loader: DataLoader[Any] = DataLoader(Encoder(job, shards), **options)  # type: ignore[arg-type]
    try:
        for part, kind, content in loader:
            del left[part]
            yield part, kind, content
    except UserError as error:  # the loader puts the traceback of a worker before the message
        raise UserError(str(error).rsplit("UserError: ", 1)[-1].strip()) from None
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        paths = ", ".join(map(str, islice(left.values(), workers)))  # those that are not waiting
        raise UserError(
            f"a worker was killed while tokenizing {paths}: if the machine ran out of memory, give fewer --workers"
            " or a smaller --max-pixels; finished shards are kept, and the same command continues"
        ) from None
    finally:
        torch.set_num_threads(threads)


def _begin(_: int) -> None:
    """Prepare a worker process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


class Encoder:
    """Tokenizes the shards of one job; a data set of torch, whose item n is (part, kind, content) of shard n.

    ``shards`` maps the name of a part to the file that the part is made from. The kind is "done" with the record of
    the shard, "broken" with a sentence if the shard cannot be read, or "unwritable" with a reason if its part cannot
    be written.

    Raises (at the first item):
        UserError: the tokenizers are missing or damaged.
    """

    def __init__(self, job: TokenizeJob, shards: Mapping[str, Path]) -> None:
        self.job, self.shards = job, list(shards.items())

    def __len__(self) -> int:
        return len(self.shards)

    @cached_property
    def documents(self) -> DocumentEncoder:
        """The tokenizers; each process loads its own."""
        return DocumentEncoder(self.job.tokenizers, images=self.job.kind != "text")

    @cached_property
    def writer(self) -> TokenWriter:
        """The writer of the token folder."""
        job = self.job
        return TokenWriter(job.out, job.kind, self.documents.layout, tokenizers_hash(job.tokenizers))

    def __getitem__(self, n: int) -> tuple[str, str, Any]:
        self.writer  # noqa: B018 - tokenizers that cannot be loaded are no broken shard
        part, path = self.shards[n]
        try:
            return part, "done", self.shard(part, path)
        except UserError as error:
            return part, "broken", str(error)
        except OSError as error:
            return part, "unwritable", error.strerror or str(error)

    def shard(self, part: str, path: Path) -> dict[str, Any]:
        """Write the part of one shard.

        Returns:
            The record of the shard: its file name, size and sha256; the numbers of samples, of documents by split and
            of dropped samples by reason; names of some dropped samples; and counts of the files that no document
            uses. The record of an archive also has the number of its files.

        Raises:
            UserError: the shard cannot be read to its end. OSError: the part cannot be written.
        """
        job, index = self.job, None if self.job.kind == "text" else index_tar(path)
        dropped, kept = ReasonCounts(), list[tuple[str, str]]()
        unread = ReasonCounts() if index is None else index.unread
        counts, samples, files = dict.fromkeys(SPLITS, 0), 0, 0
        self.documents.clear()  # drop documents of an earlier shard that was not read to its end
        for key, sample in read_samples(path, job.kind) if index is None else index:
            samples += 1
            try:
                identity, places = document_of(sample, job.kind, job.caption_field)
                self.documents.add([self._loaded(place) for place in places])
                kept.append((split_of(identity, job.val_fraction), key))
                counts[kept[-1][0]] += 1
            except Dropped as fault:
                dropped.add(fault.reason, key)
            if index is not None:
                count_unread(unread, job.kind, key, sample)
            if self.documents.tokens >= TOKENS_A_FILE:
                self._write(part, files, kept)
                files += 1
        self._write(part, files, kept)
        return {
            "file": path.name,
            "size": path.stat().st_size,
            "sha256": sha256_file(path),
            "samples": samples,
            "documents": counts,
            "dropped": dict(sorted(dropped.counts.items())),
            "examples": dropped.examples,
            **({} if index is None else {"files": index.files}),
            "unread": asdict(unread),
        }

    def _write(self, part: str, files: int, kept: list[tuple[str, str]]) -> None:
        """Write the pending documents of a part that has ``files`` files already; ``kept`` has the split and the key
        of each."""
        # "_" sorts after ".", so the files are read in the order in which they were written.
        name = f"{part}_{files:06d}" if files else part
        documents = self.documents.take()
        for split in SPLITS:
            if of_split := [(ids, key) for ids, (of, key) in zip(documents, kept, strict=True) if of == split]:
                self.writer.add_part(split, name, [ids for ids, _ in of_split], [key for _, key in of_split])
        kept.clear()

    def _loaded(self, place: bytes | str) -> str | Image.Image:
        """Return a text unchanged, or an image decoded."""
        if isinstance(place, str):
            return place
        return load_image(place, self.documents.image_size, self.job.fit, self.job.max_pixels)
