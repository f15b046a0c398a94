"""The order of streamed samples: each once an epoch, the same from any cursor, and what happens to broken ones."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from mmqk.data import stream
from mmqk.data.mixture import permuted
from mmqk.data.shards.images import Dropped
from mmqk.data.shards.manifest import split_shards, stream_hash
from mmqk.data.shards.read import samples_of
from mmqk.data.stream import Account, Cursor, Lane
from mmqk.store import UserError
from tests.data.tars import write_samples, write_tar


def write_shards(folder, sizes, suffix=".tar"):
    """Write shards of samples whose keys are 0, 1, 2 ... over all shards."""
    paths, number = [], 0
    for s, size in enumerate(sizes):
        samples = [(str(number + i), {"txt": b"t%d" % (number + i), "png": bytes(i)}) for i in range(size)]
        path = write_samples(folder / f"{s:05d}.tar", samples)
        if suffix == ".tar.gz":
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path = path.with_name(path.name + ".gz")
        paths.append(str(path))
        number += size
    return paths


def key_of(sample):
    return np.array([int(sample.key)])


def open_lanes(shards, lanes, cursors=None, key=(0, 1), encode=key_of):
    accounts = [Account() for _ in range(lanes)]
    starts = cursors or [Cursor()] * lanes
    return [Lane(shards, encode, accounts[r], r, lanes, key, starts[r]) for r in range(lanes)]


def epoch_of(lane, epoch, most=10**6):
    """Return the keys of an epoch of a lane, which must be at its beginning."""
    keys = []
    while len(keys) < most:
        document = lane.document()
        if lane.cursor.epoch > epoch:
            return keys
        keys.append(int(document[0]))
        lane.advance()
    raise AssertionError


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000, 12345])
def test_the_keyed_permutation_is_one(n):
    images = [permuted(i, n, 5, 2) for i in range(n)]
    assert sorted(images) == list(range(n))
    if n > 60:
        assert images != list(range(n)) and images != [permuted(i, n, 5, 3) for i in range(n)]
        moved = np.abs(np.array(images) - np.arange(n)).mean() / n
        assert 0.25 < moved < 0.42  # a third for a random permutation


@pytest.mark.parametrize(
    ("sizes", "lanes"), [((40, 70, 3, 33, 64, 1, 32), 3), ((50, 41), 8), ((7,), 4), ((5, 5, 5), 3)]
)
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_each_epoch_has_each_sample_once(tmp_path, sizes, lanes, suffix):
    shards = write_shards(tmp_path, sizes, suffix)
    opened = open_lanes(shards, lanes)
    orders = []
    for epoch in range(3):
        keys = [epoch_of(lane, epoch) for lane in opened]
        assert sorted(chain.from_iterable(keys)) == list(range(sum(sizes)))
        orders.append(keys)
    assert orders[0] != orders[1] != orders[2]
    # The control: a lane that repeats a window would be seen.
    repeated = [*chain.from_iterable(orders[0])]
    repeated[0] = repeated[-1]
    assert sorted(repeated) != list(range(sum(sizes)))


@pytest.mark.parametrize(("sizes", "lanes"), [((40, 70, 3, 33), 2), ((50, 41), 5)])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_a_lane_continues_from_any_cursor(tmp_path, sizes, lanes, suffix):
    shards = write_shards(tmp_path, sizes, suffix)
    whole, cursors = [], []
    lane = open_lanes(shards, lanes)[1]
    for _ in range(2 * sum(sizes) // lanes + 20):  # over the end of an epoch, and of a second one
        cursors.append(lane.cursor)
        whole.append(int(lane.document()[0]))
        lane.advance()
    for at in range(0, len(whole), 7):
        resumed = open_lanes(shards, lanes, [cursors[at]] * lanes)[1]
        again = []
        for _ in range(40):
            again.append(int(resumed.document()[0]))
            resumed.advance()
        assert again[: len(whole) - at] == whole[at : at + 40], at
        # The control: the next cursor gives the next sample.
        other = open_lanes(shards, lanes, [cursors[at + 1]] * lanes)[1] if at + 1 < len(cursors) else None
        assert other is None or int(other.document()[0]) == whole[at + 1] != whole[at]


def test_neighbors_come_from_different_shards(tmp_path):
    shards = write_shards(tmp_path, [30] * 8)
    opened = open_lanes(shards, 4)
    for _ in range(30):
        row = [int(lane.document()[0]) // 30 for lane in opened]
        assert len(set(row)) == 4
        for lane in opened:
            lane.advance()
    # The control: with fewer shards than lanes this is impossible.
    assert len({int(lane.document()[0]) // 30 for lane in open_lanes(shards[:2], 4)}) == 2


def test_the_window_shuffles_inside_a_shard(tmp_path):
    shards = write_shards(tmp_path, [200])
    keys = epoch_of(open_lanes(shards, 1)[0], 0)
    ascending = sum(a < b for a, b in pairwise(keys))
    assert 60 < ascending < 140
    assert all(abs(key - place) < stream.WINDOW for place, key in enumerate(keys))


def test_a_sample_that_cannot_be_used_is_skipped_also_by_a_resume(tmp_path):
    def encode(sample):
        if sample.key in ("5", "17", "60"):
            raise Dropped("bad")
        return key_of(sample)

    shards = write_shards(tmp_path, [40, 40])
    lane, cursors, keys = open_lanes(shards, 1, encode=encode)[0], [], []
    while lane.document() is not None and lane.cursor.epoch == 0:
        keys.append(int(lane.document()[0]))
        lane.advance()
        cursors.append(lane.cursor)
    assert sorted(keys) == [k for k in range(80) if k not in (5, 17, 60)]
    events = lane.account.skips.skipped
    assert sorted(name.split()[1] for name, _ in events) == ["17", "5", "60"] and {r for _, r in events} == {"bad"}
    for at in (0, 20, 40, 75):
        resumed = open_lanes(shards, 1, [cursors[at]], encode=encode)[0]
        assert epoch_of(resumed, 0) == keys[at + 1 :]


@pytest.mark.parametrize("damage", ["cut", "garbage", "missing", "empty", "no sample"])
def test_a_broken_shard_is_skipped_and_named(tmp_path, damage):
    shards = write_shards(tmp_path, [100] * 4)
    broken = Path(shards[2])
    content = broken.read_bytes()
    if damage == "missing":
        broken.unlink()
    elif damage == "no sample":
        write_tar(broken, [("readme", b"x")])
    else:
        half = len(content) // 2 // 512 * 512
        broken.write_bytes({"cut": content[:half], "garbage": content[:half] + b"\xaa" * half, "empty": b""}[damage])
    opened = open_lanes(shards, 2)
    keys = [*chain.from_iterable(epoch_of(lane, 0) for lane in opened)]
    counts = Counter(keys)
    assert set(counts.values()) == {1} and {k for k in range(400) if k // 100 != 2} <= set(keys)
    got = sum(k // 100 == 2 for k in keys)
    # Whole windows before the damage are used.
    assert got % stream.WINDOW == 0 and (got > 0) == (damage in ("cut", "garbage"))
    (event,) = {event for lane in opened for event in lane.account.skips.skipped}
    assert broken.name in event[0] and event[1]


def test_too_many_broken_samples_or_shards_end_the_run(tmp_path):
    def encode(sample):
        if int(sample.key) % 4 == 0:
            raise Dropped("bad")
        return key_of(sample)

    shards = write_shards(tmp_path, [60, 60])
    with pytest.raises(UserError, match=r"10 of the \d+ samples .* 10% .*: bad"):
        epoch_of(open_lanes(shards, 1, encode=encode)[0], 5)
    assert len(epoch_of(open_lanes(shards, 1)[0], 0)) == 120
    missing = [str(tmp_path / f"no{i}.tar") for i in range(3)]
    with pytest.raises(UserError, match=r"10 of the 10 shards .*No such file"):
        open_lanes(missing, 1)[0].document()


def test_files_of_no_sample_are_counted_once(tmp_path):
    members = [("readme", b"")]
    for i in range(80):
        members += [(f"{i}.txt", b"t"), (f"{i}.png", b"p"), (f"note{i}", b"n")]
    members.insert(24, ("7.mp3", b"m"))  # in sample 7
    path = write_tar(tmp_path / "a.tar", members)
    lane, counted, files = open_lanes([str(path)], 1)[0], 0, 0
    for documents in (25, 30, 25):  # reopened twice in the middle of a window
        for _ in range(documents):
            lane.document()
            lane.advance()
        unread, of_all = lane.account.skips.unread, lane.account.skips.files
        counted, files = counted + unread.total, files + of_all
        lane = open_lanes([str(path)], 1, [lane.cursor])[0]
    assert (counted, files) == (82, len(members))


def test_lines_are_samples_and_continue_from_a_byte(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(json.dumps({"text": f"t{i}"}).encode() + b"\n" for i in range(50))))
    whole = list(samples_of(str(path)))
    assert [json.loads(s.fields["line"])["text"] for s in whole] == [f"t{i}" for i in range(50)]
    again = list(samples_of(str(path), whole[9].end, 10))
    assert [s.key for s in again] == [s.key for s in whole[10:]] and again[0].fields == whole[10].fields
    assert [s.number for s in samples_of(str(path), 0, 0, 3, 1)] == list(range(1, 50, 3))


def test_shards_are_held_out_by_name_and_none_is_read(tmp_path):
    names = [tmp_path / f"{i:05d}.tar" for i in range(300)]
    for name in names:
        name.write_bytes(b"not a tar")
    train, val = split_shards(str(tmp_path / "*.tar"), None)
    assert 1 <= len(val) <= 12 and sorted(train + val) == list(map(str, names))
    more = split_shards(str(tmp_path / "*.tar"), 0.3)[1]
    assert set(val) <= set(more) and 60 < len(more) < 120
    assert len(split_shards(str(tmp_path / "0000{0..1}.tar"), None)[1]) == 1
    with pytest.raises(UserError, match="names one shard"):
        split_shards(str(tmp_path / "00000.tar"), None)
    with pytest.raises(UserError, match="different names"):
        split_shards("https://127.0.0.1:9/{0..2}/data.tar", None)
    first = stream_hash(str(tmp_path / "*.tar"))
    (tmp_path / "00000.tar").write_bytes(b"no longer a tar")
    assert stream_hash(str(tmp_path / "*.tar")) != first
    urls = "https://127.0.0.1:9/x/{00000..99999}.tar"
    train, val = split_shards(urls, None)
    assert len(train) + len(val) == 100_000 and 800 < len(val) < 1200
    assert stream_hash("s3://b/{0..3}.tar") == stream_hash("https://h/{0..3}.tar") != stream_hash("s3://b/{0..4}.tar")
