"""Check the tokenizing of a user's shards: the documents, the counts, a resume after a kill, and error messages."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from PIL import Image

from mmqk.data.shards import samples as why
from mmqk.data.shards.images import BROKEN, TOO_LARGE, UNKNOWN, load_image
from mmqk.data.tokenizers.files import TextTokenizer, vocab_sizes_of
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.data.tokens import encode, tokenize
from mmqk.data.tokens.folder import open_tokens
from mmqk.store import UserError
from tests.data.tars import encoded, write_tar
from tests.training.gates import gone, wait_for

SIZES = [(64, 64), (200, 90), (31, 77), (640, 480), (5, 300)]
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


@cache
def picture(seed: int) -> bytes:
    """Return an image file whose size and format depend on the seed; equal seeds give equal bytes."""
    random = np.random.default_rng(seed)
    width, height = SIZES[seed % len(SIZES)]
    image = Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize((width, height))
    return encoded(image, list(FORMATS.values())[seed % 3])


def caption(seed: int) -> str:
    return f"picture number {seed}, größer"


def pair(seed: int) -> list[tuple[str, bytes]]:
    key = f"{seed:09d}"
    meta = {"caption": caption(seed), "url": "https://example.org", "key": key, "status": "success"}
    return [(f"{key}.{list(FORMATS)[seed % 3]}", picture(seed)), (f"{key}.json", json.dumps(meta).encode()),
            (f"{key}.txt", caption(seed).encode())]  # fmt: skip


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write a folder with 00000.tar to 00003.tar of 9 pairs each, as img2dataset does."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(4):
        write_tar(folder / f"{number:05d}.tar", [m for s in range(9) for m in pair(9 * number + s)])
        (folder / f"{number:05d}_stats.json").write_text("{}")
    return folder


@pytest.fixture
def run(tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Return a function that tokenizes shards and returns the output folder and the printed text."""

    def call(*args: str, out: str = "out", workers: int = 0) -> tuple[Path, str]:
        folder = tmp_path / out
        common = ["--out", str(folder), "--tokenizers", str(tiny_data / "tokenizers"), f"--workers={workers}"]
        assert tokenize.main([*args, *common]) == 0
        return folder, capsys.readouterr().out

    return call


