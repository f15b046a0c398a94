"""The Lightning datamodule: the order of a run, dealt out to micro-batches, ranks and loader workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
from torch.utils.data import DataLoader, Dataset

from mmqk.data.batch import TokenBatch
from mmqk.data.cache import open_source, source_hash
from mmqk.data.dial import Dial, DialConfig
from mmqk.data.mix import Mixture
from mmqk.data.online import online_hash, open_online
from mmqk.data.order import TrainingOrder, validation_rows
from mmqk.data.sequences import Row, SequenceBuilder
from mmqk.data.statistics import describe
from mmqk.data.tokens import Layout, layout_of, open_tokens, read_header, tokens_hash
from mmqk.store import UserError

# Kinds of data.mix that share a vocabulary: mmqk's tokenizers', that of the user's own ids, the dial's.
FAMILIES = (("pair", "text", "image", "interleaved"), ("tokens",), ("dial",))
# Training sequences that statistics of the data are taken from.
SAMPLE = 512
# Fields of DataConfig that name a source, by kind.
SOURCE_FIELDS = {"pair": "pairs", "text": "text", "interleaved": "interleaved"}


@dataclass(frozen=True)
class DataConfig:
    """What the model reads.

    Args:
        pairs: image+caption pairs: shards with their manifest, or a folder made by mmqk.data.tokenize; empty: none.
        read: tokens reads pairs from token arrays, made once; shards reads and tokenizes them while training, from
            a folder with a manifest or a pattern such as path/{00000..00099}.tar.
        val_share: share of the pairs held out under such a pattern, by a hash of the sample's key.
        text: text-only documents: likewise.
        interleaved: documents of text and images: a folder made by mmqk.data.tokenize --interleaved.
        tokens: documents of ids of other tokenizers: a folder made by mmqk.data.ids.
        tokenizers: folder with text.json and image.safetensors.
        cache: where shards are kept as token arrays after they were tokenized once.
        seq_len: tokens in a sequence.
        batch_size: sequences in an optimizer step, over all micro-batches and devices.
        mix: relative weight of each kind of sequence: pair, text, image, interleaved; or tokens alone; or dial alone.
            {"text": 1} is text only.
        image_first: share of the pairs in which the image comes before its caption.
        pack: documents fills a sequence with several of them, none puts one document (or a window of text) in each.
        document_mask: attention stays inside each packed document.
        dial: the synthetic source whose entropies are known, for mix {"dial": 1}.
        val_sequences: size of the validation set, which is the same for every arm and seed.
        val_every_n_steps: optimizer steps between two validations; 0 validates at the end only, as all do.
        workers: loader processes; does not change what is read.
    """

    pairs: str = "data/emoji"
    read: Literal["tokens", "shards"] = "tokens"
    val_share: float = 0.01
    text: str = "data/text"
    interleaved: str = ""
    tokens: str = ""
    tokenizers: str = "data/tokenizers"
    cache: str = ".cache/tokens"
    seq_len: int = 128
    batch_size: int = 16
    mix: dict[str, float] = field(default_factory=lambda: {"pair": 3.0, "text": 1.0})
    image_first: float = 0.5
    pack: Literal["none", "documents"] = "none"
    document_mask: bool = True
    dial: DialConfig = field(default_factory=DialConfig)
    val_sequences: int = 128
    val_every_n_steps: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "val_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} is {getattr(self, name)}: it must be at least 1.")
        if not 0 < self.val_share < 1:
            raise ValueError(f"data.val_share is {self.val_share}: it is a share between 0 and 1.")
        if self.read == "shards" and self.pack == "documents":
            raise ValueError(
                "data.read shards knows no lengths to pack by: set data.pack none, or tokenize first."
            )
        for name in ("workers", "val_every_n_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"data.{name} is {getattr(self, name)}: it cannot be negative.")
        Mixture(self.mix, self.image_first, seed=0)  # refuses what cannot be mixed
        wanted = [kind for kind, weight in self.mix.items() if weight > 0]
        if sum(any(kind in family for kind in wanted) for family in FAMILIES) > 1:
            raise ValueError(
                f"data.mix cannot mix {', '.join(wanted)}: tokens and dial have vocabularies of their own, so each"
                " stands alone."
            )
        sources = {"image": "pairs", **SOURCE_FIELDS, "tokens": "tokens"}
        for kind in wanted:
            if kind in sources and not getattr(self, sources[kind]):
                raise ValueError(
                    f"data.mix asks for {kind}, but data.{sources[kind]} is empty: name its folder."
                )

    @property
    def family(self) -> tuple[str, ...]:
        """The kinds that share this configuration's vocabulary."""
        return next(f for f in FAMILIES if any(self.mix.get(kind, 0) > 0 for kind in f))

    @property
    def sources(self) -> dict[str, Path]:
        """Folders by kind of what can be read beside each other: those named, of this vocabulary."""
        if "pair" not in self.family:
            return {}
        return {kind: Path(path) for kind, name in SOURCE_FIELDS.items() if (path := getattr(self, name))}


