"""Numbers and paths as commands and pages print them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from mmqk.store.files import PACKAGE, SHIPPED

ROOT = PACKAGE.parent
_FOLDERS = ("configs", "runs", "reports", "data")
# An absolute path of at least two names; not part of a URL, a closing tag or a word.
_ABSOLUTE = re.compile(r"""(?<![\w.:/<>~\-\]])/(?:[^\s/'"`,;:()\[\]{}<>]+/)+[^\s/'"`,;:()\[\]{}<>]*""")


def clock(seconds: float) -> str:
    """Return the minutes and seconds as m:ss; a negative time is 0:00."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def plain(value: float, digits: int = 3) -> str:
    """Return a number with this many significant digits and no exponent: ``0.17``, ``45.6``, ``123,000``."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def percent(share: float, digits: int = 2) -> str:
    """Return a share (1 is 100 %) in percent: ``0.17 %``, ``160 %``, or ``less than 0.01 %``."""
    return "less than 0.01 %" if 0 < share < 1e-4 else f"{plain(100 * share, digits)} %"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 seed``, ``3 seeds``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def some(names: Iterable[str], most: int = 3) -> str:
    """Return the first names of a list, and how many more there are: ``a, b, c and 4 more``."""
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


def text_table(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return the lines of a table with cells aligned to the left in the columns ``left``, to the right in others."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def dashboards(folder: str | os.PathLike[str]) -> str:
    """Return the command that opens the dashboards of a folder of runs.

    By default TensorBoard samples 1,000 steps of a series, which can drop a spike of one step. The command sets a
    large number and not 0: according to TensorBoard's help, 0 samples all steps, but version 2.21 then shows nothing.
    """
    return (
        f"dashboards: python -m tensorboard.main --logdir {shlex.quote(os.fspath(folder))}"
        " --samples_per_plugin scalars=1000000, then open http://localhost:6006/#custom_scalars"
    )


def relative(path: str | os.PathLike[str]) -> str:
    """Return a path as pages print it: relative to the shipped files, the repository or the current folder.

    Any other absolute path is shortened: the result begins at the last folder named configs, runs, reports or data,
    or is only the name of the file if there is no such folder. A relative path is not changed.
    """
    full = Path(path)
    if not full.is_absolute():
        return str(path)
    for base in (SHIPPED, ROOT, Path.cwd()):
        if full.is_relative_to(base):
            return full.relative_to(base).as_posix()
    places = [place for place, name in enumerate(full.parts) if name in _FOLDERS]
    return Path(*full.parts[places[-1] :]).as_posix() if places else full.name


def relative_word(word: str) -> str:
    """Return a command-line argument, such as ``--out=/home/me/runs/a``, with its path shortened by `relative`."""
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{flag}{equals}{relative(value) if value.startswith('/') else without_roots(value)}"


def inspect_command(run: str | os.PathLike[str], step: int) -> str:
    """Return the command that shows the sequences of a step of a run."""
    return f"mmqk inspect {relative(run)} --step {step}"


def without_roots(value: Any) -> Any:
    """Return the plain data, or dataclasses as plain data, with every absolute path in its strings shortened by
    `relative`. SVG and data URLs are not changed."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, str):
        if value.startswith(("<svg", "data:")) or not _ABSOLUTE.search(value):
            return value
        return _ABSOLUTE.sub(lambda match: relative(match[0]), value)
    if isinstance(value, dict):
        return {key: without_roots(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_roots(inner) for inner in value]
    if type(value) is tuple:
        return tuple(map(without_roots, value))
    return value
