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

from mmqk.data.tokens.worker import Encoder, ShardPart, TokenizeJob
from mmqk.progress import Progress
from mmqk.store import UserError

TICK_SECONDS = 0.5
_NAMED = 3

# Arguments: a shard and its result. The result is ("done", record), ("broken", sentence) if the shard cannot be read,
# or ("unwritable", reason) if the part cannot be written.
Handle = Callable[[ShardPart, tuple[str, Any]], None]
# Argument: number of samples that were read so far.
Tick = Callable[[int], None]


def run_shards(job: TokenizeJob, shards: Sequence[ShardPart], workers: int, handle: Handle, tick: Tick) -> None:
    """Tokenize shards in worker processes, or in this process if workers is 0.

    Args:
        job: the settings of all shards.
        shards: the shards, in the order in which they start.
        workers: number of processes.
        handle: called in this process with each shard and its result.
        tick: called in this process at least every half second.

    Raises:
        UserError: the tokenizers cannot be used, or a worker was killed. Other exceptions propagate.
    """
    if workers == 0:
        samples = 0

        def count() -> None:
            nonlocal samples
            tick(samples := samples + 1)

        with _one_thread():
            encoder = Encoder(job)
            for shard in shards:
                handle(shard, _attempt(encoder, shard, count))
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not exist in a forked process
    read = context.Value("Q", 0)
    # The workers end when this process closes its end of the pipe, or is killed.
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _begin, (read, theirs))
    waiting = iter(shards)
    running: dict[Future[tuple[str, Any]], ShardPart] = {}
    try:
        while True:
            for shard in islice(waiting, workers - len(running)):
                running[pool.submit(_tokenize, job, shard)] = shard
            if not running:
                break
            ended, _ = wait(running, TICK_SECONDS, FIRST_COMPLETED)
            for future in sorted(ended, key=lambda future: future.exception() is not None):
                result = future.result()
                shard = running.pop(future)
                if result[0] == "refused":
                    raise UserError(result[1])
                handle(shard, result)
            tick(read.value)
        pool.shutdown()
    except BrokenProcessPool:
        paths = [str(shard.path) for shard in running.values()]
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


def _attempt(encoder: Encoder, shard: ShardPart, count: Callable[[], None]) -> tuple[str, Any]:
    try:
        return "done", encoder.shard(shard, count)
    except UserError as error:
        return "broken", str(error)
    except OSError as error:
        return "unwritable", error.strerror or str(error)


_read: Any = None  # number of samples that all workers have read, in shared memory


def _begin(read: Any, parent: Connection) -> None:
    """Prepare a worker process."""
    global _read
    _read = read
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the workers
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _end_with(parent: Connection) -> None:
    wait_for_end([parent])
    os._exit(1)


def _tokenize(job: TokenizeJob, shard: ShardPart) -> tuple[str, Any]:
    """Tokenize a shard in a worker. Returns ("refused", sentence) if the tokenizers cannot be used."""

    def count() -> None:
        with _read.get_lock():
            _read.value += 1

    with _one_thread():
        try:
            encoder = _encoder(job)
        except UserError as error:
            return "refused", str(error)
        return _attempt(encoder, shard, count)


@cache
def _encoder(job: TokenizeJob) -> Encoder:
    return Encoder(job)


class ShardProgress:
    """Shows ``3 of 100 shards · 30,120 samples · 512 samples/s · 12 dropped · about 1:45 left``.

    The time left is estimated from the bytes of the finished shards.

    Args:
        sizes: bytes of each shard to tokenize, by part.
        total: number of all shards.
        records: records of the finished shards by part; the caller adds to it during the run.
        broken: a sentence for each shard that cannot be used; the caller adds to it during the run.
        stream: stderr by default.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        total: int,
        records: Mapping[str, Mapping[str, Any]],
        broken: Collection[str],
        stream: TextIO | None = None,
    ):
        self.progress = Progress(stream)
        self.progress.begin(0)
        self._sizes, self._total, self._records, self._broken = sizes, total, records, broken
        self._before = sum(record["samples"] for record in records.values())
        self._start = time.monotonic()

    def __call__(self, samples: int) -> None:
        """Show the progress if the interval has passed."""
        if not self.progress.due():
            return
        rate = samples / max(time.monotonic() - self._start, 1e-9)
        dropped = sum(sum(record["dropped"].values()) for record in self._records.values())
        text = (
            f"{len(self._records)} of {self._total} shards · {self._before + samples:,} samples ·"
            f" {rate:,.0f} samples/s · {dropped:,} dropped"
        )
        text += f" · {len(self._broken)} unreadable" if self._broken else ""
        done = sum(size for part, size in self._sizes.items() if part in self._records)
        self.progress.show(text, done, sum(self._sizes.values()))