def layout(config: DataConfig) -> Layout:
    """How the ids are laid out that a configuration leads to.

    Raises:
        UserError: tokenizers or a token folder are missing or damaged. ValueError: a dial that cannot be.
    """
    if "dial" in config.family:
        return Layout(Dial(config.dial).blocks)
    if "tokens" in config.family:
        return Layout(**read_header(config.tokens)["layout"])
    return layout_of(config.tokenizers)


def data_identity(config: DataConfig) -> dict[str, Any]:
    """The fields that make the samples what they are: sources by their hashes, without what is not read.

    Raises:
        UserError: a source is missing or damaged.
    """
    from mmqk.tokenizers import tokenizers_hash

    fields = {k: v for k, v in asdict(config).items() if k not in ("cache", "workers", "dial")}
    fields |= dict.fromkeys((*SOURCE_FIELDS.values(), "tokens", "tokenizers"), "")
    for kind, path in config.sources.items():
        online = config.read == "shards" and kind == "pair"
        fields[SOURCE_FIELDS[kind]] = online_hash(str(path)) if online else source_hash(path)
    if "dial" in config.family:
        # The hash of an identity sorts names, and the order of modalities matters.
        fields["dial"] = {**asdict(config.dial), "modalities": list(config.dial.names)}
    elif "tokens" in config.family:
        fields["tokens"] = tokens_hash(config.tokens)
    else:
        fields["tokenizers"] = tokenizers_hash(config.tokenizers)
    return fields


