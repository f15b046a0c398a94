"""Encode documents of texts and images as ids, open the documents of a source, and tokenize shards.

```
text ── BPE ─────────────────────────────────────┐
image ── batches ── codes ── <image>, </image> ──┴── joint vocabulary ── <eos> ──> ids
```

`open_source` opens a token folder as it is, and a folder of shards with a manifest through the token cache: a token
folder under ``.cache/tokens``, made once in one process. For sets that need several, `run_shards` tokenizes the shards
of `mmqk data tokenize` in worker processes: each shard becomes a part of the token folder.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from PIL import Image

from mmqk.data.mixture import random_stream
from mmqk.data.shards.files import index_tar
from mmqk.data.shards.images import MAX_PIXELS, Dropped, Fit, load_image
from mmqk.data.shards.manifest import IMAGE_SIZE, manifest_hash, read_pairs, read_text, sha256_file, split_of
from mmqk.data.shards.read import read_samples
from mmqk.data.shards.samples import EMPTY_DOCUMENT, ReasonCounts, count_unread, document_of
from mmqk.data.tokenizers.files import SPECIALS, TextTokenizer, read_config, tokenizers_hash
from mmqk.data.tokens.folder import TokenStore, TokenWriter, is_token_folder, layout_of, open_tokens, read_header
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
        self._images: Any = None
        self._fit, self._max_pixels = fit, max_pixels
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
        document, images = list[np.ndarray](), list[tuple[Image.Image, list[np.ndarray], int]]()
        for n, place in enumerate(places):
            if isinstance(place, bytes):
                place = load_image(place, self._images.image_size, self._fit, self._max_pixels)
            if isinstance(place, Image.Image):
                images.append((place, document, n))
            ids = self._text.encode(place) if isinstance(place, str) else []
            document.append(np.array(ids, dtype=self.layout.dtype) + len(SPECIALS))
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
        pixels_BHWC = np.stack([np.asarray(image) for image, _, _ in self._waiting])
        pixels_BCHW = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2).contiguous().float() / 255
        codes_BN = self._images.encode(pixels_BCHW).numpy() + self.layout.vocab_sizes["text"]
        begin, end = self.layout.begin_image, self.layout.end_image
        for codes_N, (_, document, n) in zip(codes_BN, self._waiting, strict=True):
            document[n] = np.array([begin, *codes_N, end], dtype=self.layout.dtype)
            self.tokens += len(document[n])
        self._waiting.clear()


FORMAT = 3


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
    with writing(f"The token cache {made.parent}", "set --data.cache."):
        made.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{made}.lock").acquire()
    with lock:
        if is_token_folder(made):  # another process made it before this one got the lock
            return
        with new_folder(made) as folder_of_tokens:
            encoder = DocumentEncoder(tokenizers, images=kind == "pair")
            writer = TokenWriter(folder_of_tokens, kind, encoder.layout, made_by)
            for split in ("train", "val"):
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
        caption_of_N: the pair whose caption each pair has.

    Raises:
        ValueError: there is only one pair to shuffle.
    """

    def __init__(self, pairs: TokenStore, pairing: str) -> None:
        n = len(pairs)
        self._pairs, self._image = pairs, pairs.image_tokens if n else 0
        self.caption_of_N, self.image_tokens = np.arange(n), 0
        if pairing == "shuffled":
            if n == 1:
                raise ValueError("data.pairing 'shuffled' needs two pairs in each split: hold out more, or none.")
            order = random_stream(SHUFFLE_SEED, n).permutation(n)
            self.caption_of_N[order] = np.roll(order, 1)
            self.image_tokens = self._image
        # All images have the same length.
        self.lengths_N = pairs.lengths_N[self.caption_of_N] - self._image + self.image_tokens
        self.tokens = int(self.lengths_N.sum())

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, n: int) -> np.ndarray:
        """Return the ids of document n, int64."""
        caption = self._pairs[int(self.caption_of_N[n])][self._image :]
        return np.concatenate([self._pairs[n][: self.image_tokens], caption])


# Beyond this many tokens a part continues in another file, which bounds memory.
TOKENS_A_FILE = 2**25


@dataclass(frozen=True)
class TokenizeJob:
    """Tokenizes shards; each process has a copy that loads its own tokenizers.

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

    @cached_property
    def documents(self) -> DocumentEncoder:
        """The tokenizers."""
        return DocumentEncoder(self.tokenizers, self.kind != "text", self.fit, self.max_pixels)

    @cached_property
    def writer(self) -> TokenWriter:
        """The writer of the token folder."""
        return TokenWriter(self.out, self.kind, self.documents.layout, tokenizers_hash(self.tokenizers))

    def result(self, item: tuple[str, Path]) -> tuple[str, str, Any]:
        """Write a part, given its name and its shard. Return (part, kind, content).

        The kind is "done" with the record of the shard, "broken" with a sentence if the shard cannot be read, or
        "unwritable" with a reason if its part cannot be written.

        Raises:
            UserError: the tokenizers are missing or damaged.
        """
        self.writer  # noqa: B018 - tokenizers that cannot be loaded are no broken shard
        part, path = item
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
        index = None if self.kind == "text" else index_tar(path)
        dropped, kept = ReasonCounts(), list[tuple[str, str]]()
        unread = ReasonCounts() if index is None else index.unread
        counts, samples, files = {"train": 0, "val": 0}, 0, 0
        self.documents.clear()  # drop documents of an earlier shard that was not read to its end
        for key, sample in read_samples(path, self.kind) if index is None else index:
            samples += 1
            try:
                identity, places = document_of(sample, self.kind, self.caption_field)
                self.documents.add(places)
                kept.append((split_of(identity, self.val_fraction), key))
                counts[kept[-1][0]] += 1
            except Dropped as fault:
                dropped.add(fault.reason, key)
            if index is not None:
                count_unread(unread, self.kind, key, sample)
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
        for split in ("train", "val"):
            if of_split := [(ids, key) for ids, (of, key) in zip(documents, kept, strict=True) if of == split]:
                self.writer.add_part(split, name, [ids for ids, _ in of_split], [key for _, key in of_split])
        kept.clear()


def run_shards(
    job: TokenizeJob, shards: Mapping[str, Path], workers: int
) -> Generator[tuple[str, str, Any], None, None]:
    """Tokenize shards in worker processes, or in this process if workers is 0, and yield the results of
    `TokenizeJob.result`.

    Closing the iterator ends the workers.

    Raises:
        UserError: the tokenizers cannot be used, or a worker was killed.
    """
    import torch
    from torch.utils.data import DataLoader

    left = dict(shards)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # results must not depend on the number of threads; a loader's workers have one each
    options: dict[str, Any] = {"batch_size": None, "num_workers": workers, "in_order": False, "collate_fn": job.result}
    if workers:  # torch's threads do not exist in a forked process
        options |= {"multiprocessing_context": "spawn", "prefetch_factor": 1, "worker_init_fn": _begin}
    loader: DataLoader[Any] = DataLoader(list(shards.items()), **options)  # type: ignore[arg-type]
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