def refused(run: Any, *args: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        run(*args, **options)
    message = str(caught.value)
    assert "\n" not in message and ": " in message
    return message


def pattern(shards: Path, last: int = 3) -> tuple[str, str]:
    return "--shards", f"{shards}/{{00000..{last:05d}}}.tar"


def documents(folder: Path) -> list[tuple[int, ...]]:
    return [tuple(store[i].tolist()) for store in open_tokens(folder).values() for i in range(len(store))]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def header(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tokens.json").read_text())


def alike(some: list[tuple[int, ...]], others: list[tuple[int, ...]]) -> bool:
    """Return whether at most one id in twenty differs in each document.

    Rounding can change the codes of an image that is encoded in another batch.
    """
    return len(some) == len(others) and all(
        len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) <= len(a) // 20
        for a, b in zip(some, others, strict=True)
    )


class Tokenizers:
    """Computes the expected ids with the tokenizers, one image at a time."""

    def __init__(self, folder: Path):
        self.image, self.bpe = ImageTokenizer.load(folder), TextTokenizer.load(folder)
        self.first_code = vocab_sizes_of(folder)["text"]

    def picture(self, file: bytes, fit: Any = "crop") -> list[int]:
        from torchvision.transforms.functional import pil_to_tensor

        pixels = pil_to_tensor(load_image(file, 64, fit)).float() / 255
        return [3, *(self.first_code + code for code in self.image.encode(pixels[None])[0].tolist()), 4]

    def text(self, text: str) -> list[int]:
        return [5 + id for id in self.bpe.encode(text)]


@pytest.fixture(scope="module")
def tokenizers(tiny_data: Path) -> Tokenizers:
    return Tokenizers(tiny_data / "tokenizers")


def test_pairs_in_the_layout_of_img2dataset(
    run: Any, shards: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "IMAGES_A_BATCH", 1)
    folder, printed = run(*pattern(shards), "--val-fraction", "0.25")
    stores = open_tokens(folder)
    expected: dict[str, list[list[int]]] = {"train": [], "val": []}
    for seed in range(36):
        fraction = int(hashlib.sha256(picture(seed)).hexdigest()[:16], 16) / 2**64
        document = [*tokenizers.picture(picture(seed)), *tokenizers.text(caption(seed)), 1]
        expected["val" if fraction < 0.25 else "train"].append(document)
    for split, store in stores.items():
        assert store.kind == "pair" and [store[i].tolist() for i in range(len(store))] == expected[split]
        assert len(store) > 3
    about = header(folder)["about"]
    assert [s["file"] for s in about["shards"]] == [f"{i:05d}.tar" for i in range(4)]
    for shard in about["shards"]:
        file = shards / shard["file"]
        assert shard["size"] == file.stat().st_size and shard["samples"] == 9 and shard["dropped"] == {}
        assert shard["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    tokens = sum(map(len, expected["train"]))
    assert f"train {len(expected['train'])} documents of {tokens:,} tokens" in printed and "dropped" not in printed
    assert [p["name"] for p in header(folder)["splits"]["train"]] == [f"{i:05d}" for i in range(4)]
    assert not (folder / "unfinished").exists()


def test_what_cannot_be_used_is_counted(run: Any, tmp_path: Path) -> None:
    good = pair(5)
    members = [
        *good,
        ("a.jpg", picture(0)),
        ("b.txt", b"no image"), ("c.txt", b"none either"),
        ("d.jpg", b""), ("d.txt", b"x"),
        ("e.jpg", b"<html>"), ("e.txt", b"x"),
        ("f.jpg", picture(0)[:300]), ("f.txt", b"x"),
        ("g.png", encoded(Image.new("L", (300, 200)), "PNG")), ("g.txt", b"x"),
        ("h.jpg", picture(0)), ("h.txt", b"\xff\xff"),
        ("../../i\x1b[2J.gif", b"x"),
        ("README", b"no sample"),
    ]  # fmt: skip
    # b.tar adds seven samples without an image, so that there are more than the five that are kept as examples.
    write_tar(tmp_path / "a.tar", members)
    write_tar(tmp_path / "b.tar", [(f"z{i}.txt", b"x") for i in range(7)] + [*pair(7)])
    folder, printed = run("--shards", f"{tmp_path}/[ab].tar", "--max-pixels=59999", "--val-fraction=0")
    record = header(folder)
    expected = {why.NO_IMAGE: 10, why.NO_CAPTION: 1, "image file is empty": 1, UNKNOWN: 1, BROKEN: 1, TOO_LARGE: 1,
                why.NOT_UNICODE: 1}  # fmt: skip
    assert record["dropped"] == expected and next(iter(record["dropped"])) == why.NO_IMAGE
    assert len(documents(folder)) == 2
    for shard, samples, dropped in zip(record["about"]["shards"], (10, 8), (9, 7), strict=True):
        kept = sum(p["documents"] for p in record["splits"]["train"] if p["name"] == {10: "00000", 8: "00001"}[samples])
        assert shard["samples"] == samples == kept + sum(shard["dropped"].values()) == kept + dropped
    examples = record["about"]["examples"]
    assert examples[why.NO_IMAGE] == ["a.tar: b", "a.tar: c", "a.tar: ../../i\x1b[2J", "b.tar: z0", "b.tar: z1"]
    assert "16 of 18 samples were dropped:" in printed and f"  {why.NO_IMAGE}: 10 (a.tar: b, a.tar: c" in printed
    assert "\x1b" not in printed
    assert not (tmp_path.parent / "i").exists()


def test_every_file_of_an_archive_is_accounted_for(run: Any, tmp_path: Path) -> None:
    members = [*pair(0), ("README", b"r"), ("dir/plain", b"r"), (".hidden", b"h"), ("x/._a.jpg", b"h"),
               ("000000000.cls", b"1"), *pair(1), ("000000001.mask.png", b"p"),
               ("lone.json", b"{}")]  # fmt: skip
    members = sorted(members, key=lambda m: m[0])
    out, printed = run("--shards", str(write_tar(tmp_path / "a.tar", members)))
    about = header(out)["about"]
    assert about["unread"]["counts"] == {why.IGNORED: 4, why.UNUSED: 1, why.DOTTED: 1}
    assert about["shards"][0]["files"] == len(members) and "6 of 13 files were not read" in printed
    assert "a.tar: README" in printed and "a.tar: .hidden" in printed and "a.tar: 000000000.cls" in printed


def test_interleaved_documents(run: Any, tmp_path: Path, tokenizers: Tokenizers) -> None:
    url = "https://example.org/x.jpg"

    def lists(images: list[Any], texts: list[Any]) -> bytes:
        return json.dumps({"images": images, "texts": texts}).encode()

    many = 70  # one document with more images than a batch
    members = [
        ("a.json", lists([None, url, None, url], ["one", None, "two", None])),
        ("a.0.webp", picture(2)), ("a.1.png", picture(4)),
        ("b.json", lists([url, None], [None, "last"])), ("b.0.jpg", picture(6)),
        ("c.json", lists([url, None], [None, "its image is lost"])),
        ("d.json", lists([url, url], [None, None])), ("d.0.jpg", picture(6)), ("d.1.jpg", b"broken"),
        ("e.json", lists([None], ["alone"])),
        ("f.json", lists([url] * many, [None] * many)), *((f"f.{i}.jpg", picture(3 * i)) for i in range(many)),
        ("g.json", lists([None], [""])),
    ]  # fmt: skip
    write_tar(tmp_path / "a.tar", members)
    folder, _ = run("--shards", f"{tmp_path}/a.tar", "--interleaved", "--val-fraction=0")
    image, text = tokenizers.picture, tokenizers.text
    expected = [
        (*text("one"), *image(picture(2)), *text("two"), *image(picture(4)), 1),
        (*image(picture(6)), *text("last"), 1),
        (*text("alone"), 1),
        (*(i for n in range(many) for i in image(picture(3 * n))), 1),
    ]
    assert alike(documents(folder), expected)
    shuffled = (*(i for n in reversed(range(many)) for i in image(picture(3 * n))), 1)
    assert not alike(documents(folder), [*expected[:3], shuffled])
    assert header(folder)["dropped"] == {why.EMPTY_DOCUMENT: 1, why.NO_MATCH: 1, UNKNOWN: 1}
    assert header(folder)["kind"] == "interleaved"
    # Without --interleaved the archive has no pair, and the message names this flag.
    assert "--interleaved" in refused(run, "--shards", f"{tmp_path}/a.tar", out="pairs")


def test_text_documents(run: Any, tmp_path: Path, tokenizers: Tokenizers) -> None:
    texts = [f"document {i}\nof two lines \u2028 größer" for i in range(30)]
    lines = [json.dumps({"text": t, "source": "s"}, ensure_ascii=i % 2 == 0).encode() for i, t in enumerate(texts)]
    odd = [b"", b"{", b"[1]", b'{"text": 3}', b'{"words": "x"}', b'{"text": " "}', b'{"text": "\xff"}',
           b'{"text": "\\ud800"}', b"[" * 100000]  # fmt: skip
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines[:10], *odd]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines[10:20]) + b"\n"))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(b"\r\n".join(lines[20:])))
    folder, _ = run("--text", f"{tmp_path}/*.jsonl*", "--val-fraction=0")
    assert documents(folder) == [(*tokenizers.text(t), 1) for t in texts]
    record = header(folder)
    assert record["kind"] == "text"
    assert record["dropped"] == {why.NOT_JSON: 3, why.NO_TEXT: 2, why.NOT_UNICODE: 2, why.EMPTY_DOCUMENT: 1}
    assert record["about"]["examples"][why.NOT_JSON] == ["a.jsonl: line 12", "a.jsonl: line 13", "a.jsonl: line 19"]
    assert sum(s["samples"] for s in record["about"]["shards"]) == 30 + 8


