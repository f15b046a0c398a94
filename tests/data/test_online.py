"""Pairs read from their shards while training: the same documents as those that were tokenized before."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile

import numpy as np
import pytest
import torch

from mmqk.data.cache import open_source
from mmqk.data.config import DataConfig, data_identity
from mmqk.data.module import TokenDataModule
from mmqk.data.online import online_hash, open_online
from mmqk.data.tars import index_tar
from mmqk.data.tokenize_worker import Job, _samples, split_of
from mmqk.store import UserError


def quiet(line: str) -> None:
    pass


def write_tar(path, samples):
    """Samples: key and content by field."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, fields in samples:
            for field, content in fields.items():
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def count_walks(monkeypatch):
    from mmqk.data import online

    walks, walk = [], online.index_tar
    monkeypatch.setattr(online, "index_tar", lambda path: walks.append(path) or walk(path))
    return walks


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
    walks = count_walks(monkeypatch)
    shard = tmp_path / "00000.tar"
    shard.write_bytes((tiny_data / "pairs/train-00000.tar").read_bytes())
    argv = (str(shard), tiny_data / "tokenizers", tmp_path / "cache", 0.2)
    first = open_online(*argv)
    again = pickle.loads(pickle.dumps(open_online(*argv)))
    assert len(walks) == 1 and (again["train"][3] == first["train"][3]).all()
    shard.write_bytes((tiny_data / "pairs/train-00001.tar").read_bytes())
    assert len(open_online(*argv)["train"]) < len(first["train"]) and len(walks) == 2


def test_a_larger_share_holds_out_the_same_and_more(tiny_data, tmp_path):
    pattern = str(tiny_data / "pairs/train-{00000..00001}.tar")
    some = open_online(pattern, tiny_data / "tokenizers", tmp_path, 0.3)
    more = open_online(pattern, tiny_data / "tokenizers", tmp_path, 0.6)
    keys = {
        n: {tuple(r) for r in split["val"].samples_N2.tolist()}
        for n, split in (("some", some), ("more", more))
    }
    assert keys["some"] < keys["more"] and len(some["train"]) + len(some["val"]) == 40


def test_an_image_lies_in_one_split_that_of_the_tokenizing_program(tiny_data, tmp_path):
    # Bytes need not be images to be dealt out. Each of them occurs under two keys of each of two shards;
    # webp is taken before jpg, and jpg alone where there is no webp.
    def sample(n):
        return {"jpg": b"%d" % n, "txt": b"a", **({"webp": b"w%d" % n} if n % 2 else {})}

    paths = [
        write_tar(tmp_path / f"{t}.tar", [(f"{t}-{copy}-{n}", sample(n)) for copy in "ab" for n in range(40)])
        for t in "xy"
    ]
    found = open_online(str(tmp_path / "{x,y}.tar"), tiny_data / "tokenizers", tmp_path, 0.3)
    split_by_key = {
        store.shards[s].keys[i]: split for split, store in found.items() for s, i in store.samples_N2
    }
    job = Job("pair", tiny_data / "tokenizers", tmp_path, 0.3, "crop", 2**26, None)
    expected = {key: split_of(make()[0], 0.3) for path in paths for key, make, _ in _samples(job, path)}
    assert split_by_key == expected and 0 < len(found["val"]) < len(found["train"])
    by_image = [{split_by_key[f"{t}-{copy}-{n}"] for t in "xy" for copy in "ab"} for n in range(40)]
    assert all(len(splits) == 1 for splits in by_image)


def test_a_sample_without_image_is_dealt_out_by_its_key(tiny_data, tmp_path):
    write_tar(tmp_path / "a.tar", [(f"k{n}", {"txt": b"a"}) for n in range(40)])
    val = open_online(str(tmp_path / "a.tar"), tiny_data / "tokenizers", tmp_path, 0.3)["val"]
    expected = [f"k{n}" for n in range(40) if split_of(b"k%d" % n, 0.3) == "val"]
    assert [val.shards[s].keys[i] for s, i in val.samples_N2] == expected != []


