"""Shards behind a web server that stalls, cuts, lies about lengths or fails, and in an object store."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mmqk.data.stream import names, shards
from mmqk.data.stream.shards import ShardError, samples_of
from mmqk.store import UserError
from tests.data.tars import write_samples

SAMPLES = [(f"k{n:02d}", {"txt": b"%d" % n, "bin": bytes(range(256)) * 40}) for n in range(30)]


class Server(ThreadingHTTPServer):
    """Serves one tar; ``faults`` is how the next answers go wrong, one each, and then all are right."""

    daemon_threads = True

    def __init__(self, content: bytes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.faults, self.ranges = content, list[str](), True
        self.gone = threading.Event()

    def handle_error(self, *args):  # a client that goes away is part of the tests
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool):
        content = self.server.content
        start, end = 0, len(content)
        if self.server.ranges and (match := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            start, end = int(match[1]), min(end, int(match[2]) + 1 if match[2] else end)
        fault = self.server.faults.pop(0) if body and self.server.faults else ""
        if fault == "missing":
            self.send_error(404)
            return
        if fault == "error":
            self.send_error(503)
            return
        part = content[start:end]
        self.send_response(206 if (start, end) != (0, len(content)) else 200)
        self.send_header("Content-Length", str(len(part) + (1000 if fault == "long" else 0)))
        if self.server.ranges:
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        if body:
            self.wfile.write(part[: len(part) // 2] if fault else part)
            self.wfile.flush()
            if fault == "stall":
                self.server.gone.wait(30)
            if fault:
                self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "PAUSE", 0.01)
    monkeypatch.setattr(names, "TIMEOUT", 0.5)
    write_samples(tmp_path / "shard.tar", SAMPLES)
    made = Server((tmp_path / "shard.tar").read_bytes())
    threading.Thread(target=made.serve_forever, daemon=True).start()
    made.url = f"http://127.0.0.1:{made.server_port}/shard.tar"
    yield made
    made.gone.set()
    made.shutdown()


def read(name, *args):
    return [(sample.key, sample.fields) for sample in samples_of(str(name), *args)]


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("fault", ["", "cut", "stall", "long", "error"])
def test_a_fault_is_tried_again_and_no_sample_is_lost_or_read_twice(server, tmp_path, fault, ranges):
    server.faults, server.ranges = [fault] if fault else [], ranges
    assert read(server.url) == read(tmp_path / "shard.tar") and not server.faults


def test_a_shard_that_never_arrives_is_given_up_with_its_reason(server):
    server.faults = ["cut"] * 100
    with pytest.raises(ShardError):
        read(server.url)
    assert len(server.faults) < 100 - shards.TRIES + 1
    server.faults = ["missing"] * 100
    with pytest.raises(ShardError, match=r"shard\.tar"):
        read(server.url)


def test_reading_continues_in_the_middle(server, tmp_path):
    tenth = [sample for sample in samples_of(server.url)][9]
    assert read(server.url, tenth.end, 10) == read(tmp_path / "shard.tar")[10:]


def test_an_object_store(tmp_path, monkeypatch):
    moto = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[server]' s3fs")
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'mmqk[s3]'")
    import fsspec

    store = moto.ThreadedMotoServer(port=0)
    store.start()
    host, port = store.get_host_and_port()
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": f"http://{host}:{port}",
                        "AWS_DEFAULT_REGION": "us-east-1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    try:
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir("bucket")
        for n in range(3):
            write_samples(tmp_path / f"{n}.tar", SAMPLES[n * 10 : n * 10 + 10])
            system.put(str(tmp_path / f"{n}.tar"), f"bucket/{n}.tar")
        assert names.shard_names("s3://bucket/*.tar") == names.shard_names("s3://bucket/{0..2}.tar")
        assert read("s3://bucket/1.tar") == read(tmp_path / "1.tar")
        with pytest.raises(ShardError):
            read("s3://bucket/9.tar")
    finally:
        store.stop()


def test_a_missing_engine_is_one_sentence():
    with pytest.raises(UserError, match="cannot be read"):
        names.filesystem("nowhere://bucket/x.tar")