def test_documents_of_a_broken_shard_do_not_enter_the_next(run: Any, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i} {'word ' * 50}"}).encode() + b"\n" for i in range(2000)]
    whole = gzip.compress(b"".join(lines))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.jsonl").write_bytes(b"".join(lines[:3]))
    assert "1 of 2 shards" in refused(run, "--text", f"{tmp_path}/*.jsonl*", "--val-fraction=0")
    assert len(np.load(tmp_path / "out/train/00001.lengths.npy")) == 3


SHARE_OF_VAL = "--val-fraction=0.3"  # the default depends on the number of readable samples


def cut_short(path: Path) -> bytes:
    """Cut an archive at the end of a sample, and return the bytes that it had before."""
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        edge = tar.getmembers()[12].offset
    path.write_bytes(whole[:edge])
    return whole


def test_broken_shards_are_named_after_the_others_are_done(run: Any, shards: Path) -> None:
    expected = content(run(*pattern(shards), SHARE_OF_VAL, out="expected")[0])
    whole = cut_short(shards / "00001.tar")
    message = refused(run, *pattern(shards), SHARE_OF_VAL)
    assert "1 of 4 shards" in message and "00001.tar is truncated" in message and "continues" in message
    out = shards.parent / "out"
    kept = sorted(p.name for p in (out / "unfinished").glob("0*.json"))
    assert kept == ["00000.json", "00002.json", "00003.json"]
    with pytest.raises(UserError, match="not finished"):
        open_tokens(out)
    # webdataset alone reads the four remaining samples and reports no error.
    assert len(list(wds.WebDataset([str(shards / "00001.tar")], shardshuffle=False))) == 4
    assert "1 of 4 shards" in refused(run, *pattern(shards), SHARE_OF_VAL)
    (shards / "00001.tar").write_bytes(whole)
    folder, printed = run(*pattern(shards), SHARE_OF_VAL)
    assert content(folder) == expected and "continuing with 1 of 4 shards" in printed