def test_shards_are_those_of_the_manifest(tiny_data, tmp_path, monkeypatch):
    from mmqk.data import manifest

    hashed, sha256_file = [], manifest.sha256_file
    monkeypatch.setattr(manifest, "sha256_file", lambda path: hashed.append(path.name) or sha256_file(path))
    walks = count_walks(monkeypatch)
    pairs = shutil.copytree(tiny_data / "pairs", tmp_path / "pairs")
    argv = (str(pairs), tiny_data / "tokenizers", tmp_path / "cache", 0.2)
    # An index that was made for a pattern was not compared with the manifest.
    open_online(str(pairs / "train-00000.tar"), *argv[1:])
    assert not hashed
    assert [len(s) for s in open_online(*argv).values()] == [40, 12]
    open_online(*argv)
    assert len(hashed) == len(walks) == 3
    # The other shard, in place of the one that the manifest means.
    shutil.copy(pairs / "train-00000.tar", pairs / "train-00001.tar")
    with pytest.raises(UserError, match=r"train-00001\.tar differs from its manifest"):
        open_online(*argv)
    (pairs / "train-00001.tar").unlink()
    with pytest.raises(UserError, match=r"train-00001\.tar is missing"):
        open_online(*argv)
    shutil.copy(tiny_data / "pairs/train-00001.tar", pairs)
    record = json.loads((pairs / "manifest.json").read_text())
    record["splits"]["val"][0]["samples"] = 13
    (pairs / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"val-00000\.tar holds 12 samples, but its manifest says 13"):
        open_online(*argv)


def test_identity_of_a_pattern_is_what_its_shards_hold(tmp_path):
    def digest(pattern="a/x.tar", cache="cache"):
        return online_hash(str(tmp_path / pattern), tmp_path / cache)

    def write(name, key=b"k", image=b"image", text=b"text"):
        return write_tar(tmp_path / name, [(key.decode(), {"webp": image, "txt": text})])

    path = write("a/x.tar")
    about, first = path.stat(), digest()
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 10**9))
    assert digest() == first == digest(cache="another")
    for n, change in enumerate(({"key": b"l"}, {"image": b"imagf"}, {"text": b"texu"})):
        write("a/x.tar", **change)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + (n + 2) * 10**9))
        assert path.stat().st_size == about.st_size and digest() != first
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    write("b/x.tar", image=b"imagg")
    both = [digest(p) for p in ("a/x.tar", "b/x.tar", "{a,b}/x.tar", "{b,a}/x.tar")]
    assert len(set(both)) == 4


def test_a_damaged_index_is_made_again(tiny_data, tmp_path):
    argv = (str(tiny_data / "pairs/train-00000.tar"), tiny_data / "tokenizers", tmp_path, 0.3)
    expected = open_online(*argv)["val"].samples_N2
    (kept,) = (tmp_path / "index").iterdir()
    whole = kept.read_bytes()
    turned = bytearray(whole)
    turned[len(whole) // 3] ^= 255
    # A flag or a method that zipfile does not know is a RuntimeError.
    method = bytearray(whole)
    method[whole.index(b"PK\x01\x02") + 10] = 77
    for damaged in (whole[: len(whole) // 2], bytes(turned), bytes(method), b"", b"PK\x03\x04", b"no zip"):
        kept.write_bytes(damaged)
        assert (open_online(*argv)["val"].samples_N2 == expected).all()
        assert kept.read_bytes() != damaged and list(kept.parent.iterdir()) == [kept]


def test_two_processes_can_keep_the_same_index(tiny_data, tmp_path, monkeypatch):
    argv = (str(tiny_data / "pairs/train-00000.tar"), tiny_data / "tokenizers", tmp_path, 0.3)
    written, savez = [], np.savez

    def meanwhile(path, **arrays):
        written.append(path)
        if len(written) == 1:
            open_online(*argv)  # the other process, from start to end
        savez(path, **arrays)

    monkeypatch.setattr(np, "savez", meanwhile)
    open_online(*argv)
    assert len(set(written)) == 2 and len(list((tmp_path / "index").iterdir())) == 1


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
    alone, dealt = ([b.ids_BT for b in PositionedLoader(batches, n, torch.device("cpu"))] for n in (0, 2))
    assert torch.equal(torch.cat(alone), torch.cat(dealt))


def test_a_sample_that_cannot_be_used_is_named(tiny_data, tmp_path):
    shard = index_tar(tiny_data / "pairs/train-00000.tar")
    images = [shard.read(i)["webp"][: 40 if i == 1 else None] for i in range(3)]
    write_tar(tmp_path / "a.tar", [(shard.keys[i], {"webp": images[i], "txt": b"a"}) for i in range(3)])
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
