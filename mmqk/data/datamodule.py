"""The Lightning datamodule. It divides the ordered training sequences of a run into micro-batches, and assigns the
micro-batches to ranks and loader workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mmqk.data.batch import TokenBatch
from mmqk.data.config import DataConfig, layout
from mmqk.data.dial import Dial
from mmqk.data.order import TrainingOrder, sequence_numbers, validation_rows
from mmqk.data.sequences import Row, SequenceBuilder, count_targets, describe, floors, unigram_loss
from mmqk.data.tokens.cache import Captions, ShuffledPairs, open_source
from mmqk.data.tokens.folder import open_tokens
from mmqk.data.tokens.online import open_online
from mmqk.model.patch import named_function
from mmqk.store import UserError

# Number of training sequences from which the statistics of the data are computed.
SAMPLE = 512
PAIRINGS: dict[str, Any] = {"shuffled": ShuffledPairs, "captions": Captions}
# Largest number of training sequences whose targets are counted, which takes a fraction of a second.
COUNTED = 8192


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
        loader = DataLoader(
            self.dataset,
            batch_size=None,
            sampler=range(self.position, len(self.dataset)),
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
        )
        try:
            for batch in loader:
                self.position += 1
                yield batch.to(self.device, non_blocking=True)  # from pinned memory: the host does not wait
        except UserError as error:
            # A loader worker puts a traceback into the message; the original message follows the class name.
            raise UserError(str(error).rsplit("UserError: ", 1)[-1].strip()) from None

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


class TokenDataModule(L.LightningDataModule):
    """The data of one run: sources, mixture, order and validation set.

    Args:
        config: The sources and their mixture.
        seed: Seed of the order.
    """

    def __init__(self, config: DataConfig | None = None, seed: int = 0):
        super().__init__()
        self.config, self.seed = config or DataConfig(), seed

    @property
    def vocab_sizes(self) -> dict[str, int]:
        """Number of ids by modality, for `ModelConfig`.

        Raises:
            UserError: the tokenizers are missing or damaged.
        """
        return layout(self.config).vocab_sizes

    def setup(self, stage: str | None = None) -> None:
        """Open the sources.

        Raises:
            UserError: shards, tokenizers or the cache are missing or damaged, or the configuration does not fit them.
        """
        if hasattr(self, "builder"):
            return
        config = self.config
        try:
            ids = layout(config)
            self.dial = dial = Dial(config.dial) if "dial" in config.family else None
            self.stores = stores = self._open()
            pack = config.pack == "documents"
            train, val = ({kind: s[split] for kind, s in stores.items()} for split in ("train", "val"))
            for kind in (k for k, weight in config.mix.items() if weight > 0 and k != "dial"):
                store = "pair" if kind == "image" else kind
                if not len(val[store]):
                    documents = len(train[store])
                    remedy = "make its folder again, with another --out and without --val-fraction."
                    if documents < 2:
                        remedy = "give more documents."
                    elif config.read == "shards" and store == "pair":
                        remedy = "leave data.val_fraction out."
                    raise ValueError(
                        f"data.mix asks for {kind}, but none of its {documents} documents is held out: {remedy}"
                    )
            self.builder = SequenceBuilder(train, ids, config.seq_len)
            self.order = TrainingOrder(self.builder, config.mix, config.image_first_prob, self.seed, pack, dial)
            self.val_rows = validation_rows(SequenceBuilder(val, ids, config.seq_len), config.val_sequences, dial)
        except ValueError as error:
            raise UserError(str(error)) from error

    def _open(self) -> dict[str, dict[str, Any]]:
        """Return the documents by kind and split."""
        config = self.config
        if "tokens" in config.family:
            return {"tokens": open_tokens(config.tokens, Path(config.cache))}
        tokenizers, cache = config.tokenizers_folder, Path(config.cache)
        stores: dict[str, Any] = {}
        for kind, folder in config.sources.items():
            if kind == "pair" and config.read == "shards":
                stores[kind] = open_online(str(folder), tokenizers, cache, config.val_fraction)
            else:
                stores[kind] = open_source(kind, folder, tokenizers, cache)
        if (other := PAIRINGS.get(config.pairing)) and "pair" in stores:
            stores["pair"] = {split: other(pairs) for split, pairs in stores["pair"].items()}
        return stores

    def few_held_out(self) -> str:
        """Return a sentence if fewer sequences are held out than data.val_sequences; else an empty string."""
        wanted, n = self.config.val_sequences, len(self.val_rows)
        if n >= wanted:
            return ""
        return (
            f"data.val_sequences asks for {wanted} held-out sequences, but one kind has too few for its fixed share:"
            f" validation uses {n} sequences; hold out more, or set data.val_sequences to {n}."
        )

    def unread(self) -> list[str]:
        """Return the lines to print about shard files that belong to no pair, with ``data.read shards``."""
        online = self.config.read == "shards" and "pair" in self.stores
        return self.stores["pair"]["train"].unread() if online else []

    @property
    def skipped(self) -> dict[str, str]:
        """The reason for each sample of shards that this rank has skipped so far, by the name of the sample."""
        stores = self.stores.get("pair", {}).values() if self.config.read == "shards" else ()
        return {name: reason for store in stores for name, reason in store.skipped.items()}

    def train_dataloader(self) -> PositionedLoader:
        trainer = self.trainer
        assert trainer is not None
        accumulate, world, size = trainer.accumulate_grad_batches, trainer.world_size, self.config.batch_size
        if trainer.max_steps < 1:
            raise UserError("TokenDataModule needs the number of steps: set max_steps of lightning.Trainer.")
        if size % (accumulate * world):
            raise UserError(
                f"data.batch_size {size} is not a multiple of accumulate_grad_batches {accumulate} times {world}"
                " processes: change one of them."
            )
        limit = trainer.limit_train_batches
        if isinstance(limit, int) and limit % accumulate:
            raise UserError(
                f"limit_train_batches {limit} is not a multiple of accumulate_grad_batches {accumulate}, so that the"
                " last step of an epoch would have too few batches: change one of them."
            )
        self._micro_batches = MicroBatches(
            self.order,
            size,
            accumulate,
            trainer.global_rank,
            world,
            trainer.max_steps,
            self.config.documents_apart,
            named_function(self.config.patch) if self.config.patch else None,
        )
        return PositionedLoader(self._micro_batches, self.config.workers, trainer.strategy.root_device)

    def step_rows(self, i: int, n: int) -> TokenBatch:
        """Return `MicroBatches.first_rows` of the current training."""
        return self._micro_batches.first_rows(i, n)

    def val_batches(self) -> Iterator[TokenBatch]:
        """Return the validation set in micro-batches; every rank reads all of it, because it is small."""
        trainer = self.trainer
        assert trainer is not None
        size = max(1, self.config.batch_size // (trainer.accumulate_grad_batches * trainer.world_size))
        rows = self.val_rows
        return (self.builder.batch(rows[i : i + size]) for i in range(0, len(rows), size))

    def probe_batch(self, sequences: int) -> TokenBatch:
        """Return the first validation sequences, for monitors that compare runs on the same tokens."""
        return self.builder.batch(self.val_rows[:sequences])

    @cached_property
    def sample(self) -> list[Row]:
        """The first `SAMPLE` training sequences of this run's order."""
        return [self.order.row(index) for index in range(SAMPLE)]

    def statistics(self, sequences: int = SAMPLE) -> dict[str, dict[str, Any]]:
        """Return the statistics of the data by modality, as dictionaries.

        Each dictionary has the fields of `ModalityStatistics` over the first training sequences; "share", the share
        of the targets; "floor", the lowest possible validation loss (None if the source is unknown); and "targets",
        the mean number of targets per training sequence (see `targets`).
        """
        layout = self.builder.layout
        # Use only rows of the first epoch, so that no document counts twice.
        fresh = [row for index, row in enumerate(self.sample) if self.order.is_fresh(index)]
        counts, lowest = count_targets(self.sample, layout), floors(self.val_rows, layout)
        total, targets = sum(counts.values()), self.targets(sequences)
        return {
            name: {**asdict(s), "share": counts[name] / total, "floor": lowest.get(name), "targets": targets[name]}
            for name, s in describe(fresh, layout).items()
        }

    def targets(self, sequences: int) -> dict[str, float]:
        """Return the mean number of targets of each modality per training sequence.

        The mean is over the first ``sequences`` sequences of the run, but at most `COUNTED`, or `SAMPLE` if each
        image must be decoded.
        """
        n = max(1, min(sequences, SAMPLE if self.config.read == "shards" else COUNTED))
        rows = self.sample[:n] if n <= SAMPLE else map(self.order.row, range(n))
        return {name: count / n for name, count in count_targets(rows, self.builder.layout).items()}

    def unigram_loss(self) -> dict[str, float]:
        """Return `mmqk.data.sequences.unigram_loss` of the first training sequences."""
        return unigram_loss(self.sample, self.val_rows, self.builder.layout)
