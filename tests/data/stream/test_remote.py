"""Shards on servers: a hostile HTTP server, and an object store on this machine."""

from __future__ import annotations

import errno
import gzip
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmqk.data.shards import files, read
from mmqk.data.shards.files import shard_names
from mmqk.data.shards.manifest import split_shards
from mmqk.data.shards.read import ShardCache, ShardError, samples_of
from mmqk.store import UserError
from tests.data.stream.test_lanes import epoch_of, open_lanes, write_shards


class Hostile(BaseHTTPRequestHandler):
    """Serves the files of a folder. `faults` has for each path the faults of its next requests, in order; the last
    one stays: ok, stall, cut (half of the answer), short (the length is too small), long (it is too large), error,
    plain (no ranges)."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        server = self.server
        path = server.folder / self.path.strip("/")
        if not path.is_file():
            return self.send_error(404)
        content, queue = path.read_bytes(), server.faults.get(path.name, ["ok"])
        fault = (queue.pop(0) if len(queue) > 1 else queue[0]) if body else queue[0]
        server.seen.append((path.name, fault, body))
        if fault == "error" and body:
            return self.send_error(503)
        wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = 0, len(content) - 1
        if wanted and fault != "plain":
            first, last = int(wanted[1]), min(int(wanted[2] or last), last)
        part = content[first : last + 1]
        self.send_response(206 if wanted and fault != "plain" else 200)
        length = {"short": len(part) // 2, "long": 2 * len(part)}.get(fault, len(part))
        self.send_header("Content-Length", str(length))
        if fault != "plain":
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        if not body:
            return None
        if fault == "stall":
            self.wfile.write(part[: len(part) // 3])
            self.wfile.flush()
            server.free.wait(20)
        else:
            self.wfile.write(part[: length // 2] if fault == "cut" else part[:length])
        if fault in ("cut", "long", "stall"):
            self.close_connection = True
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "PAUSE", 0.001)
    http = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    http.daemon_threads = True
    http.folder, http.faults, http.seen, http.free = tmp_path, {}, [], threading.Event()
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield http
    http.free.set()
    http.shutdown()


def address(server, name=""):
    return f"http://127.0.0.1:{server.server_address[1]}/{name}"


@pytest.mark.parametrize("fault", ["stall", "cut", "short", "long", "error"])
def test_a_fault_that_passes_changes_no_sample(server, tmp_path, fault, monkeypatch):
    monkeypatch.setattr(files, "TIMEOUT", 1.0 if fault == "stall" else files.TIMEOUT)
    write_shards(tmp_path, [300])
    local = [(s.key, s.fields, s.end) for s in samples_of(str(tmp_path / "00000.tar"))]
    server.faults["00000.tar"] = [fault, fault, "ok"]
    remote = [(s.key, s.fields, s.end) for s in samples_of(address(server, "00000.tar"))]
    assert remote == local and (("00000.tar", fault, True) in server.seen or fault in ("short", "long"))
    # The control: a fault that stays ends the shard, and no wrong sample comes out of it.
    server.faults["00000.tar"] = [fault]
    read = []
    with pytest.raises(ShardError):
        for sample in samples_of(address(server, "00000.tar")):
            read.append((sample.key, sample.fields, sample.end))
    assert read == local[: len(read)] and len(read) < 300


def test_a_server_without_ranges_is_read_from_the_front(server, tmp_path):
    write_shards(tmp_path, [120])
    server.faults["00000.tar"] = ["plain"]
    whole = list(samples_of(address(server, "00000.tar")))
    assert [s.key for s in whole] == [str(i) for i in range(120)]
    again = list(samples_of(address(server, "00000.tar"), whole[49].end, 50))
    assert [(s.key, s.fields) for s in again] == [(s.key, s.fields) for s in whole[50:]]


def test_a_shard_that_never_comes_is_skipped_and_a_resume_skips_it_too(server, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "TIMEOUT", 1.0)
    write_shards(tmp_path, [40] * 4)
    server.faults["00001.tar"] = ["stall"]
    urls = shard_names(address(server, "{00000..00003}.tar"))
    opened = open_lanes(urls, 2)
    keys = [[], []]
    for lane, of_lane in zip(opened, keys, strict=True):
        while lane.document() is not None and lane.cursor.epoch == 0:
            of_lane.append(int(lane.document()[0]))
            lane.advance()
    assert sorted(chain(*keys)) == [k for k in range(160) if not 40 <= k < 80]
    assert "00001.tar" in "".join(name for lane in opened for name, _ in lane.account.skips.skipped)
    # A resume behind the skip does not ask for the shard again, even if it could be read now.
    server.faults["00001.tar"] = ["ok"]
    server.seen.clear()
    for r, lane in enumerate(open_lanes(urls, 2)):
        for _ in range(len(keys[r]) - 3):
            lane.document()
            lane.advance()
    assert server.seen and sum(len(k) for k in keys) == 120


def test_start_reads_no_shard_and_a_resume_reads_the_open_window(server, tmp_path):
    write_shards(tmp_path, [4000] * 2)
    urls = [address(server, f"0000{s}.tar") for s in (0, 1)]
    assert split_shards(address(server, "{00000..00001}.tar"), None) and not server.seen
    (lane,) = open_lanes(urls, 1)
    for _ in range(3900):
        lane.document()
        lane.advance()
    cursor = lane.cursor
    size = (tmp_path / "00000.tar").stat().st_size
    assert cursor.byte > size // 2 > read.BUFFER // 4
    server.seen.clear()
    (again,) = open_lanes(urls, 1, [cursor])
    assert again.document() == lane.document()
    assert sum(body for _, _, body in server.seen) <= 2


def test_a_cached_shard_is_read_from_disk(server, tmp_path):
    """The second epoch asks the server for nothing; a cut download leaves no copy."""
    (tmp_path / "served").mkdir()
    server.folder = tmp_path / "served"
    write_shards(server.folder, [300, 300, 20])
    sizes = [(server.folder / f"0000{s}.tar").stat().st_size for s in range(3)]
    cache = ShardCache(tmp_path / "copies", sizes[0] + sizes[2])

    def read(s):
        return [(x.key, x.fields, x.end) for x in samples_of(address(server, f"0000{s}.tar"), cache=cache)]

    local = [[(x.key, x.fields, x.end) for x in samples_of(str(server.folder / f"0000{s}.tar"))] for s in range(3)]
    server.faults["00000.tar"] = ["cut", "ok"]
    assert [read(s) for s in (0, 2)] == [local[0], local[2]]
    server.seen.clear()
    assert [read(s) for s in (0, 2, 0, 2)] == [local[0], local[2]] * 2 and not server.seen
    # The shard that was used first makes room for the next one.
    assert read(1) == local[1]
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= cache.limit
    assert {path.name[17:] for path in cache.folder.iterdir()} == {"00001.tar", "00002.tar"}
    server.seen.clear()
    assert read(0) == local[0] and server.seen
    # A shard above the limit is read where it is.
    small = ShardCache(tmp_path / "small", sizes[2])
    assert [x.key for x in samples_of(address(server, "00000.tar"), cache=small)] == [x[0] for x in local[0]]
    assert not small.folder.exists()


def test_a_cache_keeps_downloads_in_progress_and_names_itself_if_it_is_full(server, tmp_path, monkeypatch):
    (size,) = (Path(path).stat().st_size for path in write_shards(tmp_path, [40]))
    cache, url = ShardCache(tmp_path / "copies", size), address(server, "00000.tar")
    cache.folder.mkdir()
    (cache.folder / "growing.part").write_bytes(bytes(size))
    (cache.folder / "abandoned.part").write_bytes(bytes(size))
    os.utime(cache.folder / "abandoned.part", (0, 0))
    assert len(list(samples_of(url, cache=cache))) == 40
    assert "growing.part" in os.listdir(cache.folder) and "abandoned.part" not in os.listdir(cache.folder)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(read, "filesystem", lambda _: SimpleNamespace(info=lambda _: {"size": 9}, get_file=full))
    with pytest.raises(OSError, match="copies"):  # not a ShardError, after which the lane would leave the shard
        list(samples_of(address(server, "00001.tar"), cache=cache))


def test_a_missing_shard_or_engine_is_one_sentence(server, monkeypatch):
    with pytest.raises(ShardError, match=r"nothere|404|Not Found"):
        list(samples_of(address(server, "nothere.tar")))
    assert len(server.seen) <= 1
    with pytest.raises(UserError, match="fish://"):
        files.filesystem("fish://a/b.tar")
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(UserError, match=r"pip install 'mmqk\[s3\]'"):
        shard_names("s3://bucket/*.tar")


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An object store on this machine with four shards, one of them compressed."""
    pytest.importorskip("s3fs", reason="s3fs is not installed (mmqk[s3])")
    moto = pytest.importorskip("moto.server", reason="moto's server is not installed (pip install 'moto[server]')")
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    system = files.filesystem("s3://bucket")
    system.mkdir("bucket")
    for path in write_shards(tmp_path, [50, 60, 70]) + write_shards(tmp_path / "gz", [20], ".tar.gz"):
        system.put(path, f"bucket/set/{path.rpartition('/')[2]}")
    yield "s3://bucket/set/"
    running.stop()
    system.clear_instance_cache()


