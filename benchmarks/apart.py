"""A way in a process of its own: where the state of a process is part of the comparison.

On a CPU that is the C library's allocator: until it has seen large blocks freed it returns each to the kernel, so
ways that share a process speed each other up, and whoever tells it to keep them tells it for all.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

PATIENCE = 240.0  # seconds that a turn has


class Apart:
    """What `build` makes, made and called in a process of its own, which waits between turns.

    Args:
        build: as of a `Way`; it travels, so no closure.
        threads: of that process.

    Raises:
        RuntimeError: when called: what went wrong there.
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
        self._end.close()  # which the process takes for its end
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
            said = " ".join(str(error).split())[:200]
            known = type(error).__name__ == "Absent"
            end.send(error if known else RuntimeError(f"{type(error).__name__}: {said}"))
