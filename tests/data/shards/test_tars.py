"""Compare reads by member offset with tarfile and webdataset, and test the error of every kind of damaged archive."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from mmqk.data.shards.files import expand, index_tar
from mmqk.store import UserError
from tests.data.tars import write_tar


def triples(n: int) -> list[tuple[str, bytes]]:
    """Return members in the layout of img2dataset, with sizes around 512 bytes, the size of a block."""
    random = np.random.default_rng(0)
    return [
        (f"{i:09d}.{field}", random.bytes(int(random.integers(0, 1200)) if i else 512))
        for i in range(n)
        for field in ("jpg", "json", "txt")
    ]


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        index_tar(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and ": " in message
    return message


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_come_back_by_offset(tmp_path: Path, tar_format: int) -> None:
    members = triples(7)
    path = write_tar(tmp_path / "a.tar", members, tar_format)
    index = index_tar(path)
    assert len(index) == 7 and index.keys == [f"{i:09d}" for i in range(7)]
    for i in reversed(range(7)):
        assert index.read(i) == {name.partition(".")[2]: data for name, data in members[3 * i : 3 * i + 3]}
    with tarfile.open(path) as tar:
        files = tar.getmembers()
    assert index.fields == [m.name.partition(".")[2] for m in files] and index.files == 21
    assert index.extent_M2.tolist() == [[m.offset_data, m.size] for m in files]
    assert pickle.loads(pickle.dumps(index)).read(3) == index.read(3)
    assert [key for key, _ in index] == index.keys


def test_keys_and_fields_are_those_of_webdataset(tmp_path: Path) -> None:
    long = "folder/" * 20 + "x" * 110
    names = ["a/0.JPG", "a/0.json", "b.c/0.jpg", "./d/e.0.webp", "./d/e.json", f"{long}.jpg", "größer.png",
             "plain", "dir/plain", ".hidden", "._a.jpg", "__meta__", "z.", "y..txt", "../../up.txt",
             "/abs/olute.txt"]  # fmt: skip
    path = write_tar(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    index = index_tar(path)
    got = {(key, field): data for key, sample in index for field, data in sample.items()}
    expected = {
        (sample["__key__"], field): data
        for sample in wds.WebDataset([str(path)], shardshuffle=False)
        for field, data in sample.items()
        if not field.startswith("__")
    }
    assert got == expected and len(got) == 11
    # macOS writes extra files beside the real ones; webdataset skips them only at the top level, mmqk everywhere.
    assert index_tar(write_tar(tmp_path / "b.tar", [("a/._b.jpg", b"x")])).keys == []
    assert ("a/0", "jpg") in got and ("./d/e", "0.webp") in got and ("../../up", "txt") in got


def test_links_and_folders_have_no_content(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in (("some.folder", tarfile.DIRTYPE), *((f"{i}.jpg", kind) for i, kind in enumerate(kinds))):
            odd = tarfile.TarInfo(name)
            odd.type, odd.linkname = kind, str(tmp_path / "secret")
            tar.addfile(odd)
            if kind != tarfile.DIRTYPE:
                tar.addfile(tarfile.TarInfo(name.replace("jpg", "txt")), io.BytesIO())
    index = index_tar(tmp_path / "a.tar")
    assert list(index) == [(str(i), {"txt": b""}) for i in range(4)]
    assert index.unread.total == 4 and index.files == 8


def test_cut_short_at_any_byte(tmp_path: Path) -> None:
    members = triples(4)
    whole = write_tar(tmp_path / "whole.tar", members).read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as tar:
        headers = tar.getmembers()
        edges = [m.offset for m in headers] + [m.offset_data for m in headers]
        end = headers[-1].offset_data + (headers[-1].size + 511) // 512 * 512
    assert len(index_tar(tmp_path / "whole.tar")) == 4
    path = tmp_path / "cut.tar"
    cuts = {1, 511, end, end + 1, end + 511, end + 512, end + 1023, *range(3, end, 97)}
    cuts |= {edge + by for edge in edges for by in (-1, 0, 1)} - {-1, 0}
    for cut in cuts:
        path.write_bytes(whole[:cut])
        message = refusal(path)
        assert "copy or download it again, or write it again" in message
        assert cut <= 512 or "truncated" in message
    for enough in (end + 1024, end + 1025, len(whole)):
        path.write_bytes(whole[:enough])
        assert len(index_tar(path)) == 4
    # webdataset reads an archive cut at the end of a member as if it were whole, without a message.
    quiet = 0
    for edge in (m.offset for m in headers[3::3]):
        path.write_bytes(whole[:edge])
        samples = list(wds.WebDataset([str(path)], shardshuffle=False))
        quiet += len(samples) < 4
    assert quiet == 3


def test_a_damaged_header_is_not_the_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", triples(4))
    whole = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        header = tar.getmembers()[5].offset
    whole[header + 3] ^= 0xFF
    path.write_bytes(whole)
    assert f"damaged (no header at byte {header})" in refusal(path)
    with tarfile.open(path) as tar:
        assert len(tar.getmembers()) == 5  # tarfile alone stops at the damaged header
    for seed in range(60):
        random = np.random.default_rng(seed)
        noisy = bytearray(path.read_bytes())
        for place in random.integers(0, len(noisy), 6):
            noisy[place] = int(random.integers(256))
        path.write_bytes(noisy)
        with pytest.raises(UserError):
            index_tar(path)


def test_archives_joined_end_to_end(tmp_path: Path) -> None:
    first, second = (write_tar(tmp_path / f"{i}.tar", triples(2)).read_bytes() for i in range(2))
    path = tmp_path / "joined.tar"
    path.write_bytes(first + second)
    assert "has data after its end" in refusal(path)
    path.write_bytes(first + bytes(10240))
    assert len(index_tar(path)) == 2


def test_an_archive_that_shrinks_while_in_use(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", triples(4))
    index = index_tar(path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(UserError, match="shorter while in use"):
        index.read(3)
    path.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        index.read(0)


def test_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a-008.tar", "a-009.tar", "a-010.tar", "b-010.tar", "odd[1].tar", "x.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder.tar").mkdir()
    monkeypatch.chdir(tmp_path)

    def names(*patterns: str) -> list[str]:
        return [path.name for path in expand(patterns)]

    assert names("a-{008..010}.tar") == ["a-008.tar", "a-009.tar", "a-010.tar"]
    assert names(f"{tmp_path}/{{b,a}}-01{{0..0}}.tar") == ["b-010.tar", "a-010.tar"]
    assert names("b-*.tar", "a-00?.tar") == ["b-010.tar", "a-008.tar", "a-009.tar"]
    assert names("odd[1].tar") == ["odd[1].tar"]  # a file that is named like a pattern
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/x.txt") == ["x.txt"]

    def refused(*patterns: str) -> str:
        with pytest.raises(UserError) as caught:
            expand(patterns)
        return str(caught.value)

    assert "a-{008..011}.tar names a-011.tar, which does not exist" in refused("a-{008..011}.tar")
    assert "is named twice" in refused("a-008.tar", "./a-0*.tar")
