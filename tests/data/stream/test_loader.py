"""Batches of streams: the same for any number of workers and ranks, and after a resume."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmqk.data.config import DataConfig
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.loader import PositionedLoader
from mmqk.store import UserError
from tests.data.tars import encoded, write_samples

STEPS, BATCH = 14, 4


def image_of(n: int) -> bytes:
    pixels = np.random.default_rng(n).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels).resize((64, 64), 0), "PNG")


def write_pairs(folder, shards=6, samples=7, broken=()):
    """Write shards of pairs; those with the numbers ``broken`` have an image that cannot be decoded."""
    for s in range(shards):
        of_shard = range(s * samples, (s + 1) * samples)
        files = {n: image_of(n)[: 60 if n in broken else None] for n in of_shard}
        write_samples(folder / f"{s:05d}.tar", [(f"k{n}", {"png": f, "txt": b"pair %d" % n}) for n, f in files.items()])
    return str(folder / "*.tar")


@pytest.fixture(scope="module")
def pattern(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def loader_of(tiny_data, pattern, rank=0, world=1, accumulate=1, seed=0, **fields):
    folders = {name: str(tiny_data / name) for name in ("text", "tokenizers", "cache")}
    given = {**folders, "mix": {"pair": 2.0, "text": 1.0}, "seq_len": 120, "workers": 0, **fields}
    data = TokenDataModule(DataConfig(pairs=pattern, read="shards", batch_size=BATCH, val_sequences=4, **given), seed)
    data.setup()
    data.trainer = SimpleNamespace(
        accumulate_grad_batches=accumulate, world_size=world, max_steps=STEPS, limit_train_batches=1.0,
        global_rank=rank, strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    loader = data.train_dataloader()
    assert isinstance(loader, PositionedLoader) and data.rows
    return loader


def take(loader, n):
    """Return the next n micro-batches as arrays, and the state after them."""
    batches, source = [], iter(loader)
    for _ in range(n):
        batches.append(next(source).ids_BT.numpy())
    return batches, loader.state_dict()


def resumed(state, n, *args, **kwargs):
    loader = loader_of(*args, **kwargs)
    loader.load_state_dict(torch.load(saved(state), weights_only=True))
    return take(loader, n)


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def whole(tiny_data, pattern):
    """The batches of a run: two epochs of 35 pairs are 105 sequences with text, so 14 steps of 4 pass one epoch."""
    return take(loader_of(tiny_data, pattern), STEPS)[0]


def test_a_second_run_has_the_same_batches_and_another_seed_others(tiny_data, pattern, whole):
    assert same(take(loader_of(tiny_data, pattern), STEPS)[0], whole)
    assert not same(take(loader_of(tiny_data, pattern, seed=1), 3)[0], whole[:3])


def test_resumes_repeat_no_batch_and_lack_none(tiny_data, pattern, whole):
    first, state = take(loader_of(tiny_data, pattern), 4)
    second, later = resumed(state, 3, tiny_data, pattern)
    third, _ = resumed(later, STEPS - 7, tiny_data, pattern)
    assert same([*first, *second, *third], whole)
    # The control: without the cursors, or with those of an earlier step, batches differ.
    for streams in ({**state["streams"], "cursors": state["streams"]["cursors"][:0]}, state["streams"]):
        wrong, _ = resumed({**later, "streams": streams}, 3, tiny_data, pattern)
        assert not same(wrong, whole[7:10])


def test_what_workers_read_ahead_is_not_in_the_state(tiny_data, pattern, whole):
    for workers in (2, 3):
        first, state = take(loader_of(tiny_data, pattern, workers=workers), 5)
        rest, _ = resumed(state, STEPS - 5, tiny_data, pattern, workers=4)
        alone, _ = resumed(state, STEPS - 5, tiny_data, pattern)
        assert same([*first, *rest], whole) and same(alone, rest)
    assert len(saved(state).getvalue()) < 6000


def test_ranks_take_over_from_each_other(tiny_data, tmp_path, monkeypatch):
    from mmqk.data import loader as module

    def ranks(state, n, world):
        """Return whole batches from ``world`` ranks in turn, and their merged state."""
        batches, states = [], []

        def gathered(own):
            states.append(own)
            return states

        monkeypatch.setattr(module, "gathered", gathered)
        for rank in range(world):
            loader = loader_of(tiny_data, pattern, rank, world, accumulate=2)
            if state is not None:
                loader.load_state_dict({**state})
            own, after = take(loader, 2 * n)
            batches.append(own)
        size = BATCH // 2 // world
        assert all(len(b) == size for own in batches for b in own)
        steps = [np.concatenate([own[2 * s + m] for m in range(2) for own in batches]) for s in range(n)]
        return steps, after

    pattern = write_pairs(tmp_path, broken=range(1, 42, 7))  # one of each shard
    whole, end = take(loader_of(tiny_data, pattern), STEPS)
    one, state = ranks(None, 3, 1)
    two, state = ranks(state, 4, 2)
    again, state = ranks(state, STEPS - 7, 2)
    assert same([*one, *two, *again], whole)
    assert all(state["streams"][name] == end["streams"][name] for name in ("skipped", "counts"))


def test_an_epoch_has_every_pair_once_and_a_resume_at_its_end_is_exact(tiny_data, pattern):
    fields = {"mix": {"pair": 1.0}, "image_first_prob": 0.0}
    # 35 or 28 training pairs; with 4 lanes no step ends the epoch of all of them, so ask the lanes.
    loader = loader_of(tiny_data, pattern, **fields)
    rows, cursors = {}, {}
    for batch in loader:
        for lane, ids in enumerate(batch.ids_BT.numpy()):
            rows.setdefault(lane, []).append(ids)
        for (_, lane), cursor in loader.cursors.items():
            cursors.setdefault(lane, []).append(cursor)
    first = [ids.tobytes() for lane in rows for ids, c in zip(rows[lane], [None, *cursors[lane]], strict=False)
             if c is None or (c.epoch == 0 and not at_end(loader, lane, c))]  # fmt: skip
    streams = next(iter(loader.rows.values())).stream
    assert len(set(first)) == len(first) == 7 * len(streams.train)
    # The control: two epochs have every pair twice.
    assert len({ids.tobytes() for lane in rows for ids in rows[lane]}) < sum(map(len, rows.values()))
    ends = [i + 1 for i, c in enumerate(cursors[0]) if at_end(loader, 0, c) and i + 1 < STEPS]
    assert ends
    for end in ends:
        _, state = take(loader_of(tiny_data, pattern, **fields), end)
        rest, _ = resumed(state, STEPS - end, tiny_data, pattern, **fields)
        assert same([batch[0] for batch in rest], rows[0][end:])


def at_end(loader, lane, cursor):
    """Return whether a cursor stands behind the last sample of an epoch."""
    from mmqk.data.order import STREAMS
    from mmqk.data.stream import Account

    stream = loader.rows["pair"].stream
    opened = stream.lane(Account(), lane, loader.dataset.batch_size, (loader.seed, STREAMS["pair"]), cursor)
    opened.document()
    return opened.cursor.epoch > cursor.epoch


def test_a_broken_sample_is_skipped_once_whatever_resumes(tiny_data, tmp_path):
    pattern = write_pairs(tmp_path, broken=range(1, 42, 7))  # one of each shard
    whole, end = take(loader_of(tiny_data, pattern), 6)
    first, state = take(loader_of(tiny_data, pattern, workers=2), 3)
    rest, both = resumed(state, 3, tiny_data, pattern)
    assert same([*first, *rest], whole)
    assert all(end["streams"][name] == both["streams"][name] for name in ("skipped", "counts"))
    assert end["streams"]["counts"]["image cannot be decoded"] == len(end["streams"]["skipped"]) > 2
    # The control: the run without broken samples has other batches.
    assert not same(take(loader_of(tiny_data, write_pairs(tmp_path / "good")), 6)[0], whole)


def test_other_shards_or_another_seed_are_refused(tiny_data, pattern, tmp_path):
    _, state = take(loader_of(tiny_data, pattern), 2)
    other = write_pairs(tmp_path, shards=3)
    for argv, fields in (((tiny_data, other), {}), ((tiny_data, pattern), {"seed": 1})):
        with pytest.raises(UserError, match="other shards or another seed"):
            resumed(state, 1, *argv, **fields)
    assert resumed(state, 1, tiny_data, pattern)[0]


def test_every_kind_and_packing_is_a_stream(tiny_data, pattern, tmp_path):
    (tmp_path / "text").mkdir()
    for f in range(3):
        lines = [json.dumps({"text": f"document {f} {n} " + "word " * (3 + n)}) for n in range(9)]
        (tmp_path / f"text/{f}.jsonl").write_text("\n".join(lines) + "\n")
        lists = {"images": [None, "0.png", None], "texts": ["a long tale " * 9, None, "and its end"]}
        samples = [(f"d{f}-{n}", {"json": json.dumps(lists).encode(), "0.png": image_of(9 * f + n)}) for n in range(9)]
        write_samples(tmp_path / f"docs/{f}.tar", samples)
    text, docs = str(tmp_path / "text/*.jsonl"), str(tmp_path / "docs/*.tar")
    packed = {"pack": "documents", "seq_len": 300}
    for fields in (
        {"mix": {"pair": 1.0, "image": 1.0}}, {**packed, "mix": {"pair": 1.0}},
        {"mix": {"text": 1.0}, "text": text}, {**packed, "mix": {"text": 1.0}, "text": text},
        {"mix": {"interleaved": 1.0}, "interleaved": docs},
        {**packed, "mix": {"interleaved": 1.0}, "interleaved": docs},
    ):  # fmt: skip
        batches = list(loader_of(tiny_data, pattern, **fields))
        whole = [b.ids_BT.numpy() for b in batches]
        assert len({row.tobytes() for ids in whole for row in ids}) > 10
        first, state = take(loader_of(tiny_data, pattern, workers=2, **fields), 5)
        assert same([*first, *resumed(state, STEPS - 5, tiny_data, pattern, **fields)[0]], whole), fields
        # A packed row has several documents, all of them whole or pieces.
        if "pack" in fields:
            documents = np.concatenate([b.document_BT.numpy().max(1) + 1 for b in batches])
            assert documents.mean() > 1.5 and len({len(b.ids_BT) for b in batches}) == 1
        else:
            assert all(b.document_BT is None for b in batches)
