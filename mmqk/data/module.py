"""The Lightning datamodule: the order of a run, dealt out to micro-batches, ranks and loader workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lightning as L
import numpy as np
from torch.utils.data import DataLoader, Dataset

from mmqk.data.batch import TokenBatch
from mmqk.data.cache import open_cache
from mmqk.data.mix import Mixture
from mmqk.data.sequences import SequenceBuilder, TrainingOrder, validation_rows
from mmqk.store import UserError
from mmqk.tokenizers.vocabulary import SPECIALS, JointVocabulary


@dataclass(frozen=True)
class DataConfig:
    """What the model reads.

    Args:
        pairs: folder of WebDataset shards of image+caption pairs with their manifest.
        text: folder of the text-only corpus with its manifest.
        tokenizers: folder with text.json and image.safetensors.
        cache: where shards are kept as token arrays after they were tokenized once.
        seq_len: tokens in a sequence.
        batch_size: sequences in an optimizer step, over all micro-batches and devices.
        mix: relative weight of each kind of sequence: pair, text, image. {"text": 1} is text only.
        image_first: share of the pairs in which the image comes before its caption.
        val_sequences: size of the validation set, which is the same for every arm and seed.
        val_every_n_steps: optimizer steps between two validations; 0 validates at the end only, as all do.
        workers: loader processes; does not change what is read.
    """

    pairs: str = "data/emoji"
    text: str = "data/text"
    tokenizers: str = "data/tokenizers"
    cache: str = ".cache/tokens"
    seq_len: int = 128
    batch_size: int = 16
    mix: dict[str, float] = field(default_factory=lambda: {"pair": 3.0, "text": 1.0})
    image_first: float = 0.5
    val_sequences: int = 128
    val_every_n_steps: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "val_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} is {getattr(self, name)}: it must be at least 1.")
        for name in ("workers", "val_every_n_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"data.{name} is {getattr(self, name)}: it cannot be negative.")
        Mixture(self.mix, self.image_first, seed=0)  # refuses what cannot be mixed


class MicroBatches(Dataset):
    """Micro-batch ``i`` of one rank: a pure function of ``i``, so that workers and resumption cannot change it."""

    def __init__(
        self, order: TrainingOrder, batch_size: int, accumulate: int, rank: int, world: int, steps: int
    ):
        self.order, self.batch_size, self.accumulate, self.steps = order, batch_size, accumulate, steps
        self.rank, self.world, self.size = rank, world, batch_size // (accumulate * world)

    def __len__(self) -> int:
        return self.steps * self.accumulate

    def __getitem__(self, i: int) -> TokenBatch:
        step, micro = divmod(i, self.accumulate)
        start = step * self.batch_size
        mine = start + (micro * self.world + self.rank) * self.size
        rows = [self.order.row(index) for index in range(mine, mine + self.size)]
        if self.accumulate * self.world == 1:
            return self.order.builder.batch(rows)
        lengths = [len(self.order.row(index)) for index in range(start, start + self.batch_size)]
        return self.order.builder.batch(rows, step_targets=sum(lengths) - len(lengths))


class PositionedLoader:
    """A loader whose whole state is one integer: how many micro-batches were handed out.

    Lightning resumes exactly from a loader with a length and with ``state_dict``/``load_state_dict``.
    """

    def __init__(self, dataset: MicroBatches, workers: int, pin_memory: bool):
        self.dataset, self.workers, self.pin_memory = dataset, workers, pin_memory
        self.position = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[TokenBatch]:
        loader = DataLoader(
            self.dataset,
            batch_size=None,
            sampler=range(self.position, len(self.dataset)),
            num_workers=self.workers,
            pin_memory=self.pin_memory,
        )
        for batch in loader:
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class TokenDataModule(L.LightningDataModule):
    """Shards, tokenizers and mixture of one run.

    Raises:
        UserError: shards, tokenizers or the cache are missing or damaged, or the numbers do not fit.
    """

    def __init__(self, config: DataConfig, seed: int):
        super().__init__()
        self.config, self.seed = config, seed

    def setup(self, stage: str | None = None) -> None:
        if hasattr(self, "builder"):
            return
        config = self.config
        tokenizers = Path(config.tokenizers)
        splits = open_cache(Path(config.pairs), Path(config.text), tokenizers, Path(config.cache))
        vocabulary = JointVocabulary.load(tokenizers)
        try:
            self.builder = SequenceBuilder(splits["train"], vocabulary, config.seq_len)
            self.order = TrainingOrder(self.builder, config.mix, config.image_first, self.seed)
            val_builder = SequenceBuilder(splits["val"], vocabulary, config.seq_len)
            self._val_rows = validation_rows(val_builder, config.val_sequences)
        except ValueError as error:
            raise UserError(str(error)) from error

    def train_dataloader(self) -> PositionedLoader:
        trainer = self.trainer
        assert trainer is not None
        accumulate, world = trainer.accumulate_grad_batches, trainer.world_size
        if self.config.batch_size % (accumulate * world):
            raise UserError(
                f"data.batch_size {self.config.batch_size} is not a multiple of accumulate_grad_batches {accumulate}"
                f" times {world} devices: choose one that is."
            )
        dataset = MicroBatches(
            self.order, self.config.batch_size, accumulate, trainer.global_rank, world, trainer.max_steps
        )
        return PositionedLoader(dataset, self.config.workers, pin_memory=_on_gpu(trainer))

    def val_batches(self) -> Iterator[TokenBatch]:
        """The whole validation set, a micro-batch at a time, on every rank: it is small."""
        trainer = self.trainer
        assert trainer is not None
        size = max(1, self.config.batch_size // (trainer.accumulate_grad_batches * trainer.world_size))
        rows = self._val_rows
        return (self.builder.batch(rows[i : i + size]) for i in range(0, len(rows), size))

    def probe_batch(self, sequences: int) -> TokenBatch:
        """The first validation sequences, for monitors that compare runs on the same tokens."""
        return self.builder.batch(self._val_rows[:sequences])

    def unigram_loss(self, sequences: int = 512) -> dict[str, float]:
        """Validation loss of a predictor that knows the form of a sequence and how often each token occurs.

        The form is where each modality begins and ends: specials cost it nothing. The other tokens of a
        modality it draws by their frequency, counted over the first training sequences of this run's order,
        one added to each count. Nats by modality; a model that does not beat it has learnt no context.
        """
        vocabulary = self.builder.vocabulary
        edges = np.cumsum([0, *vocabulary.blocks.values()])
        counts = np.ones(edges[-1])
        for index in range(sequences):
            np.add.at(counts, self.order.row(index)[1:], 1)
        counts[: len(SPECIALS)] = 0
        targets = np.concatenate([row[1:] for row in self._val_rows])
        losses = {}
        for name, low, high in zip(vocabulary.blocks, edges[:-1], edges[1:], strict=True):
            nats = np.zeros(high - low)
            counted = counts[low:high] > 0
            nats[counted] = -np.log(counts[low:high][counted] / counts[low:high].sum())
            inside = targets[(targets >= low) & (targets < high)] - low
            if len(inside):
                losses[name] = float(nats[inside].mean())
        return losses


def _on_gpu(trainer: L.Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda"
