"""The Lightning datamodule: the sources of a run, its order and its validation set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L

from mmqk.data.batch import TokenBatch
from mmqk.data.config import DataConfig, layout
from mmqk.data.dial import Dial
from mmqk.data.loader import MicroBatches, PositionedLoader, StreamedParts, StreamLoader
from mmqk.data.mixture import source_of
from mmqk.data.order import PAIR_FORMS, TrainingOrder, validation_rows
from mmqk.data.sequences import Row, SequenceBuilder, count_targets, describe, floors, unigram_loss
from mmqk.data.shards.read import ShardCache
from mmqk.data.stream import LaneRows, Stream
from mmqk.data.tokens.encode import ChangedPairs, open_source
from mmqk.data.tokens.folder import open_tokens
from mmqk.model.patch import named_function
from mmqk.store import UserError

# Number of training sequences from which the statistics of the data are computed.
SAMPLE = 512
# Of a run that reads shards, the sequences of this many rows of the first steps.
SAMPLE_LANES = 16
# Largest number of training sequences whose targets are counted, which takes a fraction of a second.
COUNTED = 8192


class TokenDataModule(L.LightningDataModule):
    """The data of one run: sources, mixture, order and validation set.

    Args:
        config: The sources and their mixture.
        seed: Seed of the order.
    """

    def __init__(self, config: DataConfig | None = None, seed: int = 0):
        super().__init__()
        self.config, self.seed = config or DataConfig(), seed
        self._loader: PositionedLoader | None = None

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
            for kind in config.kinds:
                if kind != "dial" and not len(val[source_of(kind)]):
                    n = len(train[source_of(kind)])
                    again = "make its folder again, with another --out and without --val-fraction"
                    remedy = again if n > 1 else "give more documents"
                    raise ValueError(f"data.mix asks for {kind}, but none of its {n} documents is held out: {remedy}.")
            self.builder = builder = SequenceBuilder(train, ids, config.seq_len)
            streamed = [kind for kind in config.kinds if source_of(kind) in config.streams]
            self.rows = {kind: LaneRows(train[source_of(kind)], builder, kind, pack) for kind in streamed}
            self.order = TrainingOrder(
                builder, config.mix, config.image_first_prob, self.seed, pack, dial, streamed=self.rows
            )
            forms = ("image",) if set(config.kinds) == {"image"} else PAIR_FORMS
            held_out = SequenceBuilder(val, ids, config.seq_len)
            self.val_rows = validation_rows(held_out, config.val_sequences, dial, forms)
        except ValueError as error:
            raise UserError(str(error)) from error

    def _open(self) -> dict[str, dict[str, Any]]:
        """Return the documents by kind and split."""
        config = self.config
        if "tokens" in config.family:
            return {"tokens": open_tokens(config.tokens, Path(config.cache))}
        tokenizers, cache = config.tokenizers_folder, Path(config.cache)
        stores: dict[str, Any] = {
            kind: open_source(kind, folder, tokenizers, cache) for kind, folder in config.sources.items()
        }
        for kind, shards in config.streams.items():
            limit = int(config.shard_cache_gb * 1e9)
            copies = ShardCache(Path(config.shard_cache), limit) if config.shard_cache else None
            stream = Stream(kind, shards, tokenizers, config.val_fraction, copies)
            tokens = config.val_sequences * config.seq_len if kind == "text" else 0
            stores[kind] = {"train": stream, "val": stream.held_out(config.val_sequences, tokens)}
        if config.pairing != "matched" and "pair" in stores:
            stores["pair"] = {split: ChangedPairs(pairs, config.pairing) for split, pairs in stores["pair"].items()}
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

    @property
    def streamed(self) -> StreamLoader | None:
        """The loader of the shards that the run reads, with the samples that were skipped; None if it reads none."""
        loader = self._loader
        return loader if isinstance(loader, StreamLoader) else None

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
        device, documents = trainer.strategy.root_device, self.config.documents_apart
        patch = named_function(self.config.patch) if self.config.patch else None
        batches = MicroBatches(
            self.order, size, accumulate, trainer.global_rank, world, trainer.max_steps, documents, patch
        )
        if self.rows:
            identity = self.config.stream_identity(self.seed)
            self._loader = StreamLoader(batches, self.rows, self.seed, identity, self.config.workers, device)
        else:
            self._loader = PositionedLoader(batches, self.config.workers, device)
        return self._loader

    def step_rows(self, i: int, n: int) -> TokenBatch:
        """Return `MicroBatches.first_rows` of the current training, which reads no shards."""
        assert self._loader is not None
        return self._loader.dataset.first_rows(i, n)

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
        """The first `SAMPLE` training sequences of this run's order; with shards, of its first lanes."""
        if not self.rows:
            return [self.order.row(index) for index in range(SAMPLE)]
        lanes = min(self.config.batch_size, SAMPLE_LANES)
        batches = MicroBatches(self.order, self.config.batch_size, accumulate=1, rank=0, world=1, steps=1)
        source = StreamedParts(batches, self.rows, self.seed)
        parts = [source.part(step, range(lanes)) for step in range(SAMPLE // lanes)]
        return [row for part in parts for row in part.rows.values()]

    def statistics(self, sequences: int = SAMPLE) -> dict[str, dict[str, Any]]:
        """Return the statistics of the data by modality, as dictionaries.

        Each dictionary has the fields of `ModalityStatistics` over the first training sequences; "share", the share
        of the targets; "floor", the lowest possible validation loss (None if the source is unknown); and "targets",
        the mean number of targets per training sequence (see `targets`).
        """
        layout = self.builder.layout
        # Use only rows of the first epoch, so that no document counts twice.
        fresh = [row for index, row in enumerate(self.sample) if self.rows or self.order.is_fresh(index)]
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
        n = max(1, min(sequences, SAMPLE if self.rows else COUNTED))
        rows = self.sample[:n] if n <= SAMPLE else map(self.order.row, range(n))
        return {name: count / n for name, count in count_targets(rows, self.builder.layout).items()}

    def unigram_loss(self) -> dict[str, float]:
        """Return `mmqk.data.sequences.unigram_loss` of the first training sequences."""
        return unigram_loss(self.sample, self.val_rows, self.builder.layout)
