"""Check that pairs read from shards during training equal the documents that were tokenized before."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch

from mmqk.data.config import DataConfig, data_identity
from mmqk.data.datamodule import TokenDataModule
from mmqk.data.shards.archives import index_tar
from mmqk.data.shards.manifest import split_of
from mmqk.data.shards.samples import document_of
from mmqk.data.tokens.cache import open_source
from mmqk.data.tokens.online import online_hash, open_online
from mmqk.store import UserError
from tests.data.tars import write_samples


def count_walks(monkeypatch):
    from mmqk.data.tokens import online

    walks, walk = [], online.index_tar
    monkeypatch.setattr(online, "index_tar", lambda path: walks.append(path) or walk(path))
    return walks


def test_documents_are_those_of_the_cache(tiny_data, tmp_path):
    tokenizers = tiny_data / "tokenizers"
    online = open_online(str(tiny_data / "pairs"), tokenizers, tmp_path, 0.5)
    cached = open_source("pair", tiny_data / "pairs", tokenizers, tiny_data / "cache")
    for split in ("train", "val"):
        assert len(online[split]) == len(cached[split]) and online[split].image_tokens == cached[split].image_tokens
        # By rounding, an image can get other codes in a batch than alone. Here all codes are equal.
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


def test_an_image_lies_in_one_split_that_of_the_tokenizing_program(tiny_data, tmp_path):
    # The split depends only on the bytes of the image file, so this test needs no real images. Each image file
    # occurs under two keys in each of two shards. If a sample has a webp and a jpg, the webp is its image file.
    def sample(n):
        return {"jpg": b"%d" % n, "txt": b"a", **({"webp": b"w%d" % n} if n % 2 else {})}

    paths = [
        write_samples(tmp_path / f"{t}.tar", [(f"{t}-{copy}-{n}", sample(n)) for copy in "ab" for n in range(40)])
        for t in "xy"
    ]
    found = open_online(str(tmp_path / "{x,y}.tar"), tiny_data / "tokenizers", tmp_path, 0.3)
    split_by_key = {store.shards[s].keys[i]: split for split, store in found.items() for s, i in store.samples_N2}
    expected = {key: split_of(document_of(sample, "pair")[0], 0.3) for path in paths for key, sample in index_tar(path)}
    assert split_by_key == expected and 0 < len(found["val"]) < len(found["train"])
    by_image = [{split_by_key[f"{t}-{copy}-{n}"] for t in "xy" for copy in "ab"} for n in range(40)]
    assert all(len(splits) == 1 for splits in by_image)


def test_shards_are_those_of_the_manifest(tiny_data, tmp_path, monkeypatch):
    from mmqk.data.shards import manifest

    hashed, sha256_file = [], manifest.sha256_file
    monkeypatch.setattr(manifest, "sha256_file", lambda path: hashed.append(path.name) or sha256_file(path))
    walks = count_walks(monkeypatch)
    pairs = shutil.copytree(tiny_data / "pairs", tmp_path / "pairs")
    argv = (str(pairs), tiny_data / "tokenizers", tmp_path / "cache", 0.2)
    # For a file pattern, the shards are indexed without a comparison with the manifest.
    open_online(str(pairs / "train-00000.tar"), *argv[1:])
    assert not hashed
    assert [len(s) for s in open_online(*argv).values()] == [40, 12]
    open_online(*argv)
    assert len(hashed) == len(walks) == 3
    # Put the first shard in the place of the second.
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
    with pytest.raises(UserError, match=r"val-00000\.tar has 12 samples, but the manifest lists 13"):
        open_online(*argv)


def test_identity_of_a_pattern_is_what_its_shards_hold(tmp_path):
    def digest(pattern="a/x.tar", cache="cache"):
        return online_hash(str(tmp_path / pattern), tmp_path / cache)

    def write(name, key=b"k", image=b"image", text=b"text"):
        return write_samples(tmp_path / name, [(key.decode(), {"webp": image, "txt": text})])

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


def test_a_run_reads_shards_with_workers_as_without(tiny_data, tmp_path):
    fields = {name: str(tiny_data / name) for name in ("text", "tokenizers")}
    config = DataConfig(
        pairs=str(tiny_data / "pairs/train-*.tar"), read="shards", val_fraction=0.3, cache=str(tmp_path), **fields,
        seq_len=88, batch_size=4, val_sequences=8,
    )  # fmt: skip
    assert (
        data_identity(config)["pairs"] != data_identity(DataConfig(pairs=str(tiny_data / "pairs"), **fields))["pairs"]
    )
    data = TokenDataModule(config, seed=0)
    data.setup()
    from mmqk.data.datamodule import MicroBatches, PositionedLoader

    batches = MicroBatches(data.order, 4, 1, 0, 1, steps=3)
    alone, dealt = ([b.ids_BT for b in PositionedLoader(batches, n, torch.device("cpu"))] for n in (0, 2))
    assert torch.equal(torch.cat(alone), torch.cat(dealt))


def tiny_shard(tiny_data, path, n=40, broken=()):
    """Write a shard of n samples with different images; the images at the indices ``broken`` are truncated."""
    shards = [index_tar(tiny_data / f"pairs/train-0000{s}.tar") for s in (0, 1)]
    images = [shard.read(i)["webp"] for shard in shards for i in range(len(shard))]
    files = [images[i][: 40 if i in broken else None] for i in range(n)]
    return write_samples(path, [(f"k{i}", {"webp": f, "txt": b"a red square"}) for i, f in enumerate(files)])


def both_splits(path, tokenizers, cache, val_fraction=1e-9):
    return open_online(str(path), tokenizers, cache, val_fraction)


def test_a_sample_that_cannot_be_used_is_skipped_and_named(tiny_data, tmp_path, capsys):
    path = tiny_shard(tiny_data, tmp_path / "a.tar", 20, broken=(1, 2, 19))
    # At most a tenth of the 20 samples may be unusable. Only the last read reaches the third unusable sample.
    found = both_splits(path, tiny_data / "tokenizers", tmp_path)["train"]
    # An unusable sample is replaced by the next usable one, also when it is read again.
    assert [found[1].tolist(), found[1].tolist()] == [found[3].tolist()] * 2
    assert found.skipped == dict.fromkeys((f"sample k{i} of shard {path}" for i in (1, 2)), "image cannot be decoded")
    err = capsys.readouterr().err
    assert err.count("is skipped (image cannot be decoded)") == 2 and f"sample k2 of shard {path}" in err
    with pytest.raises(UserError, match=r"3 of the 4 samples read .* 10% .*sample k19 .*data\.tokenize"):
        found[19]
    whole = both_splits(tiny_shard(tiny_data, tmp_path / "b.tar"), tiny_data / "tokenizers", tmp_path)["train"]
    assert len({tuple(whole[i]) for i in range(40)}) > 10
    assert not whole.skipped and not capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_where_samples_cannot_be_used(tiny_data, tiny_args, tmp_path, capfd, workers):
    from mmqk.store import cli_main, read_status
    from mmqk.train import main as train

    def run(name, broken, steps=12):
        path = tiny_shard(tiny_data, tmp_path / f"{name}.tar", broken=broken)
        argv = [
            *tiny_args, "--data.read=shards", f"--data.pairs={path}", "--data.val_fraction=0.3",
            f"--out={tmp_path / name}",
            f"--data.cache={tmp_path / 'cache'}", f"--data.workers={workers}", "--data.val_sequences=4",
            f"--trainer.max_steps={steps}", f"--data.text={tiny_data / 'text'}",
        ]  # fmt: skip
        return cli_main(train)(argv), capfd.readouterr().err

    code, err = run("some", (0, 4, 30))
    assert code == 0 and read_status(tmp_path / "some").status == "completed"
    assert "Traceback" not in err and "3 samples were skipped" in err
    named = json.loads((tmp_path / "some/skipped.json").read_text())
    assert sorted(name.split()[1] for name in named) == ["k0", "k30", "k4"]
    code, err = run("many", range(0, 40, 2))
    assert code == 2 and "more than 10%" in err and "Traceback" not in err
    code, err = run("none", ())
    assert code == 0 and "skipped" not in err and not (tmp_path / "none/skipped.json").exists()


def test_a_damaged_index_is_made_again(tiny_data, tmp_path):
    argv = (str(tiny_data / "pairs/train-00000.tar"), tiny_data / "tokenizers", tmp_path, 0.3)
    expected = open_online(*argv)["val"].samples_N2
    (kept,) = (tmp_path / "index").iterdir()
    whole = kept.read_bytes()
    turned = bytearray(whole)
    turned[len(whole) // 3] ^= 255
    # A flag or a compression method that zipfile does not know raises a RuntimeError.
    method = bytearray(whole)
    method[whole.index(b"PK\x01\x02") + 10] = 77
    earlier = io.BytesIO()  # a file of an earlier version, which had an array of the keys
    with np.load(kept) as arrays:
        arrays_of_both = {name: array for name, array in arrays.items() if name != "about"}
    np.savez(earlier, keys_json=np.zeros(2, dtype=np.uint8), **arrays_of_both)
    parts = (whole[: len(whole) // 2], bytes(turned), bytes(method), earlier.getvalue())
    for damaged in (*parts, b"", b"PK\x03\x04", b"no zip"):
        kept.write_bytes(damaged)
        assert (open_online(*argv)["val"].samples_N2 == expected).all()
        assert kept.read_bytes() != damaged and list(kept.parent.iterdir()) == [kept]
