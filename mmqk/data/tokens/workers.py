"""Tokenize the shards of `mmqk data tokenize` in worker processes: each shard becomes a part of the token folder."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from mmqk.data.shards.images import Dropped, Fit
from mmqk.data.shards.manifest import sha256_file, split_of
from mmqk.data.shards.read import read_samples
from mmqk.data.shards.samples import ReasonCounts, count_unread, document_of
from mmqk.data.shards.tar import index_tar
from mmqk.data.tokenizers.files import tokenizers_hash
from mmqk.data.tokens.encode import DocumentEncoder
from mmqk.data.tokens.folder import SPLITS, TokenWriter
from mmqk.store import UserError

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
        counts, samples, files = dict.fromkeys(SPLITS, 0), 0, 0
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
        for split in SPLITS:
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