def test_interrupted_at_any_shard_and_resumed(run: Any, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = content(run(*pattern(shards), out="expected")[0])
    write = tokenize.write_json
    for after in (0, 2, 4):
        left = [write] * after

        def interrupted(path: Path, value: Any, left: list[Any] = left) -> None:
            if not left:
                raise KeyboardInterrupt
            left.pop()(path, value)

        with monkeypatch.context() as patched:
            patched.setattr(tokenize, "write_json", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(*pattern(shards), out=f"{after}")
        assert not (shards.parent / f"{after}/tokens.json").exists()
        assert content(run(*pattern(shards), out=f"{after}")[0]) == expected


def test_slices_write_what_one_process_writes(run: Any, shards: Path) -> None:
    whole, _ = run(*pattern(shards), out="whole")
    run(*pattern(shards), "--slice", "3/3", out="slices")
    folder, said = run(*pattern(shards), "--slice", "1/3", out="slices")
    assert not (folder / "tokens.json").exists() and "3 of 4 shards are tokenized" in said
    # The control: the part of the missing slice is not there yet.
    assert content(folder).keys() & content(whole).keys() < content(whole).keys()
    run(*pattern(shards), "--slice", "2/3", out="slices")
    assert content(folder) == content(whole)
    run(*pattern(shards), "--slice", "2/3", out="slices")  # says that it is finished
    for wrong in ("0/3", "4/3", "1", "a/b"):
        assert "is not K/N" in refused(run, *pattern(shards), "--slice", wrong, out="wrong")


KILLED = """
import multiprocessing, os, signal, sys
from mmqk.data.tokens import encode, tokenize
write, done = tokenize.write_json, 0
def killed(path, value):
    global done
    write(path, value)
    done += path.name[0] == "0"
    if done == 2:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
tokenize.write_json = killed
tokenize.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_killed_in_the_middle_and_resumed_with_other_workers(run: Any, shards: Path, tiny_data: Path) -> None:
    write_tar(shards / "00002.tar", [m for seed in range(100, 160) for m in pair(seed)])
    expected = content(run(*pattern(shards), out="expected")[0])
    out = shards.parent / "out"
    args = [*pattern(shards), "--out", str(out), "--tokenizers", str(tiny_data / "tokenizers")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    first = subprocess.run(
        [sys.executable, "-c", KILLED, *args, "--workers=2"], capture_output=True, text=True, env=environment
    )
    assert first.returncode == -9, first.stderr
    assert len(list((out / "unfinished").glob("0*.json"))) == 2 and not (out / "tokens.json").exists()
    pids = [int(pid) for pid in first.stdout.split()]
    assert len(pids) == 2
    wait_for(lambda: all(map(gone, pids)))  # workers do not outlive their parent
    (out / "train" / ".00003.keys.json.1.mmqk-tmp").touch()  # a worker may be killed while it writes
    _, printed = run(*pattern(shards), workers=1)
    assert "continuing with 2 of 4 shards" in printed
    assert content(out) == expected


HELD = """
import os, sys
from mmqk.data.tokens import encode, tokenize
from mmqk.store import cli_main
run_shards, held = tokenize.run_shards, sys.argv.pop(1)
def hold_back(*args):
    os.remove(held)
    os.mkfifo(held)
    return run_shards(*args)
tokenize.run_shards = hold_back
if __name__ == "__main__":
    sys.exit(cli_main(tokenize.main)(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_at_once(shards: Path, tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    held, out = shards / "00002.tar", tmp_path / "out"
    args = [*pattern(shards), "--out", str(out), "--tokenizers", str(tiny_data / "tokenizers"), "--workers=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    # Tests that run in the background inherit an ignored SIGINT.
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "held.py"), str(held), *args], preexec_fn=listens,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    while len(list((out / "unfinished").glob("0*.json"))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    printed, errors = process.communicate(timeout=1800)  # waits until the workers have closed stderr too
    progress, last = errors.splitlines()[:-1], errors.splitlines()[-1]
    assert (process.returncode, last) == (130, "mmqk: interrupted")
    assert all(" of 4 shards" in line for line in progress)  # progress lines only, without a traceback
    assert "2 of 4 shards are kept" in printed


@pytest.mark.slow
def test_a_killed_worker_ends_the_command_and_finished_shards_are_kept(
    run: Any, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = content(run(*pattern(shards), out="expected")[0])
    held = shards / "00002.tar"
    whole = held.read_bytes()
    begin = tokenize.run_shards

    def kill() -> None:
        with open(held, "wb"):  # waits until the worker reads the shard
            (worker,) = multiprocessing.active_children()
            worker.kill()

    def hold_back(*args: Any) -> Any:  # runs after the file patterns are expanded
        held.unlink()
        os.mkfifo(held)
        threading.Thread(target=kill, daemon=True).start()
        return begin(*args)

    with monkeypatch.context() as patched:
        patched.setattr(tokenize, "run_shards", hold_back)
        message = refused(run, *pattern(shards), workers=1)
    assert "a worker was killed while tokenizing" in message and message.count(".tar") == 1
    assert "00002.tar: if the machine ran out of memory" in message and "the same command continues" in message
    held.unlink()
    held.write_bytes(whole)
    folder, printed = run(*pattern(shards))
    assert content(folder) == expected and "continuing with 2 of 4" in printed


def test_other_options_for_a_folder_that_was_begun(run: Any, shards: Path) -> None:
    whole = cut_short(shards / "00001.tar")
    refused(run, *pattern(shards))
    for _ in range(2):  # unfinished, then finished
        assert "other --fit: give the same" in refused(run, *pattern(shards), "--fit=pad")
        assert "--shards" in refused(run, *pattern(shards, 2))
        (shards / "00001.tar").write_bytes(whole)
        folder, printed = run(*pattern(shards))
    assert "is finished: train" in printed
    before = content(folder)
    run(*pattern(shards), workers=3)  # another number of workers is accepted, and no worker is started
    assert content(folder) == before


def test_other_shards_of_the_same_name_are_not_those_of_a_finished_folder(run: Any, shards: Path) -> None:
    folder, _ = run(*pattern(shards))
    before, whole = content(folder), (shards / "00002.tar").read_bytes()
    write_tar(shards / "00002.tar", [m for s in range(70, 72) for m in pair(s)])
    other_size = refused(run, *pattern(shards))
    (shards / "00002.tar").write_bytes(whole[:-1] + b"x")
    for message in (other_size, refused(run, *pattern(shards))):
        assert "00002.tar differs from the shard that" in message and "give another --out" in message
    assert content(folder) == before
    (shards / "00002.tar").write_bytes(whole)  # the control
    assert "is finished: train" in run(*pattern(shards))[1]


def test_long_parts_go_on_in_further_files(run: Any, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = documents(run(*pattern(shards), out="whole")[0])
    monkeypatch.setattr(encode, "TOKENS_A_FILE", 200)
    monkeypatch.setattr(encode, "IMAGES_A_BATCH", 2)
    folder, _ = run(*pattern(shards))
    assert alike(documents(folder), expected)
    names = [part["name"] for part in header(folder)["splits"]["train"]]
    assert "00000_000001" in names and len(names) > 8
    # A file that an interrupted call left behind is not used by the next call.
    out = shards.parent / "again"
    shutil.copytree(folder, out)
    (out / "tokens.json").unlink()
    (out / "unfinished").mkdir()
    monkeypatch.undo()
    run(*pattern(shards), out="again")
    assert documents(out) == expected and len(header(out)["splits"]["train"]) == 4


def test_a_full_disk_is_no_broken_shard(run: Any, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tokenize.TokenWriter, "add_part", full)
        message = refused(run, *pattern(shards))
    assert "out cannot be written (No space left on device)" in message
    assert len(documents(run(*pattern(shards))[0])) == 36
