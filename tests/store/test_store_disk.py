"""Writes to a failing disk: a folder is complete or unchanged, the status is correct, and one sentence names the
file."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from mmqk.store import MetricsWriter, RunFolder, read_metrics, read_status, write_folder
from tests.faulty_disk import WRITES, Disk

FILES = {"index.html": "page", "figures/a.png": b"picture", "figures/a.csv": "1,2"}


def content(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("there", [False, True], ids=["new folder", "folder of before"])
def test_a_folder_is_written_whole_or_is_as_it_was(tmp_path, there):
    def before(out: Path) -> Path:
        if there:
            (out / "figures").mkdir(parents=True)
            (out / "figures/a.csv").write_text("old")
            (out / "mine.txt").write_text("mine")
        return out

    (tmp_path / "good").mkdir()
    out = before(tmp_path / "good/reports/out")
    with Disk(tmp_path / "good").mounted() as disk:
        write_folder(out, FILES)
    new = {"index.html": "page", "figures/a.png": "picture", "figures/a.csv": "1,2"}
    assert content(out) == (new | {"mine.txt": "mine"} if there else new)
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]
    # Renames are left out: they need no disk space, so they succeed on a full disk.
    sites = [(site, last) for site, last in disk.seen.items() if site[0] in WRITES - {"replace"}]
    assert len(sites) >= 4
    for i, (site, last) in enumerate(sites):
        for nth in {0, last}:
            root = tmp_path / f"bad{i}-{nth}"
            root.mkdir()
            out = before(root / "reports/out")
            kept = content(root)
            with Disk(root, site, nth, errno.ENOSPC, True).mounted() as bad, pytest.raises(OSError):
                write_folder(out, FILES)
            assert bad.failed and content(root) == kept, (site, nth)


def test_a_status_that_ends_a_run_stands_where_the_last_one_stood_on_a_full_disk(tmp_path):
    with RunFolder.open(tmp_path, {"seed": 0}, {}) as folder:
        folder.set_status("running", 3)
        site = ("open for writing", ".status.json.0.mmqk-tmp")
        with Disk(tmp_path, site, stays_full=False).mounted(), pytest.raises(OSError, match=r"status\.json"):
            folder.set_status("running", 4)
        assert read_status(tmp_path).step == 3
        with Disk(tmp_path, site).mounted():
            folder.set_status("failed", 4, "no room")
        status = read_status(tmp_path)
        assert (status.status, status.step, status.reason) == ("failed", 4, "no room")


def test_a_line_that_could_not_be_written_is_not_written_later(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, {"loss": 2.0})
    writer.flush()
    with Disk(tmp_path, ("write", "metrics.jsonl")).mounted():
        full = MetricsWriter(path)
        full.write(2, {"loss": 1.0})
        with pytest.raises(OSError) as caught:
            full.flush()
        assert caught.value.filename == str(path)
    del full
    writer.close()
    assert [line["step"] for line in read_metrics(path)] == [1]
