"""Measures how many steps per second small runs make on one device, with one process and with several.

The processes run until the last round and wait between their turns. A turn starts when its last process has warmed
up, and ends when its last process has finished.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.harness import FAILED, MEASURED, Context, Row, Unit, rotated
from benchmarks.setups import facts_of, toy

PATIENCE = 240.0  # time limit of a start or a turn, in seconds
ONE = "1 process"


def units(context: Context) -> list[Unit]:
    """Return the units of this table."""
    return [Unit("together", "demonstration", 300, _measure)]


def flags_of(context: Context) -> list[str]:
    """Return the flags that run the demonstration on the measured device."""
    gpu = ["--trainer.accelerator=gpu", "--trainer.precision=bf16-mixed"]
    return gpu if context.full else []


def _measure(context: Context) -> dict[str, Any]:
    counts = (1, 2, 4, 8, 12) if context.full else (1, 2)
    repeat = context.repeat or (200 if context.full else 60)
    rounds = context.rounds or 4
    single = Context(device=context.device, full=context.full, threads=1, toy=context.toy)
    run = toy(single, *flags_of(context))
    return {
        "title": "runs of the demonstration, one thread each, data and monitors included",
        "facts": facts_of(run, context.device) | {"steps_of_each": repeat},
        "base": ONE,
        "rows": rows_of(single, counts, repeat, rounds),
    }


def rows_of(context: Context, counts: Sequence[int], repeat: int, rounds: int) -> list[Row]:
    """Return one row per number of processes. The first round is not counted."""
    rows = {n: _row(n, repeat) for n in counts}
    with Pool(context, counts) as pool:
        for i in range(rounds + 1):
            for name in rotated([str(n) for n in counts], i):
                n = int(name)
                try:
                    seconds = pool.turn(n, repeat)
                except RuntimeError as error:
                    rows[n] |= {"status": FAILED, "reason": str(error), "seconds": []}
                    return _given_up(rows, counts)
                if i:
                    rows[n]["seconds"].append(seconds)
    return list(rows.values())


def _given_up(rows: dict[int, Row], counts: Sequence[int]) -> list[Row]:
    """Mark all other rows as failed too: the failed process may still be running and would change their times."""
    for n in counts:
        if rows[n]["status"] == MEASURED:
            rows[n] |= {"status": FAILED, "reason": "another row's process failed first", "seconds": []}
    return [rows[n] for n in counts]


def _row(n: int, repeat: int) -> Row:
    name = ONE if n == 1 else f"{n} at once"
    return {
        "name": name, "status": MEASURED, "reason": "", "against": None, "note": "", "seconds": [], "repeat": 1,
        "work": {"steps": n * repeat}, "peak_bytes": None, "first_seconds": None, "first_loss": None,
    }  # fmt: skip


class Pool:
    """Processes with one run each, and the barriers at which they start at the same time."""

    def __init__(self, context: Context, counts: Sequence[int]):
        spawn = multiprocessing.get_context("spawn")
        self.gates = {n: spawn.Barrier(n) for n in counts}
        self.ends: list[Connection] = []
        self.processes = []
        for seed in range(max(counts)):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_work, args=(theirs, context, seed, self.gates), daemon=True)
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.close()  # ends the process
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.terminate()

    def turn(self, n: int, repeat: int) -> float:
        """Return the seconds from the common start to the end of the last process.

        Raises:
            RuntimeError: a process failed; the message gives the reason.
        """
        try:
            for end in self.ends[:n]:
                end.send((n, repeat))
            spans = [self._answer(end) for end in self.ends[:n]]
        except (EOFError, OSError):
            raise RuntimeError("a process died") from None
        return max(end for _, end in spans) - min(start for start, _ in spans)

    def _answer(self, end: Connection) -> tuple[float, float]:
        if not end.poll(PATIENCE):
            raise RuntimeError(f"a process did not answer within {PATIENCE:.0f} s")
        answer = end.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def _work(end: Connection, context: Context, seed: int, gates: dict[int, Any]) -> None:
    """Train one run in this process, some steps in each turn. All processes share the clock of `time.monotonic`."""
    import torch

    from benchmarks.loops import Stack

    torch.set_num_threads(context.threads)
    stack: Stack | None = None
    while True:
        try:
            n, repeat = end.recv()
        except EOFError:
            return
        try:
            if stack is None:
                stack = Stack(toy(context, f"--seed={seed}", *flags_of(context)))
            clock = stack.timed(repeat, gate=partial(gates[n].wait, PATIENCE))
            end.send((clock.start, clock.end))
        except Exception as error:
            gates[n].abort()
            traceback.print_exc()
            message = " ".join(str(error).split())[:200]
            end.send(f"{type(error).__name__}: {message}")
