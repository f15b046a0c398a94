"""The loaders of a run: its training sequences, divided among ranks and loader workers.

`PositionedLoader` reads token arrays and the dial, where every sequence is known by its number. `StreamLoader` reads
shards: loader workers make rows from lanes, and the process of the rank joins them to batches.

```
worker w: lanes of rows w, w + workers, ... ── rows, cursors, skips ──┐
                                                                     ├── batch + cursors of consumed rows
worker 0: lanes of rows 0, workers, ...     ── rows, cursors, skips ──┘
```

The cursors travel with the rows, so what a worker has read ahead is not part of a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from mmqk.data.batch import TokenBatch
from mmqk.data.config import DataConfig
from mmqk.data.mixture import kind_of
from mmqk.data.order import STREAMS, TrainingOrder, sequence_numbers
from mmqk.data.sequences import Row
from mmqk.data.shards.samples import ReasonCounts, printable
from mmqk.data.stream import Account, Cursor, Lane, LaneRows, Skips
from mmqk.distributed import gathered, summed
from mmqk.store import UserError


class MicroBatches(Dataset):
    """The micro-batches of one rank. Each is a pure function of its number ``i``, independent of workers and resumes.

    Attributes:
        ahead: number that is added to ``step * batch_size`` to get the first sequence of a step. It is not 0 if a
            fork skipped batches, or if its parent had another batch size. Set before the first micro-batch is read.
        skip: numbers of the sequences that a fork leaves out, ascending. Set before the first micro-batch is read.
    """

    def __init__(
        self,
        order: TrainingOrder,
        batch_size: int,
        accumulate: int,
        rank: int,
        world: int,
        steps: int,
        documents: bool = False,
        patch: Callable[[list[Row], int, TrainingOrder], list[Row]] | None = None,
    ):
        self.documents, self.patch = documents, patch
        # Keep the rows of the latest step: each of its micro-batches needs the number of targets of the whole step.
        self._step, self._rows = -1, list[Row]()
        self.ahead, self.skip = 0, list[int]()
        self.order, self.batch_size, self.accumulate, self.steps = order, batch_size, accumulate, steps
        self.rank, self.world, self.size = rank, world, batch_size // (accumulate * world)

    def __len__(self) -> int:
        return self.steps * self.accumulate

    def __getitem__(self, i: int) -> TokenBatch:
        return self._batch(i, self.places(i % self.accumulate))

    def places(self, micro: int) -> range:
        """Return the rows of this rank in micro-batch ``micro`` of a step, by their number in the step."""
        start = (micro * self.world + self.rank) * self.size
        return range(start, start + self.size)

    def first_rows(self, i: int, n: int) -> TokenBatch:
        """Return the first ``n`` sequences of micro-batch ``i`` over all ranks."""
        start = i % self.accumulate * self.world * self.size
        return self._batch(i, range(start, start + n))

    def numbers(self, step: int) -> list[int]:
        """Return the numbers of the sequences of a step, the first step being 0."""
        start = step * self.batch_size + self.ahead
        return sequence_numbers(np.arange(start, start + self.batch_size), self.skip).tolist()

    def _batch(self, i: int, places: range) -> TokenBatch:
        """Return the sequences at these places of the step of micro-batch ``i``."""
        step = i // self.accumulate
        if self._step != step:
            rows = [self.order.row(n) for n in self.numbers(step)]
            self._step, self._rows = step, rows if self.patch is None else self.patch(rows, step, self.order)
        step_targets = sum(row.targets for row in self._rows)
        return self.order.builder.batch(self._rows[places.start : places.stop], step_targets, self.documents)


_OF_STEP = ("batch_size", "accumulate")


class PositionedLoader:
    """A loader whose state is how many micro-batches it has returned, `MicroBatches.ahead`, and the sizes of a step.

    Lightning resumes at the exact micro-batch if the loader has a length and ``state_dict``/``load_state_dict``.
    """

    def __init__(self, dataset: MicroBatches, workers: int, device: torch.device):
        self.dataset, self.workers, self.device = dataset, workers, device
        self.position = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[TokenBatch]:
        if self.position >= len(self.dataset):
            raise UserError(
                "All sequences of max_steps are used, but the Trainer asks for more: set accumulate_grad_batches of"
                " the Trainer, and remove GradientAccumulationScheduler."
            )
        try:
            for batch in self._batches():
                self.position += 1
                yield batch.to(self.device, non_blocking=True)  # from pinned memory: the host does not wait
        except UserError as error:
            # A loader worker puts a traceback into the message; the original message follows the class name.
            raise UserError(str(error).rsplit("UserError: ", 1)[-1].strip()) from None

    def _batches(self) -> Iterable[TokenBatch]:
        """Return the micro-batches from ``position`` on."""
        return DataLoader(
            self.dataset,
            batch_size=None,
            sampler=range(self.position, len(self.dataset)),
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=functools.partial(_begin, _pipe()),
        )

    def state_dict(self) -> dict[str, Any]:
        step = {name: getattr(self.dataset, name) for name in _OF_STEP}
        skip = {"skip": self.dataset.skip} if self.dataset.skip else {}
        return {"position": self.position, "ahead": self.dataset.ahead, **skip, **step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _OF_STEP:  # forks and older checkpoints do not have them
            if state.get(name, getattr(self.dataset, name)) != getattr(self.dataset, name):
                raise UserError(
                    f"The checkpoint was written with {name} {state[name]}, now it is {getattr(self.dataset, name)}:"
                    " give the same number, because the position in the data depends on it."
                )
        self.position, self.dataset.ahead = state["position"], state.get("ahead", 0)
        self.dataset.skip = state.get("skip", [])


@functools.cache
def _pipe() -> tuple[Connection, Connection]:
    """Return the ends of a pipe that closes when this process, the main process of loader workers, ends."""
    ends = multiprocessing.Pipe(duplex=False)
    Finalize(None, ends[1].close, exitpriority=1)  # before the loader workers are waited for
    return ends


def _begin(ends: tuple[Connection, Connection], _: int) -> None:
    """Prepare a loader worker: it ignores SIGTERM, because the main process needs batches until it has written its
    checkpoint, and it ends when the main process ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ends[1].close()
    threading.Thread(target=_end_with_main, args=(ends[0],), daemon=True).start()


