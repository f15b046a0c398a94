"""`python -m benchmarks [TABLE[/UNIT] ...]` measures speed, prints a Markdown table per unit and stores its JSON."""

from __future__ import annotations

import gc
import importlib
import math
import re
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Context, Unit, failed_row
from benchmarks.record import commit, folder_of, keep, machine, read, versions
from benchmarks.tables import HEADINGS, markdown, one
from mmqk.store import UserError, run_main
from mmqk.store.errors import OneSentenceParser

TABLES = tuple(HEADINGS)
SLICE_SECONDS = 400  # longest expected duration of a slice, for a time limit of 8 minutes per command


def units_of(context: Context, asked: Sequence[str] = ()) -> list[Unit]:
    """Return the units named by `TABLE` or `TABLE/UNIT`; without names, all units.

    Raises:
        UserError: an unknown name.
    """
    every = [u for name in TABLES for u in importlib.import_module(f"benchmarks.{name}").units(context)]
    known = {*TABLES, *(u.path for u in every)}
    for name in asked:
        if name not in known:
            raise UserError(f"there is no table {name}: python -m benchmarks --list names them.")
    return [u for u in every if not asked or u.table in asked or u.path in asked]


def deal(units: Sequence[Unit], n: int) -> list[list[Unit]]:
    """Split the units into n parts of similar duration: add each unit, longest first, to the shortest part so far."""
    parts: list[list[Unit]] = [[] for _ in range(n)]
    for unit in sorted(units, key=lambda u: -u.seconds):
        min(parts, key=seconds).append(unit)
    return parts


def seconds(units: Sequence[Unit]) -> float:
    """Return the expected duration of all units together, in seconds."""
    return sum(u.seconds for u in units)


def slices_needed(units: Sequence[Unit]) -> int:
    """Return the smallest number of parts such that no part takes longer than the limit: `SLICE_SECONDS`, or the
    duration of the longest unit if that is larger."""
    longest = max([SLICE_SECONDS, *(u.seconds for u in units)])
    return next(n for n in range(1, len(units) + 1) if max(map(seconds, deal(units, n))) <= longest)


def measured(unit: Unit, context: Context, command: str) -> dict[str, Any]:
    """Measure a unit and return its record."""
    started, about = datetime.now(UTC).isoformat(timespec="seconds"), machine(context.device)
    begin = time.monotonic()
    try:
        result = unit.measure(context)
    except Exception as error:  # in the setup that all rows of the unit share
        result = {"title": unit.path, "facts": {}, "base": None, "rows": [failed_row("all", error)]}
    return {
        "table": unit.table, "unit": unit.name, "title": result["title"], "full": context.full, "started": started,
        "took_seconds": round(time.monotonic() - begin, 1), "command": command, "commit": commit(),
        "machine": about, "versions": versions(), "facts": result["facts"], "base": result["base"],
        "rows": result["rows"],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure the named units, or print stored results.

    Raises:
        UserError: an unknown name, an impossible slice, no stored results, or no GPU.
    """
    argv = sys.argv[1:] if argv is None else argv
    given = _parser().parse_args(argv)
    if given.tables is not None:
        results = read([Path(folder) for folder in given.tables])
        if not results:
            raise UserError(f"there are no results in {', '.join(given.tables)}: measure some first.")
        print(markdown(results))
        return 0
    context = _context(given)
    units = units_of(context, given.names)
    if given.list:
        _list(context, units)
        return 0
    part, n = _slice(given.slice)
    torch.set_num_threads(context.threads)
    tail = f"-{part}of{n}" if n > 1 else ""
    folder = Path(given.out) / folder_of(context.device)
    # Free graphs and memory after each unit.
    for unit in deal(units, n)[part - 1] if n > 1 else units:
        if time.monotonic() > context.until:
            print(f"{unit.path} is left out: the time given by --minutes is over.", file=sys.stderr)
            continue
        print(f"{unit.path} …", file=sys.stderr, flush=True)
        record = measured(unit, context, _command(argv))
        keep(folder / f"{unit.table}{tail}.json", record)
        print(one(record) + "\n", flush=True)
        torch.compiler.reset()
        gc.collect()
    return 0


def _parser() -> OneSentenceParser:
    parser = OneSentenceParser(
        prog="python -m benchmarks",
        description="Measure speed; toy size on a CPU unless --full. Each table is printed and\nstored as JSON.",
    )
    parser.add_argument("names", nargs="*", metavar="TABLE[/UNIT]", help=f"{', '.join(TABLES)} (default: all)")
    parser.add_argument("--list", action="store_true", help="name the tables and their units, and measure nothing")
    parser.add_argument("--full", action="store_true", help="GPU sizes; needs a GPU")
    parser.add_argument(
        "--slice", default="1/1", metavar="K/N", help="the k-th of n parts (--list prints their number)"
    )
    parser.add_argument("--rounds", type=int, help="counted rounds per row (default: the table's)")
    parser.add_argument("--repeat", type=int, help="repetitions per row and round (default: the table's)")
    parser.add_argument("--rows", metavar="REGEX", help="only the rows whose name matches (default: all)")
    parser.add_argument("--peers", action="store_true", help="with data: resumable readers of tars by other libraries")
    parser.add_argument("--minutes", type=float, help="stop after M minutes: skip later units, shorten the current one")
    parser.add_argument("--compiled", action="store_true", help="measure compiled rows on a CPU too; slow")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--out", default="benchmarks/results", help="folder of the JSON (default %(default)s)")
    parser.add_argument("--tables", nargs="+", metavar="DIR", help="print the tables of stored results")
    return parser


def _context(given: Any) -> Context:
    for name in ("rounds", "repeat", "threads"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}: it must be at least 1.")
    if given.minutes is not None and not given.minutes > 0:
        raise UserError(f"--minutes is {given.minutes}: it must be more than 0.")
    try:
        re.compile(given.rows or "")
    except re.error as error:
        raise UserError(f"--rows is {given.rows}: it is not a regular expression ({error}).") from error
    if given.full and not given.list and not torch.cuda.is_available():
        raise UserError("--full needs a CUDA GPU: leave it out for the toy size on this CPU.")
    return Context(
        device="cuda" if given.full else "cpu",
        full=given.full,
        rounds=given.rounds,
        repeat=given.repeat,
        compiled=given.compiled,
        threads=given.threads,
        rows=given.rows,
        peers=given.peers,
        until=math.inf if given.minutes is None else time.monotonic() + 60 * given.minutes,
    )


def _slice(text: str) -> tuple[int, int]:
    part, _, n = text.partition("/")
    if not (part.isdigit() and n.isdigit() and 1 <= int(part) <= int(n)):
        raise UserError(f"--slice is {text}: give it as k/n with k from 1 to n.")
    return int(part), int(n)


def _list(context: Context, units: Sequence[Unit]) -> None:
    for unit in units:
        print(f"{unit.path:40} about {unit.seconds:4.0f} s" if context.full else unit.path)
    if context.full:
        print(f"\n--slice k/{slices_needed(units)} makes parts as short as the longest unit (estimated for one H100).")


def _command(argv: Sequence[str]) -> str:
    """Return the command line without `--out`."""
    kept = list(argv)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    kept = [word for word in kept if not word.startswith("--out=")]
    return shlex.join(["python", "-m", "benchmarks", *kept])


if __name__ == "__main__":
    run_main(main)
