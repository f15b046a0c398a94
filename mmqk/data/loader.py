"""The micro-batches of a run: its ordered training sequences, divided among ranks and loader workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mmqk.data.batch import TokenBatch
from mmqk.data.order import TrainingOrder, sequence_numbers
from mmqk.data.sequences import Row
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
        micro = i % self.accumulate
        return self._batch(i, (micro * self.world + self.rank) * self.size, self.size)

    def first_rows(self, i: int, n: int) -> TokenBatch:
        """Return the first ``n`` sequences of micro-batch ``i`` over all ranks."""
        return self._batch(i, i % self.accumulate * self.world * self.size, n)

    def numbers(self, step: int) -> list[int]:
        """Return the numbers of the sequences of a step, the first step being 0."""
        start = step * self.batch_size + self.ahead
        numbers: list[int] = sequence_numbers(np.arange(start, start + self.batch_size), self.skip).tolist()
        return numbers

    def _batch(self, i: int, first: int, n: int) -> TokenBatch:
        """Return ``n`` sequences of the step of micro-batch ``i``, starting at sequence ``first``."""
        step = i // self.accumulate
        if self._step != step:
            rows = [self.order.row(n) for n in self.numbers(step)]
            self._step, self._rows = step, rows if self.patch is None else self.patch(rows, step, self.order)
        step_targets = sum(row.targets for row in self._rows)
        return self.order.builder.batch(self._rows[first : first + n], step_targets, self.documents)


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
