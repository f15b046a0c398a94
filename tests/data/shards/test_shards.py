"""Check the reading of shards: their content, and a message of one sentence for each kind of damage."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.build.write import write_documents, write_shard
from mmqk.data.shards import manifest as module
from mmqk.data.shards.manifest import FEW, SHARE, Manifest, default_share, load_manifest, read_pairs, read_text
from mmqk.store import UserError
from tests.data.tars import encoded


def samples(n: int) -> list[tuple[str, bytes, dict[str, Any]]]:
    pixels = [np.full((64, 64, 3), (i, 2 * i, 255 - i), np.uint8) for i in range(n)]
    files = [encoded(image, "WEBP", lossless=True) for image in pixels]
    return [(f"v-{i:04x}", file, {"caption": f"number {i}"}) for i, file in enumerate(files)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two train shards and a val shard, with their manifest."""
    train = tuple(write_shard(tmp_path / f"train-0000{i}.tar", samples(6)[3 * i : 3 * i + 3]) for i in (0, 1))
    val = (write_shard(tmp_path / "val-00000.tar", samples(8)[6:]),)
    module.write_manifest(tmp_path, Manifest({"train": train, "val": val}, {"name": "test"}))
    return tmp_path


def remanifest(folder: Path) -> None:
    """Update the hashes in the manifest, as a user does after changing the shards."""
    shards = load_manifest(folder).splits
    new = {
        split: tuple(module.Shard(s.file, s.samples, module.sha256_file(folder / s.file)) for s in those)
        for split, those in shards.items()
    }
    module.write_manifest(folder, Manifest(new, {}))


def test_pairs_come_back_in_order_with_their_pixels(folder: Path) -> None:
    pairs = list(read_pairs(folder, "train"))
    assert [p.key for p in pairs] == [f"v-{i:04x}" for i in range(6)]
    assert [p.caption for p in pairs] == [f"number {i}" for i in range(6)]
    for i, pair in enumerate(pairs):
        assert pair.image.mode == "RGB" and pair.image.size == (64, 64)
        assert pair.image.getpixel((5, 60)) == (i, 2 * i, 255 - i)
    assert [p.key for p in read_pairs(folder, "val")] == ["v-0006", "v-0007"]


def test_manifest_hash_follows_the_samples_only(folder: Path) -> None:
    before = module.manifest_hash(folder)
    assert len(before) == 10
    manifest = load_manifest(folder)
    module.write_manifest(folder, Manifest(manifest.splits, {"built_with": {"pillow": "0"}}))
    assert module.manifest_hash(folder) == before
    write_shard(folder / "train-00001.tar", samples(5)[3:])
    remanifest(folder)
    assert module.manifest_hash(folder) != before


def test_shard_that_differs_from_its_manifest(folder: Path) -> None:
    write_shard(folder / "train-00000.tar", samples(3)[::-1])
    with pytest.raises(UserError, match=r"train-00000\.tar differs from its manifest"):
        list(read_pairs(folder, "train"))


@pytest.fixture
def documents(tmp_path: Path) -> tuple[Path, list[str]]:
    texts = ["one\nand two", 'a "quoted" word', "naïve\u2028line", "x" * 5000]
    shard = write_documents(tmp_path / "train.jsonl.xz", [{"source": "s", "text": t} for t in texts])
    module.write_manifest(tmp_path, Manifest({"train": (shard,)}, {}))
    return tmp_path, texts


def test_documents_come_back(documents: tuple[Path, list[str]]) -> None:
    folder, texts = documents
    assert list(read_text(folder, "train")) == texts


def test_damaged_documents(documents: tuple[Path, list[str]]) -> None:
    folder, _ = documents
    file = folder / "train.jsonl.xz"
    whole = file.read_bytes()

    def message() -> str:
        with pytest.raises(UserError) as caught:
            list(read_text(folder, "train"))
        return str(caught.value)

    file.write_bytes(whole[:-20])
    assert "differs from its manifest" in message()
    remanifest(folder)
    assert "train.jsonl.xz is truncated" in message()
    file.write_bytes(lzma.compress(b'{"text": "a"}\n'))
    remanifest(folder)
    assert "has 1 documents, but the manifest lists 4" in message()
    file.write_bytes(whole)
    remanifest(folder)
    assert len(list(read_text(folder, "train"))) == 4
    file.unlink()
    assert "train.jsonl.xz is missing" in message()


@pytest.mark.parametrize(("samples", "held_out"), [(2, 1), (3, 1), (30, 10), (48, 16), (200, 16), (1000, 16)])
def test_a_batch_or_a_third_of_a_small_set_is_held_out(samples, held_out):
    for seed in range(20):
        fractions = np.random.default_rng(seed).random(samples)
        found = int((fractions < default_share(fractions.tolist())).sum())
        assert found == max(held_out, int((fractions < SHARE).sum()))  # never fewer than with the usual share


def test_a_large_set_keeps_the_usual_share_and_is_not_read_to_its_end():
    def endless():
        for place in range(FEW):
            yield 0.5 + place / (3 * FEW)  # the usual share would hold out nothing
        raise AssertionError

    assert default_share(endless()) == SHARE
    assert default_share([]) == default_share([0.7]) == default_share([0.7] * 9) == SHARE


@pytest.mark.parametrize("place", [0.001, 0.05, 0.5, 0.999])
def test_copies_of_one_image_leave_something_for_both_splits(place):
    fractions = np.array([place] * 150 + np.linspace(0.02, 0.98, 50).tolist())
    held_out = fractions < default_share(fractions.tolist())
    assert 0 < held_out.sum() < 200 and len(set(held_out[:150])) == 1
