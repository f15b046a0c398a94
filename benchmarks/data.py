"""Measures how fast data is read, without a model, relative to a plain WebDataset loop.

All candidates but the dial read the same pairs, which are shipped with mmqk. A sample is an image and its caption.
Token arrays and the dial produce sequences, so the table also has their tokens per second.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmqk.data.tokens.online import open_online

from benchmarks.harness import Candidate, Context, Row, Unit, compare, seconds_of
from benchmarks.others import needs
from benchmarks.setups import toy
from mmqk.data.batch import TokenBatch
from mmqk.data.config import DataConfig
from mmqk.data.coupling import DialConfig
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.dial import Dial
from mmqk.data.loader import MicroBatches, PositionedLoader
from mmqk.data.shards.archives import index_tar
from mmqk.data.shards.images import load_image
from mmqk.data.shards.manifest import checked_shards
from mmqk.data.shards.samples import pair_of
from mmqk.data.tokens.encode import Encoder, TokenizeJob

PLAIN = "plain WebDataset loop, images decoded"
ONLINE = 100  # samples per repetition of the candidate that tokenizes while reading
BATCHES, BATCH, SEQ_LEN = 100, 32, 128
Work = tuple[int, int]  # samples, tokens
Make = Callable[[], Callable[[], Work]]


def units(context: Context) -> list[Unit]:
    """Return the units of this table."""
    return [Unit("data", "shipped-pairs", 60, _measure)]


def _measure(context: Context, batches: int = BATCHES) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as cache:
            config = replace(toy(context).data, seq_len=SEQ_LEN, batch_size=BATCH, val_sequences=1)
            shard = str(checked_shards(config.pairs, "val")[0][0])
            takes = {name: Take(make) for name, make in candidates_of(shard, config, Path(cache), batches).items()}
            cpu = replace(context, device="cpu")
            candidates = [Candidate(name, take.open, memory=False) for name, take in takes.items()]
            rows: list[Row] = compare(candidates, cpu, repeat=1, rounds=5)
    finally:
        torch.set_num_threads(threads)
    for row in rows:
        samples, tokens = takes[row["name"]].work
        row["work"] = {"samples": samples, **({"tokens": tokens} if tokens else {})}
    return {"title": f"{len(index_tar(shard))} pairs of {shard}", "facts": {"threads": 1}, "base": PLAIN, "rows": rows}


class Take:
    """A candidate for the harness. It stores the numbers of samples and tokens of its latest repetition."""

    def __init__(self, make: Make):
        self.make, self.work = make, (0, 0)

    def open(self) -> Callable[[int], float]:
        do = self.make()

        def once() -> None:
            self.work = do()

        return lambda repeat: seconds_of(once, repeat, "cpu")


def candidates_of(shard: str, config: DataConfig, cache: Path, batches: int = BATCHES) -> dict[str, Make]:
    """Return the candidates by name. A candidate returns a function that does the work once and returns (samples,
    tokens)."""

    tokenizers = Path(config.tokenizers)

    def webdataset() -> Callable[[], Work]:
        needs("webdataset")
        import webdataset as wds

        def read() -> Work:
            count = 0
            for sample in wds.WebDataset([shard], shardshuffle=False).decode("rgb8"):
                assert sample["webp"].shape == (64, 64, 3) and json.dumps(sample["json"])
                count += 1
            return count, 0

        return read

    def by_offset() -> Callable[[], Work]:
        def read() -> Work:
            index = index_tar(shard)
            for _, sample in index:
                image, _ = pair_of(sample)
                assert np.asarray(load_image(image, 64)).shape == (64, 64, 3)
            return len(index), 0

        return read

    def tokenized_online() -> Callable[[], Work]:
        pairs = open_online(shard, tokenizers, cache, 0.5)["train"]
        n = min(len(pairs), ONLINE)
        return lambda: (n, sum(len(pairs[i]) for i in range(n)))

    def tokenized() -> Callable[[], Work]:
        encoder = Encoder(TokenizeJob("pair", tokenizers, cache / "tokens", 0.01, "crop", 2**26, None), {})
        return lambda: (encoder.shard("00000", Path(shard))["samples"], 0)

    def arrays(of: DataConfig) -> Make:
        def make() -> Callable[[], Work]:
            data = TokenDataModule(of, seed=0)
            data.setup()
            return reader(data, batches)

        return make

    def loaded(of: DataConfig, workers: int) -> Make:
        def make() -> Callable[[], Work]:
            data = TokenDataModule(of, seed=0)
            data.setup()
            dataset = MicroBatches(data.order, of.batch_size, 1, 0, 1, steps=10**9)
            stream = iter(PositionedLoader(dataset, workers, torch.device("cpu")))
            return counted(lambda: next(stream), batches)

        return make

    def documents() -> Callable[[], Work]:
        dial, step = Dial(DialConfig()), iter(range(10**9))

        def read() -> Work:
            ids = dial.documents(0, next(step) * 16384, 16384)
            return len(ids), ids.size

        return read

    return {
        PLAIN: webdataset,
        "shards by member offset, images decoded": by_offset,
        "shards to token arrays (mmqk.data.tokenize, one worker)": tokenized,
        "shards by member offset, tokenized while reading": tokenized_online,
        "token arrays, pairs and text": arrays(config),
        "token arrays, pairs and text, in this process through the run's loader": loaded(config, 0),
        "token arrays, pairs and text, two loader workers": loaded(config, 2),
        "token arrays, packed into 1,024 tokens": arrays(replace(config, seq_len=1024, pack="documents")),
        "the dial, with exact log-probabilities": arrays(replace(config, mix={"dial": 1.0}, seq_len=96)),
        "the dial alone, documents": documents,
    }


def reader(data: TokenDataModule, batches: int) -> Callable[[], Work]:
    """Return a function that makes successive batches of a run, as a loader worker does."""
    dataset = MicroBatches(data.order, data.config.batch_size, 1, 0, 1, steps=10**9)
    step = iter(range(10**9))

    return counted(lambda: dataset[next(step)], batches)


def counted(take: Callable[[], TokenBatch], batches: int) -> Callable[[], Work]:
    """Return a function that takes the given number of batches and counts their rows and tokens."""

    def read() -> Work:
        rows = tokens = 0
        for _ in range(batches):
            batch = take()
            rows += len(batch.ids_BT)
            tokens += int(batch.valid_BT.sum())
        return rows, tokens

    return read