def _end_with_main(end: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        end.recv()
    os._exit(0)


NAMED = 5  # skipped samples that are printed
LISTED = 1000  # skipped samples whose names are kept
Cursors = dict[tuple[str, int], Cursor]  # by kind and lane
Found = tuple[dict[str, str], dict[str, int]]  # reasons by name, and counts by reason


@dataclass
class Part(Skips):
    """Rows of one micro-batch from one worker, with the state after them.

    Attributes:
        rows: each row by its number in the batch of the step.
        cursors: the lanes that were used.
    """

    rows: dict[int, Row] = field(default_factory=dict)
    cursors: Cursors = field(default_factory=dict)


class StreamedParts(IterableDataset):
    """The rows of one worker from micro-batch ``start`` on, made from lanes, which are opened when they are needed.

    Args:
        batches: the micro-batches of this rank.
        rows: makes the rows of each kind that is read from shards.
        seed: seed of the order of the documents.
        cursors: where lanes begin.
    """

    def __init__(
        self,
        batches: MicroBatches,
        rows: Mapping[str, LaneRows],
        seed: int,
        start: int = 0,
        cursors: Cursors | None = None,
    ) -> None:
        self.batches, self.rows, self.seed, self.start, self.cursors = batches, rows, seed, start, cursors or {}
        self.lanes: dict[tuple[str, int], Lane] = {}
        self.accounts = {kind: Account(of_kind.stream.kind) for kind, of_kind in rows.items()}

    def __iter__(self) -> Iterator[Part]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(self.start, len(self.batches)):
            step, micro = divmod(i, self.batches.accumulate)
            yield self.part(step, self.batches.places(micro)[worker::workers])

    def part(self, step: int, places: range) -> Part:
        """Return rows of a step, by their number in the batch.

        Raises:
            UserError: too many samples or shards cannot be used.
        """
        part, order = Part(), self.batches.order
        for account in self.accounts.values():
            account.skips = part
        for place in places:
            index = step * self.batches.batch_size + self.batches.ahead + place
            slot = order.mixture.draw(index).slot
            kind = kind_of(slot)
            if kind not in self.rows:
                part.rows[place] = order.row(index)
                continue
            if (kind, place) not in self.lanes:
                key, cursor = (self.seed, STREAMS[kind]), self.cursors.get((kind, place), Cursor())
                stream, lanes = self.rows[kind].stream, self.batches.batch_size
                self.lanes[kind, place] = stream.lane(self.accounts[kind], place, lanes, key, cursor)
            lane = self.lanes[kind, place]
            part.rows[place] = self.rows[kind].row(lane, slot)
            part.cursors[kind, place] = lane.cursor
        return part


class StreamLoader(PositionedLoader):
    """A loader whose state is also the cursor of every lane, after the micro-batches that it has returned.

    Args:
        dataset: the micro-batches of this rank.
        rows, seed: as for `StreamedParts`.
        identity: hash of the shards and of what decides their order; a state of another one is refused.
        workers: loader processes.
        device: where batches go.

    Attributes:
        skipped: the reason for each sample or shard that this rank skipped, by its name; at most `LISTED` are kept.
        counts: the number of them by reason; the first rank also counts those of all ranks before the last resume.
        unread, files: files that belong to no document, and the number of all files, since the start of this process.
    """

    def __init__(
        self,
        dataset: MicroBatches,
        rows: Mapping[str, LaneRows],
        seed: int,
        identity: str,
        workers: int,
        device: torch.device,
    ) -> None:
        super().__init__(dataset, workers, device)
        self.rows, self.seed, self.identity = rows, seed, identity
        self.cursors: Cursors = {}
        self.skipped: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self._others: list[Found] = []  # of the other ranks, up to the last `state_dict`
        self.unread, self.files = ReasonCounts(), 0

    def _batches(self) -> Iterator[TokenBatch]:
        workers, accumulate = min(self.workers, self.dataset.size), self.dataset.accumulate
        source = StreamedParts(self.dataset, self.rows, self.seed, self.position, dict(self.cursors))
        begin = functools.partial(_begin, _pipe())
        parts = iter(DataLoader(source, batch_size=None, num_workers=workers, worker_init_fn=begin))
        for _ in range(self.position, len(self.dataset), accumulate):
            # The normalizer of the loss counts the targets of the whole step.
            step = [[next(parts) for _ in range(max(1, workers))] for _ in range(accumulate)]
            rows = [row for micro in step for part in micro for row in part.rows.values()]
            targets = int(summed(torch.tensor(sum(row.targets for row in rows), device=self.device)))
            for micro in step:
                for part in micro:
                    self._consume(part)
                merged = {place: row for part in micro for place, row in part.rows.items()}
                ordered = [merged[place] for place in sorted(merged)]
                yield self.dataset.order.builder.batch(ordered, targets, self.dataset.documents)

    def _consume(self, part: Part) -> None:
        self.cursors |= part.cursors
        self.unread.take(part.unread)
        self.files += part.files
        for name, reason in part.skipped:
            self.counts[reason] = self.counts.get(reason, 0) + 1
            if len(self.skipped) < LISTED:
                self.skipped[name] = reason
            if (n := sum(self.counts.values())) <= NAMED:
                more = "; further ones are only counted" if n == NAMED else ""
                print(f"{printable(name)} is skipped ({printable(reason)}){more}", file=sys.stderr, flush=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, which all must call this function."""
        kinds = list(self.rows)
        table = np.array([[kinds.index(kind), lane, *cursor] for (kind, lane), cursor in sorted(self.cursors.items())])
        own = {int(place) for micro in range(self.dataset.accumulate) for place in self.dataset.places(micro)}
        table = table.reshape(-1, 2 + len(Cursor._fields)).astype(np.int64)
        states = gathered((table[np.isin(table[:, 1], list(own))], self.skipped, self.counts))
        self._others = [found for _, *found in states[1:]]
        tables = np.concatenate([of_rank for of_rank, *_ in states])
        skipped, counts = _joined(found for _, *found in states)
        cursors = torch.from_numpy(tables[np.lexsort((tables[:, 1], tables[:, 0]))])  # the same for any number of ranks
        state = {"identity": self.identity, "kinds": kinds, "cursors": cursors}
        return {**super().state_dict(), "streams": {**state, "skipped": skipped, "counts": counts}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        streams = state.get("streams", {})
        if streams.get("identity") != self.identity:
            raise UserError(
                "The checkpoint was written with other shards or another seed, so its position in the shards has no"
                " meaning: give the same ones, or train from token arrays (data.read tokens)."
            )
        if self.dataset.rank == 0:  # `state_dict` adds those of all ranks
            self.skipped, self.counts = dict(streams["skipped"]), dict(streams["counts"])
        kinds = streams["kinds"]
        self.cursors = {
            (kinds[kind], lane): Cursor(*cursor)
            for kind, lane, *cursor in streams["cursors"].tolist()
            if kinds[kind] in self.rows  # a fork may drop kinds of data.mix
        }

    def found(self) -> Found:
        """Return `skipped` and `counts` of all ranks; those of the other ranks up to the last `state_dict`."""
        return _joined([(self.skipped, self.counts), *self._others])


def _joined(found: Iterable[Found]) -> Found:
    names, counts = dict[str, str](), Counter[str]()
    for of_rank, counts_of_rank in found:
        names |= of_rank
        counts.update(counts_of_rank)
    return dict(islice(names.items(), LISTED)), dict(counts)


def streams_of_fork(
    saved: Mapping[str, Any], before: Mapping[str, Any], config: DataConfig, seed: int, skips: bool
) -> dict[str, Any]:
    """Return the position of a fork in its shards: that of the parent, or the start of other shards. If documents are
    cut in another way, each lane begins its open document again.

    Args:
        saved: the position of the parent; empty if it did not read shards.
        before: the data configuration of the parent.
        skips: whether the fork leaves sequences out.

    Raises:
        UserError: the fork skips sequences, or continues with another batch size.
    """
    identity = config.stream_identity(seed)
    continues = saved.get("identity") == identity
    if skips or (continues and config.batch_size != before["batch_size"]):
        raise UserError(
            "A fork that reads shards continues at the next sample with the data.batch_size of its parent: leave"
            " fork_skip, fork_skip_batches and data.batch_size out, or train both from token arrays (data.read tokens)."
        )
    if not continues:
        cursors = torch.zeros(0, 2 + len(Cursor._fields), dtype=torch.int64)
        return {"identity": identity, "kinds": [], "cursors": cursors, "skipped": {}, "counts": {}}
    cursors = saved["cursors"].clone()
    if any(before[name] != getattr(config, name) for name in ("seq_len", "pack", "tokenizers")):
        cursors[:, -1] = 0  # `Cursor.part`
    return {**saved, "cursors": cursors}