def test_an_object_store_gives_the_samples_of_the_local_shards(store, tmp_path):
    urls = shard_names(store + "*")
    assert [url.rpartition("/")[2] for url in urls] == ["00000.tar", "00000.tar.gz", "00001.tar", "00002.tar"]
    for url, path in zip(urls, ("00000.tar", "gz/00000.tar.gz", "00001.tar", "00002.tar"), strict=True):
        local = list(samples_of(str(tmp_path / path)))
        assert [(s.key, s.fields, s.end) for s in samples_of(url)] == [(s.key, s.fields, s.end) for s in local]
        again = samples_of(url, local[11].end, 12)
        assert [s.key for s in again] == [s.key for s in local[12:]]
    tars = shard_names(store + "{00000..00002}.tar")
    keys = list(chain(*(epoch_of(lane, 0) for lane in open_lanes(tars, 2))))
    assert sorted(keys) == list(range(180))
    with pytest.raises(ShardError):
        list(samples_of(store + "missing.tar"))


def test_zstd_is_read_where_its_package_is_installed(tmp_path):
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    (path,) = write_shards(tmp_path, [40])
    content = (tmp_path / "00000.tar").read_bytes()
    (tmp_path / "00000.tar.zst").write_bytes(zstandard.compress(content))
    (tmp_path / "00000.tar.gz").write_bytes(gzip.compress(content))
    whole = list(samples_of(path))
    for suffix in (".zst", ".gz"):
        assert [s.fields for s in samples_of(path + suffix)] == [s.fields for s in whole]
        assert [s.key for s in samples_of(path + suffix, whole[9].end, 10)] == [s.key for s in whole[10:]]
        (tmp_path / f"00000.tar{suffix}").write_bytes((tmp_path / f"00000.tar{suffix}").read_bytes()[:-200])
        with pytest.raises(ShardError):
            list(samples_of(path + suffix))
