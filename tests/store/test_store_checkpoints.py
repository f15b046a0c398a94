"""Checkpoint files: every changed bit is detected, a kill leaves the old or the new file, and other names are
ignored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmqk.store import checkpoint_files as store
from mmqk.store import files
from mmqk.store.checkpoint_files import (
    FOOTER_BYTES,
    CheckpointError,
    check_digest,
    checkpoints_in,
    set_aside,
    step_of,
    strays_in,
    write_checkpoint,
)
from tests.faulty_disk import Disk


def write(path: Path, content: bytes) -> None:
    write_checkpoint(path, lambda file: [file.write(content[i : i + 7]) for i in range(0, len(content), 7)])


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_every_flipped_bit_is_seen(tmp_path):
    path, content = tmp_path / "step00000010.ckpt", bytes(range(50))
    write(path, content)
    check_digest(path)  # the control
    assert path.read_bytes()[:-FOOTER_BYTES] == content
    without = []
    for bit in range(8 * path.stat().st_size):
        flip(path, bit)
        with pytest.raises(CheckpointError) as error:
            check_digest(path)
        if "missing" in str(error.value):
            without.append(bit // 8)
        flip(path, bit)
    # A change in the marker makes the file look like one without a digest; every other change contradicts the digest.
    assert set(without) == set(range(50, 50 + len(b"\nmmqk sha256 ")))
    check_digest(path)


def test_a_file_that_is_cut_or_continued_is_seen(tmp_path):
    path = tmp_path / "step00000010.ckpt"
    write(path, bytes(50))
    whole = path.read_bytes()
    assert len(whole) == 128
    for left in (0, 1, 49, 77, 78, 100, 127):
        path.write_bytes(whole[:left])
        with pytest.raises(CheckpointError, match="the sha256 at its end is missing"):
            check_digest(path)
    path.write_bytes(whole + whole)
    with pytest.raises(CheckpointError):
        check_digest(path)


@pytest.mark.parametrize("before", ["fsync", "replace", "sync_folder"])
def test_a_kill_leaves_the_old_or_the_new_one(tmp_path, monkeypatch, before):
    path = tmp_path / "step00000010.ckpt"
    write(path, b"old")
    child = os.fork()
    if not child:
        where = files if before == "sync_folder" else store.os
        monkeypatch.setattr(where, before, lambda *_: os._exit(9))
        write(path, b"new" * 100)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    check_digest(path)
    kept = path.read_bytes()[:-FOOTER_BYTES]
    assert kept == (b"new" * 100 if before == "sync_folder" else b"old")
    assert checkpoints_in(tmp_path) == [path]


def test_what_the_disk_returns_otherwise_is_no_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "step00000010.ckpt"
    write(path, b"old")
    sync = os.fsync
    partial = path.with_suffix(".partial")

    def lose(descriptor: int) -> None:
        sync(descriptor)
        if partial.exists():
            flip(partial, 3)

    monkeypatch.setattr(store.os, "fsync", lose)
    with pytest.raises(OSError, match="differ from those written"):
        write(path, b"new")
    check_digest(path)
    assert path.read_bytes().startswith(b"old") and not partial.exists()
    monkeypatch.setattr(store.os, "fsync", sync)
    write(path, b"new")  # the control
    assert path.read_bytes().startswith(b"new")


def test_an_error_while_writing_passes_and_leaves_nothing(tmp_path):
    def full(file) -> None:
        file.write(b"new")
        raise OSError(28, "No space left on device")

    path = tmp_path / "checkpoints" / "step00000010.ckpt"
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(path, full)
    assert list(path.parent.iterdir()) == []


def test_names(tmp_path):
    mine = ["step00000010.ckpt", "step99999999.ckpt", "step100000000.ckpt"]
    strays = ["a.ckpt", "step10.ckpt", "step00000010 (copy).ckpt", "step_best.ckpt", "step٠٠٠٠٠٠١٠.ckpt"]
    other = ["alarm_spike_median_step00000010.ckpt", "step00000010.partial", "step00000010.ckpt.refused"]
    for name in [*mine, *strays, *other]:
        (tmp_path / name).touch()
    assert [path.name for path in checkpoints_in(tmp_path)] == mine
    assert step_of(tmp_path / mine[2]) == 10**8
    assert [path.name for path in strays_in(tmp_path)] == sorted(strays)
    with pytest.raises(ValueError, match="step_best"):
        step_of(tmp_path / "step_best.ckpt")


def test_setting_aside_loses_nothing(tmp_path):
    path, found = tmp_path / "step00000010.ckpt", []
    for content in (b"1", b"2", b"3"):
        path.write_bytes(content)
        found.append(set_aside(path))
    assert [p.read_bytes() for p in found] == [b"1", b"2", b"3"] and not path.exists()
    assert found[0].name == "step00000010.ckpt.refused" and checkpoints_in(tmp_path) == []


@pytest.mark.parametrize("site, error", [(("write", "step0.partial"), OSError), (None, RuntimeError)])
def test_the_error_of_a_write_is_not_hidden_by_that_of_the_writer(tmp_path, site, error):
    """torch.save turns a failed write into a RuntimeError; `write_checkpoint` raises the OSError instead. Other
    RuntimeErrors are kept."""

    def as_torch_does(file):
        try:
            file.write(b"1")
        except OSError as cause:
            raise RuntimeError("unexpected pos 64 vs 0") from cause
        raise RuntimeError("unexpected pos 64 vs 0")

    with Disk(tmp_path, site).mounted(), pytest.raises(error):
        write_checkpoint(tmp_path / "step00000010.ckpt", as_torch_does)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files come from /proc")
def test_the_folder_of_the_first_checkpoint_is_durable_before_it(tmp_path, monkeypatch):
    """The parent of a new folder is synced first, because a crash could otherwise lose the folder with every
    checkpoint."""
    synced, fsync = [], os.fsync

    def recording(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    run = tmp_path / "run"
    run.mkdir()
    write_checkpoint(run / "checkpoints/step00000001.ckpt", lambda file: file.write(b"content"))
    assert synced.index(run) < synced.index(run / "checkpoints")
    assert tmp_path not in synced  # the control: only changed folders are synced
