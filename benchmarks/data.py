"""How fast the data come: `python benchmarks/data.py`, one core, all in turns, ratios to a plain WebDataset loop.

Every way does the same shipped pairs; the rounds are interleaved, and a row is the median over rounds. Samples are
image+caption pairs; for token arrays and the dial, whose work is sequences, tokens a second are given too.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from mmqk.data.config import DataConfig
from mmqk.data.dial import Dial, DialConfig
from mmqk.data.images import load_image
from mmqk.data.manifest import checked_shards
from mmqk.data.module import MicroBatches, TokenDataModule
from mmqk.data.online import open_online
from mmqk.data.samples import pair_of
from mmqk.data.tars import index_tar
from mmqk.data.tokenize_worker import Encoder, Job, Shard

ROUNDS = 5
BATCHES, BATCH, SEQ_LEN = 100, 32, 128


def main() -> int:
    """Print the table."""
    torch.set_num_threads(1)
    shard = str(checked_shards("data/emoji", "val")[0][0])
    samples = len(index_tar(shard))
    with tempfile.TemporaryDirectory() as cache:
        ways = ways_of(shard, Path(cache))
        for way in ways.values():
            way()  # caches, imports
        times: dict[str, list[float]] = {name: [] for name in ways}
        work: dict[str, tuple[int, int]] = {}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                start = time.perf_counter()
                work[name] = way()
                times[name].append(time.perf_counter() - start)
    packages = ("torch", "webdataset", "pillow", "numpy", "tokenizers")
    print(f"{samples} pairs of {shard}; medians of {ROUNDS} interleaved rounds; one core of {os.cpu_count()}")
    print(f"{platform.machine()}, Python {platform.python_version()}, "
          + ", ".join(f"{p} {version(p)}" for p in packages) + "\n")  # fmt: skip
    print("| what | samples/s | tokens/s | against the WebDataset loop |")
    print("| --- | --: | --: | --: |")
    plain = work["plain WebDataset loop, images decoded"][0] / statistics.median(
        times["plain WebDataset loop, images decoded"]
    )
    for name in ways:
        seconds = statistics.median(times[name])
        rate, tokens = (amount / seconds for amount in work[name])
        print(f"| {name} | {rate:,.0f} | {f'{tokens:,.0f}' if tokens else ''} | {rate / plain:.2f} |")
    return 0


def ways_of(shard: str, cache: Path) -> dict[str, Callable[[], tuple[int, int]]]:
    """What is timed, by name: each does its work once and returns (samples, tokens)."""
    import webdataset as wds

    def webdataset() -> tuple[int, int]:
        count = 0
        for sample in wds.WebDataset([shard], shardshuffle=False).decode("rgb8"):
            assert sample["webp"].shape == (64, 64, 3) and json.dumps(sample["json"])
            count += 1
        return count, 0

    def by_offset() -> tuple[int, int]:
        index = index_tar(shard)
        for _, sample in index:
            image, _ = pair_of(sample)
            assert np.asarray(load_image(image, 64)).shape == (64, 64, 3)
        return len(index), 0

    online = open_online(shard, Path("data/tokenizers"), cache, 0.5)

    def tokenized_online() -> tuple[int, int]:
        pairs = online["train"]
        n = min(len(pairs), 100)
        return n, sum(len(pairs[i]) for i in range(n))

    config = DataConfig(seq_len=SEQ_LEN, batch_size=BATCH)
    kinds = {
        "token arrays, pairs and text": config,
        "token arrays, packed into 1,024 tokens": replace(config, seq_len=1024, pack="documents"),
        "the dial, with exact log-probabilities": replace(config, mix={"dial": 1.0}, seq_len=96),
    }
    job = Job("pair", Path("data/tokenizers"), cache / "tokens", 0.01, "crop", 2**26, None)
    encoder = Encoder(job)

    def tokenized() -> tuple[int, int]:
        record = encoder.shard(Shard("00000", Path(shard)), lambda *_: None)
        return record["samples"], 0

    ways: dict[str, Callable[[], tuple[int, int]]] = {
        "plain WebDataset loop, images decoded": webdataset,
        "shards by member offset, images decoded": by_offset,
        "shards to token arrays (mmqk.data.tokenize, one worker)": tokenized,
        "shards by member offset, tokenized while reading": tokenized_online,
    }
    for name, each in kinds.items():
        data = TokenDataModule(each, seed=0)
        data.setup()
        ways[name] = batches(data)
    dial = Dial(DialConfig())
    step = iter(range(10**9))

    def documents() -> tuple[int, int]:
        ids = dial.documents(0, next(step) * 16384, 16384)
        return len(ids), ids.size

    ways["the dial alone, documents"] = documents
    return ways


def batches(data: TokenDataModule) -> Callable[[], tuple[int, int]]:
    """Batches of a run as a loader worker makes them, always further on in its order."""
    dataset = MicroBatches(data.order, BATCH, 1, 0, 1, steps=10**9)
    step = iter(range(10**9))

    def read() -> tuple[int, int]:
        rows = tokens = 0
        for _ in range(BATCHES):
            batch = dataset[next(step)]
            rows += len(batch.ids_BT)
            tokens += int(batch.valid_BT.sum())
        return rows, tokens

    return read


if __name__ == "__main__":
    sys.exit(main())
