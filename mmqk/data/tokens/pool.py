"""Send shards to worker processes, receive their messages, and show one line of progress."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TextIO, cast

from mmqk.data.tokens.worker import Encoder, Job, Report, ShardPart
from mmqk.store import UserError, clock

LIVE_EVERY_SECONDS = 0.5
PLAIN_EVERY_SECONDS = 10.0
_MEMORY = "if memory ran out, give fewer --workers or a smaller --max-pixels"

# A shard and a message about it: ("ready", None) when its worker begins, ("progress", (samples, dropped, share)),
# ("done", record), ("broken", sentence), ("unwritable", why); or no shard and ("tick", None) to update the line.
Handle = Callable[[ShardPart | None, tuple[str, Any]], None]


def run_shards(job: Job, shards: Sequence[ShardPart], workers: int, handle: Handle) -> None:
    """Tokenize shards in worker processes, or in this process if workers is 0.

    If a worker is killed, its shard is reported as broken and a new worker replaces it.

    Raises:
        UserError: the tokenizers cannot be used.
        RuntimeError: a bug in a worker, with its traceback. Errors of `handle` are passed on.
    """
    if workers == 0:
        with one_thread():
            encoder = Encoder(job)
            handle(None, ("ready", None))
            for shard in shards:
                report = _reporter(shard, handle)
                handle(shard, attempt(encoder, shard, report))
        return
    waiting = list(reversed(shards))
    ready: set[Connection] = set()
    crew: dict[Connection, tuple[BaseProcess, ShardPart]] = {}
    try:
        while waiting or crew:
            while waiting and len(crew) < workers:
                shard = waiting.pop()
                connection, process = _start(job)
                _send(connection, shard)
                crew[connection] = (process, shard)
            for speaking in wait(list(crew), timeout=LIVE_EVERY_SECONDS):
                connection = cast("Connection", speaking)
                process, shard = crew[connection]
                try:
                    message = connection.recv()
                except (EOFError, ConnectionResetError):
                    del crew[connection]
                    process.join()
                    if connection not in ready:
                        raise RuntimeError(f"a worker ended while starting ({_how(process)})") from None
                    message = ("broken", f"{shard.path} lost its worker ({_how(process)}): {_MEMORY}")
                if message[0] == "ready":
                    ready.add(connection)
                if message[0] == "refused":
                    raise UserError(message[1])
                if message[0] == "failed":
                    raise RuntimeError(f"a worker failed at {shard.path}:\n{message[1]}")
                if message[0] not in ("ready", "progress") and connection in crew:
                    if waiting:
                        crew[connection] = (process, following := waiting.pop())
                        _send(connection, following)
                    else:
                        del crew[connection]
                        connection.close()  # which ends the process
                handle(shard, message)
            handle(None, ("tick", None))
    finally:
        for process, _ in crew.values():
            process.terminate()
        for process, _ in crew.values():
            process.join()


def _reporter(shard: ShardPart, handle: Handle) -> Callable[[int, int, float], None]:
    return lambda *now: handle(shard, ("progress", now))


def _start(job: Job) -> tuple[Connection, BaseProcess]:
    # spawn, as torch's threads do not survive a fork
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, job), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _send(connection: Connection, shard: ShardPart) -> None:
    # If the worker has just died, `run_shards` gets EOFError from its connection.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(shard)


def _how(process: BaseProcess) -> str:
    code = process.exitcode
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: the workers share the cores, and sums do not depend on the number of cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def attempt(encoder: Encoder, shard: ShardPart, report: Report) -> tuple[str, Any]:
    """Return ``done`` and the record, ``broken`` if the shard cannot be read, or ``unwritable`` for the output."""
    try:
        return "done", encoder.shard(shard, report)
    except UserError as error:
        return "broken", str(error)
    except (BrokenPipeError, EOFError):
        raise
    except OSError as error:
        return "unwritable", error.strerror or str(error)


def work(connection: Connection, job: Job) -> None:
    """Main loop of a worker process: receive shards through the connection, send messages back.

    The process ends when the connection closes, so that it does not outlive its parent for long.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with one_thread():
            try:
                encoder = Encoder(job)
            except UserError as error:
                connection.send(("refused", str(error)))
                return
            connection.send(("ready", None))
            while True:
                shard = connection.recv()
                connection.send(attempt(encoder, shard, lambda *now: connection.send(("progress", now))))
    except (BrokenPipeError, EOFError, ConnectionResetError):
        return
    except Exception:
        connection.send(("failed", traceback.format_exc()))


@dataclass
class TokenizeProgress:
    """Progress of the shards: rewritten in place on a terminal, otherwise a line every ten seconds.

    ``3 of 100 shards · 30,120 samples · 512 samples/s · 12 dropped · about 1:45 left``

    The rate counts from the time when the first worker is ready; the time left is estimated from the bytes read.

    Attributes:
        sizes: bytes of the shards still to do, by part.
        total: all shards.
        shards: shards that are done.
        samples: samples of the done shards.
        dropped: dropped samples of the done shards.
        stream: stderr by default.
    """

    sizes: dict[str, int]
    total: int
    shards: int = 0
    samples: int = 0
    dropped: int = 0
    stream: TextIO = field(default_factory=lambda: sys.stderr)

    def __post_init__(self) -> None:
        self.live = self.stream.isatty()
        self._running: dict[str, tuple[int, int, float]] = {}
        self._read = 0
        self._broken = 0
        self._began: float | None = None
        self._before = self.samples
        self._shown = time.monotonic() if not self.live else 0.0
        self._written = False

    def __call__(self, shard: ShardPart | None, message: tuple[str, Any]) -> None:
        """Handle a message of `run_shards` and show the line if an interval has passed."""
        kind, content = message
        if kind == "ready" and self._began is None:
            self._began = time.monotonic()
        elif kind == "progress" and shard is not None:
            self._running[shard.part] = content
        elif kind in ("done", "broken") and shard is not None:
            self._running.pop(shard.part, None)
            self._read += self.sizes[shard.part]
            self._broken += kind == "broken"
            if kind == "done":
                self.shards += 1
                self.samples += content["samples"]
                self.dropped += sum(content["dropped"].values())
        now = time.monotonic()
        if now - self._shown >= (LIVE_EVERY_SECONDS if self.live else PLAIN_EVERY_SECONDS):
            self._shown = now
            self._write(self.line(now))

    def close(self) -> None:
        """Clear the line of a terminal."""
        if self.live and self._written:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def line(self, now: float) -> str:
        """The line at time ``now`` (seconds of a monotonic clock)."""
        samples = self.samples + sum(running[0] for running in self._running.values())
        parts = [f"{self.shards} of {self.total} shards"]
        if self._began is None or not (self._running or self._read):
            return " · ".join([*parts, "starting"])
        seconds = max(now - self._began, 1e-9)
        rate = (samples - self._before) / seconds
        dropped = self.dropped + sum(running[1] for running in self._running.values())
        parts += [f"{samples:,} samples", f"{rate:,.0f} samples/s", f"{dropped:,} dropped"]
        if self._broken:
            parts.append(f"{self._broken} unreadable")
        read = self._read + sum(self.sizes[part] * running[2] for part, running in self._running.items())
        if read > 0:
            parts.append(f"about {clock(seconds / read * (sum(self.sizes.values()) - read))} left")
        return " · ".join(parts)

    def _write(self, line: str) -> None:
        if self.live:
            line = line[: max(20, shutil.get_terminal_size().columns - 1)]
            self.stream.write(f"\r\x1b[K{line}")
        else:
            self.stream.write(f"{line}\n")
        self._written = True
        self.stream.flush()
