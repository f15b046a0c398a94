"""Readers of WebDataset tars, each built as the documentation of its library builds it.

Every reader decodes each image to an RGB array and delivers batches of keys. `benchmarks.streams` compares them.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmqk.data.loader import MicroBatches, StreamLoader
from mmqk.data.shards.images import load_image
from mmqk.data.shards.manifest import stream_hash
from mmqk.data.shards.read import Sample
from mmqk.data.shards.samples import pair_of
from mmqk.data.stream import Lane, LaneRows, Stream

SIZE = 64  # of an image, in pixels
BUFFER = 256  # samples of a shuffle buffer: what the windows of eight lanes of mmqk hold
SEED = 0
Batch = list[str]


@dataclass(frozen=True)
class Setup:
    """What a reader is built for.

    Attributes:
        folder: has the folder ``tars`` and, after `prepare`, copies in the format of a library.
        samples: number of samples in the tars.
        left: samples until the end of the epoch, for a reader that has no epochs.
        batch: samples in a batch of one rank.
        workers: loader processes.
        rank, world: number of this process, and of all.
        skip: whether to use the documented option that skips samples that cannot be decoded.
    """

    folder: str
    samples: int
    left: int
    batch: int
    workers: int = 0
    rank: int = 0
    world: int = 1
    skip: bool = False

    @property
    def tars(self) -> list[str]:
        """Paths of the tars."""
        return sorted(map(str, (Path(self.folder) / "tars").glob("*.tar")))


class Reader:
    """A reader at the beginning, or where it was when the states were saved.

    Args:
        setup: what it is built for.
        states: the states of all ranks, in their order; empty at the beginning.

    Attributes:
        of_rank: whether a resume with another number of ranks needs the same batch in each rank, not in all together.
    """

    of_rank = False
    loader: Any

    def __init__(self, setup: Setup, states: Sequence[Any] = ()) -> None:
        self.setup = setup

    @staticmethod
    def prepare(folder: Path) -> None:
        """Write what the library needs beside the tars."""

    def epoch(self) -> Iterator[Batch]:
        """Return the batches until the end of the epoch."""
        return iter(self.loader)

    def state(self) -> Any:
        """Return the state after the last batch; all ranks call this function."""
        return self.loader.state_dict()


class Mmqk(Reader):
    """mmqk's loader of ``data.read shards``. A decoded image takes the place of its tokens, a key that of a row."""

    def __init__(self, setup: Setup, states: Sequence[Any] = ()) -> None:
        super().__init__(setup, states)
        pattern = str(Path(setup.folder) / "tars" / "*.tar")
        source = _Images("pair", pattern, Path(), None)
        source.train = setup.tars  # all: no shard is held out
        order: Any = SimpleNamespace(
            mixture=SimpleNamespace(draw=lambda index: SimpleNamespace(slot="pair")),
            builder=SimpleNamespace(batch=lambda rows, targets, documents: _Keys(row.key for row in rows)),
        )
        rows = {"pair": _KeyRows(source, None, "pair", False)}  # type: ignore[arg-type]
        size = setup.batch * setup.world
        batches = MicroBatches(order, size, 1, setup.rank, setup.world, 10**9)
        self.loader = StreamLoader(batches, rows, SEED, stream_hash(pattern), setup.workers, torch.device("cpu"))
        if states:
            self.loader.load_state_dict(states[0])  # the same on every rank
        self.batches, self.left = iter(self.loader), setup.left

    def epoch(self) -> Iterator[Batch]:
        yield from islice(self.batches, self.left // (self.setup.batch * self.setup.world))
        self.left = self.setup.samples


class _Images(Stream):
    def encode(self, sample: Sample) -> np.ndarray:
        return np.asarray(load_image(pair_of(sample.fields)[0], SIZE))


class _KeyRows(LaneRows):
    def row(self, lane: Lane, slot: str) -> Any:
        lane.document()
        key = lane.where[1]
        lane.advance()
        return SimpleNamespace(key=key, targets=1)


class _Keys(list[str]):
    def to(self, device: Any, non_blocking: bool) -> _Keys:
        return self


class Webdataset(Reader):
    """WebDataset and WebLoader, as in its README; it has no state, so a resume begins the epoch again."""

    def __init__(self, setup: Setup, states: Sequence[Any] = ()) -> None:
        super().__init__(setup, states)
        import webdataset as wds

        handler = wds.warn_and_continue if setup.skip else wds.reraise_exception
        data = wds.WebDataset(setup.tars, shardshuffle=100, nodesplitter=wds.split_by_node).shuffle(BUFFER)
        data = data.decode("rgb8", handler=handler).map(_key).batched(setup.batch, collation_fn=list)
        self.loader = wds.WebLoader(data, batch_size=None, num_workers=setup.workers)

    def state(self) -> Any:
        return None


class Torchdata(Reader):
    """StatefulDataLoader over a WebDataset with the deterministic shuffles. The dataset has no state of its own, so
    the loader reads the epoch again up to the position, as its documentation describes."""

    def __init__(self, setup: Setup, states: Sequence[Any] = ()) -> None:
        super().__init__(setup, states)
        import webdataset as wds
        from torchdata.stateful_dataloader import StatefulDataLoader

        handler = wds.warn_and_continue if setup.skip else wds.reraise_exception
        data = wds.WebDataset(
            setup.tars, shardshuffle=100, detshuffle=True, seed=SEED, nodesplitter=wds.split_by_node
        ).compose(wds.detshuffle(BUFFER, seed=SEED))
        data = data.decode("rgb8", handler=handler).map(_key)
        self.loader = StatefulDataLoader(data, batch_size=setup.batch, num_workers=setup.workers, collate_fn=list)
        if states:
            self.loader.load_state_dict(states[setup.rank])


class HuggingFace(Reader):
    """A streamed data set under StatefulDataLoader, shuffled with a buffer and `set_epoch`."""

    buffer = BUFFER

    def __init__(self, setup: Setup, states: Sequence[Any] = ()) -> None:
        super().__init__(setup, states)
        from datasets import load_dataset
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        cache = str(Path(setup.folder) / "cache")
        tars = {"train": setup.tars}
        data = load_dataset("webdataset", data_files=tars, split="train", streaming=True, cache_dir=cache)
        data = data.shuffle(seed=SEED, buffer_size=self.buffer)
        self.data = split_dataset_by_node(data, rank=setup.rank, world_size=setup.world)
        self.number = 0
        sizes = {"batch_size": setup.batch, "num_workers": setup.workers}
        self.loader = StatefulDataLoader(self.data, collate_fn=_decoded_keys, **sizes)
        if states:
            state = states[setup.rank]
            self.number = state["epoch"]
            self.data.set_epoch(self.number)
            self.loader.load_state_dict(state["loader"])

    def epoch(self) -> Iterator[Batch]:
        self.data.set_epoch(self.number)
        yield from self.loader
        self.number += 1

    def state(self) -> Any:
        return {"epoch": self.number, "loader": self.loader.state_dict()}


class Unbuffered(HuggingFace):
    """Without the buffer, whose samples a resume loses, as the documentation says: only shards are shuffled."""

    buffer = 1


class Energon(Reader):
    """Energon's savable loader over the tars, after ``energon prepare``; each rank saves its own state. States of
    another number of ranks go through ``energon checkpoint redist``."""

    of_rank = True

    def __init__(self, setup: Setup, states: Sequence[Any] = ()) -> None:
        super().__init__(setup, states)
        from megatron import energon

        class Encoder(energon.DefaultTaskEncoder):
            decoder = energon.SampleDecoder(image_decode="pilrgb")

            def encode_sample(self, sample: Any) -> Any:
                assert np.asarray(sample.image).shape == (SIZE, SIZE, 3)
                return sample

            def batch(self, samples: Any) -> Any:
                return {"keys": [sample.caption for sample in samples]}

        config = energon.WorkerConfig(rank=setup.rank, world_size=setup.world, num_workers=setup.workers)
        data = energon.get_train_dataset(
            Path(setup.folder) / "tars", worker_config=config, batch_size=setup.batch, shuffle_buffer_size=BUFFER,
            max_samples_per_sequence=100, task_encoder=Encoder(),
        )  # fmt: skip
        self.loader = energon.get_savable_loader(data)
        if states:
            states = self.redistributed(states) if len(states) != setup.world else states
            self.loader.restore_state_rank(states[setup.rank])
        self.batches: Iterator[Any] | None = None
        self.left = setup.left

    @staticmethod
    def prepare(folder: Path) -> None:
        options = [
            "--non-interactive",
            "--split-ratio",
            "1,0,0",
            "--sample-type",
            "CaptioningSample",
            "--num-workers",
            "1",
        ]
        fields = '{"image": "png", "caption": "txt"}'
        _energon("prepare", str(folder / "tars"), *options, "--field-map", fields)

    def redistributed(self, states: Sequence[Any]) -> list[Any]:
        """Return the states for the number of ranks of this reader."""
        before, after = (Path(self.setup.folder) / name for name in ("before", "after"))
        for path in (before, after):
            path.mkdir(exist_ok=True)
        for rank, state in enumerate(states):
            torch.save(state, before / f"rank{rank}.pt")
        files = [str(before / f"rank{rank}.pt") for rank in range(len(states))]
        _energon("checkpoint", "redist", "--new-world-size", str(self.setup.world), *files, str(after))
        return [torch.load(after / f"rank{rank}.pt", weights_only=False) for rank in range(self.setup.world)]

    def epoch(self) -> Iterator[Batch]:
        self.batches = self.batches or iter(self.loader)
        for batch in islice(self.batches, self.left // (self.setup.batch * self.setup.world)):
            yield batch["keys"]
        self.left = self.setup.samples

    def state(self) -> Any:
        return self.loader.save_state_rank()


class Mosaic(Reader):
    """StreamingDataset and StreamingDataLoader over a copy in MDS, one MDS shard for each tar."""

    def __init__(self, setup: Setup, states: Sequence[Any] = ()) -> None:
        super().__init__(setup, states)
        from streaming import StreamingDataLoader, StreamingDataset

        class Images(StreamingDataset):
            def __getitem__(self, at: int) -> str:
                sample = super().__getitem__(at)
                return decoded(sample["key"], sample["png"])

        copy = str(Path(setup.folder) / "mds")
        data = Images(local=copy, shuffle=True, shuffle_seed=SEED, batch_size=setup.batch)
        # The loader counts the samples of a batch in the first value of a dict.
        self.loader = StreamingDataLoader(
            data, batch_size=setup.batch, num_workers=setup.workers, collate_fn=lambda keys: {"keys": keys}
        )
        if states:
            self.loader.load_state_dict(states[0])  # rank zero saves the state of all

    @staticmethod
    def prepare(folder: Path) -> None:
        from streaming import MDSWriter
        from streaming.base.util import merge_index

        for tar in sorted((folder / "tars").glob("*.tar")):
            with MDSWriter(out=str(folder / "mds" / tar.stem), columns={"key": "str", "png": "bytes"}) as writer:
                for key, png in _members(tar):
                    writer.write({"key": key, "png": png})
        merge_index(str(folder / "mds"), keep_local=True)

    def epoch(self) -> Iterator[Batch]:
        for batch in self.loader:
            yield batch["keys"]


class LitData(Reader):
    """StreamingDataset and StreamingDataLoader over a copy of ``litdata.optimize``, one chunk for each 40 samples."""

    def __init__(self, setup: Setup, states: Sequence[Any] = ()) -> None:
        super().__init__(setup, states)
        from litdata import StreamingDataLoader, StreamingDataset

        copy = str(Path(setup.folder) / "chunks")
        data = StreamingDataset(copy, shuffle=True, seed=SEED, drop_last=True, transform=lambda pair: decoded(*pair))
        self.loader = StreamingDataLoader(data, batch_size=setup.batch, num_workers=setup.workers, collate_fn=list)
        if states:
            self.loader.load_state_dict(states[setup.rank] if len(states) == setup.world else states[0])

    @staticmethod
    def prepare(folder: Path) -> None:
        from litdata import optimize

        pairs = [pair for tar in sorted((folder / "tars").glob("*.tar")) for pair in _members(tar)]
        of_copy = {"output_dir": str(folder / "chunks"), "chunk_size": 40, "reorder_files": False}
        optimize(_unchanged, pairs, num_workers=1, start_method="fork", **of_copy)


READERS: dict[str, tuple[type[Reader], tuple[str, ...]]] = {  # the class, and the packages that it needs
    "mmqk": (Mmqk, ("mmqk",)),
    "webdataset": (Webdataset, ("webdataset",)),
    "torchdata": (Torchdata, ("torchdata", "webdataset")),
    "datasets": (HuggingFace, ("datasets", "torchdata")),
    "datasets, no buffer": (Unbuffered, ("datasets", "torchdata")),
    "energon": (Energon, ("megatron-energon",)),
    "mosaicml-streaming": (Mosaic, ("mosaicml-streaming",)),
    "litdata": (LitData, ("litdata",)),
}


def decoded(key: str, png: bytes) -> str:
    """Decode an image to an RGB array and return the key."""
    assert np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).shape == (SIZE, SIZE, 3)
    return key


def _key(sample: dict[str, Any]) -> str:
    assert sample["png"].shape == (SIZE, SIZE, 3)
    return sample["__key__"]


def _decoded_keys(samples: list[dict[str, Any]]) -> Batch:
    assert all(np.asarray(sample["png"].convert("RGB")).shape == (SIZE, SIZE, 3) for sample in samples)
    return [sample["__key__"] for sample in samples]


def _unchanged(pair: tuple[str, bytes]) -> tuple[str, bytes]:
    return pair


def _members(tar: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the key and the image of each sample of a tar."""
    with tarfile.open(tar) as file:
        for member in file:
            key, _, suffix = member.name.partition(".")
            content: Any = file.extractfile(member)
            if suffix == "png":
                yield key, content.read()


def _energon(*words: str) -> None:
    """Run energon's command line."""
    command = [sys.executable, "-m", "megatron.energon.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"energon {words[0]}: {done.stdout}{done.stderr}")