class MicroBatches(Dataset):
    """Micro-batch ``i`` of one rank: a pure function of ``i``, so that workers and resumption cannot change it."""

    def __init__(
        self,
        order: TrainingOrder,
        batch_size: int,
        accumulate: int,
        rank: int,
        world: int,
        steps: int,
        documents: bool = False,
    ):
        self.documents = documents
        self.order, self.batch_size, self.accumulate, self.steps = order, batch_size, accumulate, steps
        self.rank, self.world, self.size = rank, world, batch_size // (accumulate * world)

    def __len__(self) -> int:
        return self.steps * self.accumulate

    def __getitem__(self, i: int) -> TokenBatch:
        step, micro = divmod(i, self.accumulate)
        start = step * self.batch_size
        mine = start + (micro * self.world + self.rank) * self.size
        rows = [self.order.row(index) for index in range(mine, mine + self.size)]
        step_targets = None
        if self.accumulate * self.world > 1:
            step_targets = sum(self.order.row(i).targets for i in range(start, start + self.batch_size))
        return self.order.builder.batch(rows, step_targets, self.documents)


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
        try:
            ids = layout(config)
            self.dial = dial = Dial(config.dial) if "dial" in config.family else None
            stores = self._stores()
            pack = config.pack == "documents"
            train, val = ({kind: s[split] for kind, s in stores.items()} for split in ("train", "val"))
            self.builder = SequenceBuilder(train, ids, config.seq_len)
            self.order = TrainingOrder(self.builder, config.mix, config.image_first, self.seed, pack, dial)
            self.val_rows = validation_rows(
                SequenceBuilder(val, ids, config.seq_len), config.val_sequences, dial
            )
        except ValueError as error:
            raise UserError(str(error)) from error

    def _stores(self) -> dict[str, dict[str, Any]]:
        """Documents by kind and split."""
        config = self.config
        if "tokens" in config.family:
            return {"tokens": open_tokens(config.tokens)}
        tokenizers, cache = Path(config.tokenizers), Path(config.cache)
        stores: dict[str, Any] = {}
        for kind, folder in config.sources.items():
            if kind == "pair" and config.read == "shards":
                stores[kind] = open_online(str(folder), tokenizers, cache, config.val_share)
            else:
                stores[kind] = open_source(kind, folder, tokenizers, cache)
        return stores

    def train_dataloader(self) -> PositionedLoader:
        trainer = self.trainer
        assert trainer is not None
        accumulate, world = trainer.accumulate_grad_batches, trainer.world_size
        if self.config.batch_size % (accumulate * world):
            raise UserError(
                f"data.batch_size {self.config.batch_size} is not a multiple of accumulate_grad_batches {accumulate}"
                f" times {world} devices: choose one that is."
            )
        documents = self.config.pack == "documents" and self.config.document_mask
        dataset = MicroBatches(
            self.order,
            self.config.batch_size,
            accumulate,
            trainer.global_rank,
            world,
            trainer.max_steps,
            documents,
        )
        return PositionedLoader(dataset, self.config.workers, pin_memory=_on_gpu(trainer))

    def val_batches(self) -> Iterator[TokenBatch]:
        """The whole validation set, a micro-batch at a time, on every rank: it is small."""
        trainer = self.trainer
        assert trainer is not None
        size = max(1, self.config.batch_size // (trainer.accumulate_grad_batches * trainer.world_size))
        rows = self.val_rows
        return (self.builder.batch(rows[i : i + size]) for i in range(0, len(rows), size))

    def probe_batch(self, sequences: int) -> TokenBatch:
        """The first validation sequences, for monitors that compare runs on the same tokens."""
        return self.builder.batch(self.val_rows[:sequences])

    @lru_cache(maxsize=1)  # noqa: B019 (one datamodule a process)
    def sample(self, sequences: int = SAMPLE) -> list[Row]:
        """The first training sequences of this run's order."""
        return [self.order.row(index) for index in range(sequences)]

    def statistics(self) -> dict[str, dict[str, Any]]:
        """What is known of the data by modality: `ModalityStatistics` of the first training sequences as plain data,
        and "floor", the loss on the validation set of a model that knows the source; None where nobody does."""
        side = (
            round((self.builder.stores["pair"].image_tokens - 2) ** 0.5)
            if "pair" in self.builder.stores
            else 0
        )
        contexts = [(1, 2, 3, 4), *([(1, side)] if side > 1 else [])]
        blocks = self.builder.layout.blocks
        train, val = (
            [part for row in rows for part in np.split(row.ids, row.starts[1:])]
            for rows in (self.sample(), self.val_rows)
        )
        found = {name: asdict(s) for name, s in describe(train, val, blocks, contexts).items()}
        ids, nats = (
            np.concatenate([_targets(row, of) for row in self.val_rows]) for of in ("ids", "surprise")
        )
        modality = self.builder.layout.modality(ids)
        for number, name in enumerate(blocks):
            of_it = nats[modality == number] if len(nats) == len(ids) else nats[:0]
            if name in found:
                found[name]["floor"] = float(of_it.mean()) if len(of_it) else None
        return found

    def unigram_loss(self, sequences: int = SAMPLE) -> dict[str, float]:
        """Validation loss of a predictor that knows the form of a sequence and how often each token occurs.

        The form is where each modality begins and ends: specials cost it nothing. The other tokens of a
        modality it draws by their frequency, counted over the first training sequences of this run's order,
        one added to each count. Nats by modality; a model that does not beat it has learnt no context.
        """
        ids, edges = self.builder.layout, self.builder.layout.edges
        counts = np.ones(ids.size)
        for row in self.sample(sequences):
            np.add.at(counts, _targets(row), 1)
        counts[ids.specials] = 0
        targets = np.concatenate([_targets(row) for row in self.val_rows])
        losses = {}
        for name, low, high in zip(ids.blocks, edges[:-1], edges[1:], strict=True):
            nats = np.zeros(high - low)
            counted = counts[low:high] > 0
            nats[counted] = -np.log(counts[low:high][counted] / counts[low:high].sum())
            inside = targets[(targets >= low) & (targets < high)] - low
            if len(inside):
                losses[name] = float(nats[inside].mean())
        return losses


def _targets(row: Row, of: Literal["ids", "surprise"] = "ids") -> np.ndarray:
    """What is predicted of a row, all but the first token of each document; empty where it is not known."""
    values = getattr(row, of)
    return np.zeros(0) if values is None else np.delete(values, row.starts)


def _on_gpu(trainer: L.Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda"
