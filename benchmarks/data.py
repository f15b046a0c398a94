"""Measures how fast data is read, without a model, relative to a plain WebDataset loop.

All candidates but the dial read the same pairs, which are shipped with mmqk. A sample is an image and its caption.
Token arrays and the dial produce sequences, so the table also has their tokens per second.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import streams
from benchmarks.harness import Candidate, Context, Row, Unit, compare, seconds_of
from benchmarks.others import needs
from benchmarks.setups import toy
from mmqk.data.batch import TokenBatch
from mmqk.data.config import DataConfig, DialConfig
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.dial import Dial
from mmqk.data.loader import MicroBatches, PositionedLoader, StreamLoader
from mmqk.data.shards.files import index_tar
from mmqk.data.shards.images import load_image
from mmqk.data.shards.manifest import checked_shards
from mmqk.data.shards.read import Sample
from mmqk.data.shards.samples import pair_of
from mmqk.data.stream import Stream
from mmqk.data.tokens.encode import TokenizeJob

PLAIN = "plain WebDataset loop, images decoded"
BATCHES, BATCH, SEQ_LEN = 100, 32, 128
Work = tuple[int, int]  # samples, tokens
Make = Callable[[], Callable[[], Work]]


def units(context: Context) -> list[Unit]:
    """Return the units of this table."""
    if context.peers:
        return [Unit("data", "peers", 1200, streams.measure)]
    return [
        Unit("data", "shipped-pairs", 60, _measure),
        Unit("data", "streams", 60, _streams),
        Unit("data", "first-batch", 30, _first_batch),
    ]


def _streams(context: Context, steps: int = 24) -> dict[str, Any]:
    """Pairs that are decoded and tokenized while they are read, against WebDataset's loop with the same work."""
    needs("webdataset")
    import webdataset as wds

    def timed(batches: Iterator[Any]) -> Callable[[int], float]:
        def take(n: int) -> float:
            for _ in range(6):  # what workers have prepared while another row was timed
                next(batches)
            return seconds_of(lambda: [next(batches) for _ in range(steps)], n, "cpu")

        return take

    config = _shards_of(toy(context).data)
    shards = [str(path) for path, _ in checked_shards(config.pairs, "train")]

    def plain(workers: int) -> Callable[[], Callable[[int], float]]:
        def open_loader() -> Callable[[int], float]:
            stream = Stream("pair", config.pairs, Path(config.tokenizers), None)

            def encoded(sample: dict[str, Any]) -> np.ndarray:
                fields = {name: sample[name] for name in ("webp", "json")}
                return stream.encode(Sample(sample["__key__"], 0, fields))

            data = wds.WebDataset(shards, shardshuffle=False, nodesplitter=None).repeat().shuffle(32).map(encoded)
            batches = data.batched(BATCH, collation_fn=list)
            return timed(iter(wds.WebLoader(batches, batch_size=None, num_workers=workers)))

        return open_loader

    def streamed(workers: int) -> Callable[[], Callable[[int], float]]:
        def open_loader() -> Callable[[int], float]:
            return timed(iter(_loader(config, workers)))

        return open_loader

    base = "WebDataset and WebLoader, 1 worker"
    made = {base: plain(1), "WebDataset and WebLoader, 2 workers": plain(2)}
    made |= {f"data.read shards, {n} worker{'s' * (n > 1)}": streamed(n) for n in (1, 2)}
    candidates = [Candidate(name, make, memory=False) for name, make in made.items()]
    rows = compare(candidates, replace(context, device="cpu"), repeat=1, rounds=5)
    for row in rows:
        row["work"] = {"samples": steps * BATCH}
    work = f"{steps * BATCH} pairs of {config.pairs} decoded and tokenized"
    return {"title": work, "facts": {"shards": len(shards)}, "base": base, "rows": rows}


def _first_batch(context: Context) -> dict[str, Any]:
    """Seconds from nothing to the first batch, with 20 and with 400 shards of two pairs."""
    config = _shards_of(toy(context).data)
    source = index_tar(checked_shards(config.pairs, "train")[0][0])
    with tempfile.TemporaryDirectory() as folder:
        for n in (20, 400):
            (Path(folder) / str(n)).mkdir()
            for k in range(n):
                with tarfile.open(Path(folder) / str(n) / f"{k:05d}.tar", "w") as tar:
                    for j in (2 * k, 2 * k + 1):
                        for field, content in source.read(j % len(source)).items():
                            member = tarfile.TarInfo(f"{k}-{j}.{field}")
                            member.size = len(content)
                            tar.addfile(member, io.BytesIO(content))

        def first(n: int) -> Callable[[], Callable[[int], float]]:
            pairs = replace(config, pairs=f"{folder}/{n}/*.tar", val_sequences=2)
            return lambda: lambda times: seconds_of(lambda: next(iter(_loader(pairs, 0))), times, "cpu")

        candidates = [Candidate(f"{n} shards", first(n), memory=False) for n in (20, 400)]
        rows = compare(candidates, replace(context, device="cpu"), repeat=1, rounds=5)
    for row in rows:
        row["work"] = {"samples": BATCH}
    return {"title": "time to the first batch", "facts": {}, "base": "20 shards", "rows": rows}


def _shards_of(config: DataConfig) -> DataConfig:
    return replace(config, read="shards", mix={"pair": 1.0}, seq_len=SEQ_LEN, batch_size=BATCH, val_sequences=8)


def _loader(config: DataConfig, workers: int) -> StreamLoader:
    """Return the loader of a run of one process that reads shards."""
    data = TokenDataModule(config, seed=0)
    data.setup()
    batches = MicroBatches(data.order, config.batch_size, 1, 0, 1, 10**9)
    return StreamLoader(batches, data.rows, 0, "", workers, torch.device("cpu"))


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


def decoded_by_webdataset(shard: str) -> Callable[[], Work]:
    """Return a function that decodes all images of a shard with WebDataset."""
    needs("webdataset")
    import webdataset as wds

    def read() -> Work:
        count = 0
        for sample in wds.WebDataset([shard], shardshuffle=False).decode("rgb8"):
            assert sample["webp"].shape == (64, 64, 3) and json.dumps(sample["json"])
            count += 1
        return count, 0

    return read


def decoded_by_offset(shard: str) -> Work:
    """Decode all images of a shard, which are found by the offsets of its members."""
    index = index_tar(shard)
    for _, sample in index:
        image, _ = pair_of(sample)
        assert np.asarray(load_image(image, 64)).shape == (64, 64, 3)
    return len(index), 0


def candidates_of(shard: str, config: DataConfig, cache: Path, batches: int = BATCHES) -> dict[str, Make]:
    """Return the candidates by name. A candidate returns a function that does the work once and returns (samples,
    tokens)."""

    def tokenized() -> Callable[[], Work]:
        job = TokenizeJob("pair", Path(config.tokenizers), cache / "tokens", 0.01, "crop", 2**26, None)
        return lambda: (job.shard("00000", Path(shard))["samples"], 0)

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
        PLAIN: lambda: decoded_by_webdataset(shard),
        "shards by member offset, images decoded": lambda: lambda: decoded_by_offset(shard),
        "shards to token arrays (mmqk data tokenize, one worker)": tokenized,
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
