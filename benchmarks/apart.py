"""Time a candidate in a separate process, for comparisons that depend on the state of the process.

On a CPU this is the state of the C library's allocator. At first the allocator returns a large block to the operating
system when the block is freed. Later, after some blocks were freed or because of a setting, it keeps freed blocks for
reuse. The state affects the speed of every candidate in the process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

PATIENCE = 240.0  # time limit of a turn, in seconds


class Apart:
    """Build and call the timed function in a separate process, which waits between turns.

    Args:
        build: as in `Candidate`; `build` is pickled, so it cannot be a closure.
        threads: number of CPU threads of the process.

    Raises:
        RuntimeError: when called, if the process has failed; the message gives the reason.
    """

    def __init__(self, build: Callable[[], Callable[[int], float]], threads: int):
        spawn = multiprocessing.get_context("spawn")
        self._end, theirs = spawn.Pipe()
        self.first_loss: float | None = None
        self._process = spawn.Process(target=_work, args=(theirs, build, threads), daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, n: int) -> float:
        try:
            self._end.send(n)
            if not self._end.poll(PATIENCE):
                raise RuntimeError(f"its process did not answer within {PATIENCE:.0f} s")
            answer = self._end.recv()
        except (EOFError, OSError):
            raise RuntimeError("its process died") from None
        if isinstance(answer, Exception):
            raise answer
        seconds, self.first_loss = answer
        return seconds

    def __del__(self) -> None:
        self._end.close()  # ends the process
        self._process.join(10)


def _work(end: Connection, build: Callable[[], Callable[[int], float]], threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    take: Callable[[int], float] | None = None
    while True:
        try:
            n = end.recv()
        except EOFError:
            return
        try:
            take = take or build()
            end.send((take(n), getattr(take, "first_loss", None)))
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            absent = type(error).__name__ == "Absent"
            end.send(error if absent else RuntimeError(f"{type(error).__name__}: {message}"))
