"""Tokenize shards in worker processes, and show their progress."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_end
from typing import Any, TextIO

import numpy as np

from mmqk.data.tokens.worker import Encoder, ShardPart, TokenizeJob
from mmqk.progress import Progress
from mmqk.store import UserError

TICK_SECONDS = 0.5
_NAMED = 3

# Arguments: a shard and its result. The result is ("done", record), ("broken", sentence) if the shard cannot be read,
# or ("unwritable", reason) if the part cannot be written.
Handle = Callable[[ShardPart, tuple[str, Any]], None]
# Argument: an array with one row per shard: number of samples, number of dropped samples, share of the file read.
Tick = Callable[[np.ndarray], None]


def run_shards(job: TokenizeJob, shards: Sequence[ShardPart], workers: int, handle: Handle, tick: Tick) -> None:
    """Tokenize shards in worker processes, or in this process if workers is 0.

    Args:
        job: the settings of all shards.
        shards: the shards, in the order in which they start.
        workers: number of processes.
        handle: called in this process with each shard and its result.
        tick: called in this process at least every half second with the counts so far, an array (shards, 3).

    Raises:
        UserError: the tokenizers cannot be used, or a worker was killed. Other exceptions propagate.
    """
    if workers == 0:
        with _one_thread():
            _in_this_process(Encoder(job), shards, handle, tick)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not exist in a forked process
    shared = context.RawArray("d", 3 * len(shards))
    counts_N3 = np.frombuffer(shared).reshape(-1, 3)
    # The workers end when this process closes its end of the pipe, or is killed.
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _begin, (shared, theirs))
    waiting = iter(enumerate(shards))
    running: dict[Future[tuple[str, Any]], tuple[int, ShardPart]] = {}
    try:
        while True:
            for place, shard in islice(waiting, workers - len(running)):
                running[pool.submit(_tokenize, job, place, shard)] = place, shard
            if not running:
                break
            ended, _ = wait(running, TICK_SECONDS, FIRST_COMPLETED)
            for future in sorted(ended, key=lambda future: future.exception() is not None):
                result = future.result()
                place, shard = running.pop(future)
                if result[0] == "refused":
                    raise UserError(result[1])
                counts_N3[place] = _final(counts_N3[place], result)
                handle(shard, result)
            tick(counts_N3)
        pool.shutdown()
    except BrokenProcessPool:
        paths = [str(shard.path) for _, shard in running.values()]
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        during = f" while tokenizing {', '.join(paths[:_NAMED])}{more}" if paths else ""
        raise UserError(
            f"a worker was killed{during}: if the machine ran out of memory, give fewer --workers or a smaller"
            " --max-pixels; finished shards are kept, and the same command continues"
        ) from None
    finally:
        ours.close()
        pool.shutdown(cancel_futures=True)
        theirs.close()


def _in_this_process(encoder: Encoder, shards: Sequence[ShardPart], handle: Handle, tick: Tick) -> None:
    counts_N3 = np.zeros((len(shards), 3))
    for place, shard in enumerate(shards):

        def report(*now: float, place: int = place) -> None:
            counts_N3[place] = now
            tick(counts_N3)

        result = _attempt(encoder, shard, report)
        counts_N3[place] = _final(counts_N3[place], result)
        handle(shard, result)


def _final(counts_3: np.ndarray, result: tuple[str, Any]) -> tuple[float, float, float]:
    """Return the counts of a processed shard; an unreadable shard counts as fully read, with no samples."""
    return (counts_3[0], counts_3[1], 1.0) if result[0] == "done" else (0.0, 0.0, 1.0)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread, because the workers share the cores and results must not depend on their number."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _attempt(encoder: Encoder, shard: ShardPart, report: Callable[..., None]) -> tuple[str, Any]:
    try:
        return "done", encoder.shard(shard, report)
    except UserError as error:
        return "broken", str(error)
    except OSError as error:
        return "unwritable", error.strerror or str(error)


# Counts of all shards, in memory that a worker shares with the parent process.
_counts_N3 = np.zeros((0, 3))


def _begin(shared: Any, parent: Connection) -> None:
    """Prepare a worker process."""
    global _counts_N3
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the workers
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _counts_N3 = np.frombuffer(shared).reshape(-1, 3)


def _end_with(parent: Connection) -> None:
    wait_for_end([parent])
    os._exit(1)


def _tokenize(job: TokenizeJob, place: int, shard: ShardPart) -> tuple[str, Any]:
    """Tokenize a shard in a worker. Returns ("refused", sentence) if the tokenizers cannot be used."""
    with _one_thread():
        try:
            encoder = _encoder(job)
        except UserError as error:
            return "refused", str(error)
        return _attempt(encoder, shard, lambda *now: _counts_N3.__setitem__(place, now))


@cache
def _encoder(job: TokenizeJob) -> Encoder:
    return Encoder(job)


class ShardProgress:
    """Shows the progress of the shards.

    ``3 of 100 shards · 30,120 samples · 512 samples/s · 12 dropped · about 1:45 left``

    The rate is measured from the first sample on; the time left is estimated from the bytes read.

    Args:
        sizes: bytes of the shards to tokenize, in the order of `run_shards`.
        total: number of all shards.
        records: records of the finished shards by part; the caller adds to it during the run.
        broken: a sentence for each shard that cannot be used; the caller adds to it during the run.
        stream: stderr by default.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        total: int,
        records: Mapping[str, Mapping[str, Any]],
        broken: Collection[str],
        stream: TextIO | None = None,
    ):
        self.progress = Progress(stream)
        self._sizes_N = np.array(sizes, dtype=float)
        self._total, self._records, self._broken = total, records, broken
        self._samples_before = sum(record["samples"] for record in records.values())
        self._dropped_before = sum(sum(record["dropped"].values()) for record in records.values())
        self._first: tuple[float, float] | None = None

    def __call__(self, counts_N3: np.ndarray) -> None:
        """Show the progress if the interval has passed."""
        if self._first is None and counts_N3.any():
            self._first = time.monotonic(), counts_N3[:, 0].sum()
            self.progress.begin(self._bytes(counts_N3))
        if self.progress.due():
            self.progress.show(*self.state(counts_N3))

    def state(self, counts_N3: np.ndarray) -> tuple[str, float | None, float]:
        """Return the text of the display, the bytes read, and the total bytes."""
        parts, total = [f"{len(self._records)} of {self._total} shards"], float(self._sizes_N.sum())
        if self._first is None:
            return " · ".join([*parts, "starting"]), None, total
        samples, dropped, _ = counts_N3.sum(axis=0)
        start, first = self._first
        rate = (samples - first) / max(time.monotonic() - start, 1e-9)
        parts += [
            f"{self._samples_before + samples:,.0f} samples",
            f"{rate:,.0f} samples/s",
            f"{self._dropped_before + dropped:,.0f} dropped",
        ]
        if self._broken:
            parts.append(f"{len(self._broken)} unreadable")
        return " · ".join(parts), self._bytes(counts_N3), total

    def _bytes(self, counts_N3: np.ndarray) -> float:
        return float(self._sizes_N @ counts_N3[:, 2])
