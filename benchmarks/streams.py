"""Compares readers of WebDataset tars: which samples they deliver when they are stopped and resumed, and how fast.

Each part of a scenario is a new process that begins with a state from the disk, and ends. All readers are judged by
one function, from the keys of the samples that they delivered.
"""

from __future__ import annotations

import io
import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.apart import Apart
from benchmarks.deliveries import Delivery, Failure, Task, apart, last_line, run
from benchmarks.harness import Absent, Candidate, Context, Row, compare, failed_row, seconds_of
from benchmarks.readers import READERS, SIZE, Setup
from mmqk.store import UserError


@dataclass(frozen=True)
class Tars:
    """The tars of a comparison.

    Attributes:
        tars, samples: their number, and the mean number of samples in one.
        batch: samples in a batch of all ranks.
    """

    tars: int = 24
    samples: int = 40
    batch: int = 8

    @property
    def total(self) -> int:
        """Number of samples in all tars."""
        return self.tars * self.samples

    def keys(self, uneven: bool = False) -> list[str]:
        """Return the keys of all samples; those of tar 3 begin with ``3x``. Uneven tars have half to one and a half
        times the mean number of samples."""
        more = [uneven * (self.samples // 2) // (1 + t // 2 % 3) * (1 - 2 * (t % 2)) for t in range(self.tars)]
        return [f"{t}x{n}" for t in range(self.tars) for n in range(self.samples + more[t])]


def write_tars(folder: Path, keys: Sequence[str], broken: str | None = None) -> None:
    """Write one tar for each number before the ``x`` of a key. The image of the key ``broken`` cannot be decoded."""
    folder.mkdir(parents=True)
    for tar in dict.fromkeys(key.partition("x")[0] for key in keys):
        with tarfile.open(folder / f"{int(tar):05d}.tar", "w") as file:
            for key in keys:
                if key.startswith(f"{tar}x"):
                    image = _image(key)
                    fields = {"png": image[: len(image) // 2] if key == broken else image, "txt": key.encode()}
                    for suffix, content in fields.items():
                        member = tarfile.TarInfo(f"{key}.{suffix}")
                        member.size = len(content)
                        file.addfile(member, io.BytesIO(content))


@cache
def _image(key: str) -> bytes:
    pixels = np.random.default_rng(list(key.encode())).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((SIZE, SIZE)).save(buffer, "PNG")
    return buffer.getvalue()


@dataclass(frozen=True)
class Verdict:
    """How the delivered samples differ from what was expected.

    Attributes:
        duplicates, losses: deliveries that are too many, or missing.
        same: whether the order is that of the uninterrupted run; None if not asked.
    """

    duplicates: int
    losses: int
    same: bool | None = None

    def __str__(self) -> str:
        same = "" if self.same is None else " / yes" if self.same else " / no"
        return f"{self.duplicates} / {self.losses}{same}"


def judge(delivered: Sequence[str], expected: Sequence[str], group: int | None = 1) -> Verdict:
    """Compare the delivered keys with what the uninterrupted run delivered, or with the keys of an epoch.

    Args:
        group: number of samples whose order among themselves does not count, which is the global batch if ranks
            change; None if no order counts.
    """
    more, less = Counter(delivered) - Counter(expected), Counter(expected) - Counter(delivered)
    same = None if group is None else _groups(delivered, group) == _groups(expected, group)
    return Verdict(more.total(), less.total(), same)


def _groups(keys: Sequence[str], size: int) -> list[list[str]]:
    return [sorted(keys[i : i + size]) for i in range(0, len(keys), size)]


def same_shard(batches: Sequence[Sequence[str]]) -> float:
    """Return the share of neighbors in a batch that come from the same tar."""
    pairs = [(a.partition("x")[0], b.partition("x")[0]) for batch in batches for a, b in pairwise(batch)]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))


def shards_in(keys: Sequence[str], samples: int = 64) -> float:
    """Return the mean number of tars that ``samples`` consecutive samples come from."""
    tars = [key.partition("x")[0] for key in keys]
    windows = [set(tars[i : i + samples]) for i in range(0, len(tars) - samples + 1, samples)] or [set(tars)]
    return sum(map(len, windows)) / len(windows)


class Comparison:
    """The scenarios of one reader, as cells of its row.

    Args:
        name: name of the reader.
        tars: the tars.
        folder: has a folder with the tars of each kind (even, uneven, broken), prepared for the reader.
    """

    def __init__(self, name: str, tars: Tars, folder: Path) -> None:
        self.name, self.tars, self.folder = name, tars, folder
        self.cells: dict[str, str] = {}
        self.notes: list[str] = []
        batches = tars.total // tars.batch
        self.first, self.second = (tars.batch * (batches * part // 8 + 1) for part in (3, 5))

    def task(self, done: int = 0, kind: str = "even", batch: int | None = None, **fields: Any) -> Task:
        """Return a task that begins after ``done`` samples of an epoch."""
        setup = {name: fields.pop(name) for name in ("workers", "skip") if name in fields}
        left = self.tars.total - done
        built = Setup(str(self.folder / kind), self.tars.total, left, batch or self.tars.batch, **setup)
        return Task(self.name, built, str(self.folder), **fields)

    def cell(self, column: str, scenario: Callable[[], object]) -> None:
        """Fill a cell with the result of a scenario, or with the reason why it has none."""
        try:
            self.cells[column] = str(scenario())
        except Failure as failure:
            self.cells[column] = "error"
            self.notes.append(f"{column}: {last_line(str(failure))}")

    def measure(self) -> None:
        """Run all scenarios.

        Raises:
            Failure: the uninterrupted run failed.
        """
        total, keys = self.tars.total, self.tars.keys()
        whole = run(self.task(epochs=2, save=(self.first, total)))
        one, two = whole.keys(0), whole.keys(1)
        start, end = whole.states(self.first), whole.states(total)
        both = judge(one, keys, None), judge(two, keys, None)
        sums = Verdict(sum(v.duplicates for v in both), sum(v.losses for v in both))
        self.cells |= {"two epochs": str(sums), "new order": "no" if one == two else "yes"}

        def once() -> Verdict:
            resumed.append(run(self.task(self.first, states=start, save=(self.second - self.first,))))
            return judge(one[: self.first] + resumed[0].keys(), one)

        def twice() -> Verdict:
            if not resumed:
                raise Failure("the first resume failed")
            more = self.second - self.first
            again = run(self.task(self.second, states=resumed[0].states(more)))
            return judge(one[: self.first] + resumed[0].keys(until=more) + again.keys(), one)

        resumed: list[Delivery] = []
        self.cell("resume", once)
        self.cell("second resume", twice)
        self.cell("at epoch's end", lambda: judge(run(self.task(states=end)).keys(), two))
        self.cell("2 workers", self._workers)
        more = partial(self.task, self.first, states=start, workers=2)
        self.cell("0 to 2 workers", lambda: judge(one[: self.first] + run(more()).keys(), one))
        self.cell("2 ranks to 1", self._ranks)
        self.cell("uneven tars", lambda: judge(run(self.task(kind="uneven")).keys(), self.tars.keys(uneven=True), None))
        self.cell("broken sample", self._broken)
        self.cells |= {"same tar": f"{same_shard(whole.batches[0]):.0%}", "tars in 64": f"{shards_in(one):.1f}"}

    def _workers(self) -> Verdict:
        """Resume with two workers before and after."""
        whole = run(self.task(workers=2, save=(self.first,)))
        rest = run(self.task(self.first, workers=2, states=whole.states(self.first)))
        return judge(whole.keys(until=self.first) + rest.keys(), whole.keys())

    def _ranks(self) -> Verdict:
        """Resume two ranks of one worker as one rank of two workers, so that the number of workers is the same."""
        half = self.tars.batch // 2
        whole = run(self.task(batch=half, workers=1, save=(self.first,)), world=2)
        batch = half if READERS[self.name][0].of_rank else self.tars.batch
        rest = run(self.task(self.first, batch=batch, workers=2, states=whole.states(self.first)))
        return judge(whole.keys(until=self.first) + rest.keys(), whole.keys(), self.tars.batch)

    def _broken(self) -> str:
        """Return what happens with an image that cannot be decoded, first without options."""
        try:
            return self._skipped(run(self.task(kind="broken")))
        except Failure as failure:
            self.notes.append(f"broken sample: {last_line(str(failure))}")
        if self.name not in ("webdataset", "torchdata"):
            return "error"
        return "error; with an option: " + self._skipped(run(self.task(kind="broken", skip=True)))

    def _skipped(self, delivery: Delivery) -> str:
        broken = self.broken(self.tars)
        keys, tar = self.tars.keys(), broken.partition("x")[0] + "x"
        of_tar = {key for key in keys if key.startswith(tar)}
        lost = len(of_tar - set(delivery.keys()))
        named = re.search(rf"\b{broken}\b", delivery.output)
        how = "named" if named else "a warning without its name" if "rror" in delivery.output else "silent"
        return f"skipped, {how}" + (", with most of its tar" if 2 * lost > len(of_tar) else "")

    @staticmethod
    def broken(tars: Tars) -> str:
        """Return the key of the sample that cannot be decoded."""
        return f"{tars.tars // 3}x{tars.samples // 3}"


def write_kinds(folder: Path, tars: Tars) -> None:
    """Write the three kinds of tars."""
    kinds = {"even": tars.keys(), "uneven": tars.keys(uneven=True), "broken": tars.keys()}
    for kind, keys in kinds.items():
        write_tars(folder / kind / "tars", keys, Comparison.broken(tars) if kind == "broken" else None)


def timed(name: str, setup: Setup) -> Callable[[int], float]:
    """Return a function that reads epochs in this process and returns the seconds of one."""
    reader = READERS[name][0](setup)

    def epoch() -> None:
        for _ in reader.epoch():
            pass

    return lambda n: seconds_of(epoch, n, "cpu")


def measure(context: Context, tars: Tars = Tars()) -> dict[str, Any]:
    """Return the rows of all readers: the scenarios of each, then the speed of all, which take turns.

    The time of a row is that of an epoch in one process without loader workers.
    """
    names = [name for name in READERS if re.search(context.rows or "", name)]
    with tempfile.TemporaryDirectory(prefix="streams-") as folder:
        write_kinds(Path(folder), tars)
        done = {name: _scenarios(name, tars, Path(folder)) for name in names}
        setup = Setup(str(Path(folder) / "even"), tars.total, tars.total, tars.batch)
        candidates = [
            Candidate(name, partial(Apart, partial(timed, name, setup), 1), {"samples": tars.total}, memory=False)
            for name in names
            if isinstance(done[name], Comparison)
        ]
        speeds = {row["name"]: row for row in compare(candidates, replace(context, device="cpu"), repeat=1, rounds=5)}
    rows: list[Row] = []
    for name, result in done.items():
        row = speeds[name] if isinstance(result, Comparison) else failed_row(name, result)
        if isinstance(result, Comparison):
            row |= {"cells": result.cells, "note": "; ".join(result.notes)}
        rows.append(row)
    title = f"{tars.tars} tars of {tars.samples} samples, batches of {tars.batch}"
    facts = {package: _version(package) for _, packages in READERS.values() for package in packages}
    return {"title": title, "facts": facts, "base": None, "rows": rows}


def _scenarios(name: str, tars: Tars, folder: Path) -> Comparison | Exception:
    for package in READERS[name][1]:
        if _version(package) is None:
            return Absent(f"{package} is not installed: pip install {package}")
    comparison = Comparison(name, tars, folder)
    try:
        for kind in ("even", "uneven", "broken"):
            apart([(READERS[name][0].prepare, (folder / kind,), {})])
        comparison.measure()
    except Failure as failure:
        return UserError(last_line(str(failure)))
    return comparison


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
