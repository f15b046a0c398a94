"""Pairs read from their shards while training: the same documents as those that were tokenized before."""

from __future__ import annotations

import io
import pickle
import tarfile

import numpy as np
import pytest
import torch

from mmqk.data.cache import open_source
from mmqk.data.config import DataConfig, data_identity
from mmqk.data.module import TokenDataModule
from mmqk.data.online import open_online
from mmqk.data.tars import index_tar
from mmqk.store import UserError


def quiet(line: str) -> None:
    pass


def test_documents_are_those_of_the_cache(tiny_data, tmp_path):
    tokenizers = tiny_data / "tokenizers"
    online = open_online(str(tiny_data / "pairs"), tokenizers, tmp_path, 0.5)
    cached = open_source("pair", tiny_data / "pairs", tokenizers, tiny_data / "cache", quiet)
    for split in ("train", "val"):
        assert (
            len(online[split]) == len(cached[split])
            and online[split].image_tokens == cached[split].image_tokens
        )
        # One image or many at a time round differently: a code at a tie may differ, none did here.
        assert all((online[split][i] == cached[split][i]).all() for i in range(len(cached[split])))
    assert online["train"][0].tolist() != online["train"][1].tolist()


def test_an_index_is_kept_and_a_changed_shard_is_read_anew(tiny_data, tmp_path, monkeypatch):
    walks = []
    from mmqk.data import online

    walk = online.index_tar
    monkeypatch.setattr(online, "index_tar", lambda path: walks.append(path) or walk(path))
    shard = tmp_path / "00000.tar"
    shard.write_bytes((tiny_data / "pairs/train-00000.tar").read_bytes())
    argv = (str(shard), tiny_data / "tokenizers", tmp_path / "cache", 0.2)
    first = open_online(*argv)
    again = pickle.loads(pickle.dumps(open_online(*argv)))
    assert len(walks) == 1 and (again["train"][3] == first["train"][3]).all()
    shard.write_bytes((tiny_data / "pairs/train-00001.tar").read_bytes())
    assert len(open_online(*argv)["train"]) < len(first["train"]) and len(walks) == 2


def test_a_pattern_holds_out_by_key(tiny_data, tmp_path):
    pattern = str(tiny_data / "pairs/train-{00000..00001}.tar")
    some = open_online(pattern, tiny_data / "tokenizers", tmp_path, 0.3)
    more = open_online(pattern, tiny_data / "tokenizers", tmp_path, 0.6)
    keys = {
        n: {tuple(r) for r in split["val"].samples_N2.tolist()}
        for n, split in (("some", some), ("more", more))
    }
    assert keys["some"] < keys["more"] and len(some["train"]) + len(some["val"]) == 40


def test_a_run_reads_shards_with_workers_as_without(tiny_data, tmp_path):
    fields = {name: str(tiny_data / name) for name in ("text", "tokenizers")}
    config = DataConfig(
        pairs=str(tiny_data / "pairs/train-*.tar"), read="shards", val_share=0.3, cache=str(tmp_path), **fields,
        seq_len=88, batch_size=4, val_sequences=8,
    )  # fmt: skip
    assert (
        data_identity(config)["pairs"]
        != data_identity(DataConfig(pairs=str(tiny_data / "pairs"), **fields))["pairs"]
    )
    data = TokenDataModule(config, seed=0)
    data.setup()
    from mmqk.data.module import MicroBatches, PositionedLoader

    batches = MicroBatches(data.order, 4, 1, 0, 1, steps=3)
    alone, dealt = ([b.ids_BT for b in PositionedLoader(batches, n, pin_memory=False)] for n in (0, 2))
    assert torch.equal(torch.cat(alone), torch.cat(dealt))


def test_a_sample_that_cannot_be_used_is_named(tiny_data, tmp_path):
    shard = index_tar(tiny_data / "pairs/train-00000.tar")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i in range(3):
            image = shard.read(i)["webp"][: 40 if i == 1 else None]
            for name, content in ((f"{shard.keys[i]}.webp", image), (f"{shard.keys[i]}.txt", b"a")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    found = open_online(str(tmp_path / "a.tar"), tiny_data / "tokenizers", tmp_path, 1e-9)["train"]
    assert len(found[0]) == len(found[2])
    with pytest.raises(
        UserError, match=r"sample tiny-0001 of shard .*a\.tar cannot be used .*mmqk\.data\.tokenize"
    ):
        found[1]


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="knows no lengths"):
        DataConfig(read="shards", pack="documents")
    assert np.isfinite(DataConfig(read="shards").val_share)
