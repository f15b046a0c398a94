"""The training data of the tokenizers: images and captions of tars and folders, and documents."""

import gzip
import hashlib
import json
import lzma

import numpy as np
import pytest

from mmqk.data.shards.manifest import read_pairs, split_of
from mmqk.data.tokenizers.training_data import Selection, Source
from mmqk.store import UserError
from tests.data.tars import encoded, write_samples


def noise(number: int, width: int = 64, height: int = 64) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def plain(number: int) -> tuple[dict[str, bytes], bytes]:
    """Return a sample with a lossless image of 64 px, and the bytes of its image file."""
    file = encoded(noise(number), "png")
    return {"png": file, "txt": f"caption {number}".encode(), "json": b'{"width": 64}'}, file


def write_shards(folder, shards: int, samples: int) -> str:
    """Write shards of plain samples, in which sample k of shard s has image 1000 s + k; return their pattern."""
    folder.mkdir(exist_ok=True)
    for s in range(shards):
        content = {f"{s:05d}{k:04d}": plain(1000 * s + k)[0] for k in range(samples)}
        write_samples(folder / f"{s:05d}.tar", content.items())
    return str(folder / f"{{00000..{shards - 1:05d}}}.tar")


def held_out(file: bytes, share: float) -> bool:
    """Return whether a file is held out, computed without mmqk's code: whether the first 16 hex digits of its hash,
    as a number, are below ``share`` times 16^16."""
    return int(hashlib.sha256(file).hexdigest()[:16], 16) < share * 16**16


def rows(images) -> list[bytes]:
    return [image.permute(1, 2, 0).numpy().tobytes() for image in images]


def test_every_image_of_a_tar_is_in_its_split(tmp_path):
    pattern = write_shards(tmp_path / "s", 3, 8)
    numbers = [1000 * s + k for s in range(3) for k in range(8)]
    sides = {n: held_out(plain(n)[1], 0.5) for n in numbers}
    assert {split_of(plain(n)[1], 0.5) == "val" for n in numbers if sides[n]} == {True}
    assert {split_of(plain(n)[1], 0.5) == "val" for n in numbers if not sides[n]} == {False}
    images = Source([pattern], Selection(val_fraction=0.5)).images(64)
    assert rows(images.train_BCHW) == [noise(n).tobytes() for n in numbers if not sides[n]]
    assert sorted(rows(images.val_BCHW)) == sorted(noise(n).tobytes() for n in numbers if sides[n])
    assert images.summary == ""
    # the split depends on the image alone: it does not change with the order or the number of the shards
    backwards = Source([str(tmp_path / "s" / f"{s:05d}.tar") for s in (2, 0)], Selection(val_fraction=0.5)).images(64)
    assert set(rows(backwards.val_BCHW)) < set(rows(images.val_BCHW))
    # The control: a larger share holds out more images.
    other = Source([pattern], Selection(val_fraction=0.8)).images(64)
    assert len(other.val_BCHW) > len(images.val_BCHW)


def test_captions_of_tars_are_those_of_training_images(tmp_path):
    pattern = write_shards(tmp_path / "s", 2, 10)
    numbers = [1000 * s + k for s in range(2) for k in range(10)]
    captions, summary = Source([pattern], Selection(val_fraction=0.3)).captions()
    assert captions == [f"caption {n}" for n in numbers if not held_out(plain(n)[1], 0.3)]
    assert 0 < len(captions) < 20 and summary == ""
    few, summary = Source([pattern], Selection(val_fraction=0.3, captions=6)).captions()
    assert set(few) < set(captions) and summary == "6 of 20 samples read"
    with pytest.raises(UserError, match="has no captions"):
        Source([pattern], Selection(caption_field="title")).captions()


def test_interleaved_documents_give_an_image_each_and_all_their_texts(tmp_path):
    documents = {}
    for d in range(12):
        lists = {"images": ["a", None, "b"], "texts": [None, f"text {d}", None]}
        documents[f"{d}"] = {"json": json.dumps(lists).encode(), "0.png": plain(2 * d)[1]}
        documents[f"{d}"]["1.png"] = plain(2 * d + 1)[1]
    write_samples(tmp_path / "a.tar", documents.items())
    source = Source([str(tmp_path / "a.tar")], Selection(val_fraction=0.4))
    images = source.images(64)
    val = [d for d in range(12) if held_out(documents[f"{d}"]["json"], 0.4)]
    assert (len(images.train_BCHW), len(images.val_BCHW)) == (12 - len(val), len(val)) and 0 < len(val) < 12
    number = {noise(n).tobytes(): n for n in range(24)}
    taken = [number[row] for split in (images.train_BCHW, images.val_BCHW) for row in rows(split)]
    assert sorted(n // 2 for n in taken) == list(range(12)) and {n % 2 for n in taken} == {0, 1}
    assert sorted(number[row] // 2 for row in rows(images.val_BCHW)) == val
    assert source.captions()[0] == [f"text {d}" for d in range(12) if d not in val]


def test_a_folder_is_read_whole_and_in_order_or_spread(tiny_data):
    source = Source(tiny_data / "pairs")
    pairs = {split: list(read_pairs(tiny_data / "pairs", split)) for split in ("train", "val")}
    images = source.images(64)
    assert rows(images.train_BCHW) == [pair.image.tobytes() for pair in pairs["train"]]
    assert rows(images.val_BCHW) == [pair.image.tobytes() for pair in pairs["val"]]
    assert images.summary == "" and source.captions() == ([pair.caption for pair in pairs["train"]], "")
    few = Source(tiny_data / "pairs", Selection(images=8, captions=5))
    train = rows(few.images(64).train_BCHW)
    places = [[pair.image.tobytes() for pair in pairs["train"]].index(row) for row in train]
    assert len(train) == 8 and places == sorted(places) and [p // 5 for p in places] == list(range(8))
    assert few.images(64).summary == "16 of 52 samples read"
    assert len(few.captions()[0]) == 5 and few.captions()[1] == "5 of 40 samples read"


def test_documents_of_files_are_those_that_are_not_held_out(tmp_path):
    texts = [f"document {i} – naïve" for i in range(40)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(lines))
    expected = [text for text in texts if not held_out(text.encode(), 0.25)]
    assert 0 < len(expected) < 40
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.xz", "?.jsonl"):
        texts, summary = Source(str(tmp_path / name), Selection(val_fraction=0.25)).documents()
        assert (texts, summary) == (expected, "")
    assert Source("").documents() == ([], "")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines)[:-20])
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz is truncated"):
        Source(str(tmp_path / "cut.jsonl.gz")).documents()
