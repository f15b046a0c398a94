"""Tokenize damaged shards into a token folder. Also read the shards of pairs as training does, and read some shards
of pairs and of text through the token cache of a manifest.

Each shard has good samples and a few damaged ones (`shard_damage`). If mmqk reads the shard, it must keep every good
sample, with the same token ids as in the undamaged shard, and count every other sample as dropped. It may refuse the
shard, in one sentence that names it, only if the archive itself is damaged. It must write nothing outside the output
and cache folders, and use less memory than `bound`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import webdataset.tariterators  # noqa: F401
from PIL import Image

from mmqk.data import tokenize
from mmqk.data.shards import __main__ as shards
from mmqk.data.shards.images import FORMATS, MAX_PIXELS
from mmqk.data.shards.manifest import Manifest, Shard, sha256_file, write_manifest
from mmqk.data.tokenizers import autoencoder  # noqa: F401  (imported here once, before each case forks)
from mmqk.data.tokens.cache import open_source
from mmqk.data.tokens.folder import is_token_folder, open_tokens, read_header
from mmqk.data.tokens.online import LEAST_UNUSABLE, MOST_UNUSABLE, open_online
from mmqk.store import cli_main
from tests.soak.shard_damage import (
    BLOCK,
    IMAGES,
    archive_damage,
    broken,
    line_damage,
    lists,
    member,
    odd,
    text,
)
from tests.tiny import documents, samples, write_tiny_data

CASES, QUICK, SECONDS = 5000, 60, 30.0
GOOD = 16
MiB = 2**20
# Largest allowed growth of resident memory for a shard of small files: the tokenizers and torch's first call (about
# 60 MiB), the text that Pillow unpacks from one PNG (at most 64 MiB), and a line or JSON at its limit of 16 MiB with
# its copies.
MEMORY = 256 * MiB
# A decoded image has 4 bytes per pixel, and the conversions to 8 bits make up to five copies.
BYTES_A_PIXEL = 24
# Limit of the address space; a reader that trusts a false size in a header exceeds it and fails.
ADDRESSES = 3 * 2**30

Blobs = list[tuple[str, bytes]]


def files_of(kind: str, n: int) -> dict[str, bytes]:
    """Return the files of good sample n."""
    _, image, meta = next(iter(samples(1, n)))
    if kind == "pair":
        return {"webp": image, "json": json.dumps(meta).encode()}
    record = {"images": ["0.webp", None], "texts": [None, meta["caption"]]}
    return {"0.webp": image, "json": json.dumps(record).encode()}


def good(kind: str) -> Blobs:
    if kind == "text":
        return [(f"good-{n}", json.dumps(document).encode()) for n, document in enumerate(documents(GOOD, 0))]
    return [(key := f"good-{n}", b"".join(member(f"{key}.{field}", content) for field, content in
             files_of(kind, n).items())) for n in range(GOOD)]  # fmt: skip


def prepare(shared: Path) -> None:
    """Write the tokenizers, and the ids of the good samples of each kind."""
    write_tiny_data(shared)
    for kind in ("pair", "interleaved", "text"):
        blobs = good(kind)
        shard = shared / f"{kind}.shard"
        shard.write_bytes(b"\n".join(b for _, b in blobs) if kind == "text" else
                          b"".join(b for _, b in blobs) + bytes(2 * BLOCK))  # fmt: skip
        assert tokenized(kind, shard, shared, shared / f"{kind}.out")[0] == 0
        ids = [ids.tolist() for ids in of_store(open_tokens(shared / f"{kind}.out")["train"])]
        (shared / f"{kind}.json").write_text(json.dumps(ids))


def of_store(store: Any) -> list[np.ndarray]:
    return [store[n] for n in range(len(store))]


def called(main: Callable[[Any], int], argv: Any = None) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.redirect_stderr(told):
        code = cli_main(main)(argv)
    said = told.getvalue()
    assert "Traceback" not in said and all(c.isprintable() for c in said.replace("\n", "")), repr(said)
    assert len(said) < 5000, f"{len(said)} characters of output: {said[:300]}"
    # Exit code 1 means an error of the operating system, in one sentence, or a failed run of a grid. The table of the
    # grid has the reason.
    sentence = said.count("mmqk: ") == 1 or (code == 1 and "a run failed" in said)
    assert code == 0 or (code in (1, 2) and sentence), (code, said)
    return code, said


def tokenized(kind: str, shard: Path, shared: Path, out: Path) -> tuple[int, str]:
    flags = {"text": ["--text"], "pair": ["--shards"], "interleaved": ["--interleaved", "--shards"]}[kind]
    return called(tokenize.main, [*flags, str(shard), f"--out={out}", f"--tokenizers={shared / 'tokenizers'}",
                                  "--workers=0", "--val-fraction=0"])  # fmt: skip


def bad_sample(kind: str, n: int, rng: random.Random) -> dict[str, bytes]:
    """Return the files of a sample with a damaged image or text."""
    files = files_of(kind, GOOD + n)
    image, *_ = files
    if rng.random() < 0.6:
        files[image] = rng.choice(IMAGES)(rng)
    else:
        files["json"] = text(rng) if kind == "pair" else lists(rng)
    if rng.random() < 0.1:
        del files[rng.choice(list(files))]
    if rng.random() < 0.2:
        files["txt" if rng.random() < 0.7 else "0.jpg"] = text(rng)
    return files


def tar(kind: str, rng: random.Random) -> tuple[bytes, set[str], bool, int | None, list[bytes]]:
    """Return the archive, the samples to keep, whether the archive may be refused, its number of files if known, and
    its images."""
    blobs, images, count, refusable = good(kind), [], 2 * GOOD, False
    for n in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(blobs) + 1)
        if rng.random() < 0.7:
            files = bad_sample(kind, n, rng)
            images += [content for field, content in files.items() if field != "json"]
            blobs.insert(
                place, (f"bad-{n}", b"".join(member(f"bad-{n}.{field}", c) for field, c in files.items()))
            )
            count += len(files)
        else:
            blob = odd(rng)
            blobs.insert(place, ("", blob))
            with tarfile.open(fileobj=io.BytesIO(blob + bytes(2 * BLOCK))) as one:
                count += sum(not info.isdir() for info in one)
    kept = {key for key, _ in blobs if key.startswith("good")}
    names = Counter(key for key, _ in blobs)
    if rng.random() < 0.15:
        place = rng.randrange(len(blobs))
        kept -= {blobs[place][0]}  # a long name or pax header applies to the file after it
        blobs.insert(place, ("", broken(rng)))
        return b"".join(b for _, b in blobs) + bytes(2 * BLOCK), kept, True, None, images
    if rng.random() < 0.25:
        content, touched = archive_damage(blobs, rng)
        return content, kept - touched, True, None, images
    refusable = names[""] > 1
    return b"".join(b for _, b in blobs) + bytes(2 * BLOCK), kept, refusable, count, images


def jsonl(rng: random.Random) -> tuple[bytes, set[str], bool, int | None]:
    blobs = good("text")
    for _ in range(rng.choice((0, 1, 2, 3))):
        blobs.insert(rng.randrange(len(blobs) + 1), ("", text(rng).replace(b"\n", b" ")))
    content, refusable = line_damage([b for _, b in blobs], rng)
    return content, {key for key, _ in blobs if key}, refusable, None


def bound(content: bytes, images: list[bytes]) -> int:
    pixels = 0
    for image in images:
        with contextlib.suppress(Exception), Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            size = opened.size[0] * opened.size[1]
            pixels = max(pixels, size if size <= MAX_PIXELS else 0)
    return MEMORY + 4 * len(content) + BYTES_A_PIXEL * pixels


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def case(number: int, rng: random.Random, shared: Path, work: Path) -> str:
    kind = rng.choices(("pair", "interleaved", "text"), (14, 2, 4))[0]
    images: list[bytes] = []
    if kind == "text":
        content, kept, refusable, count = jsonl(rng)
    else:
        content, kept, refusable, count, images = tar(kind, rng)
    folder = work / "a/b/c"  # a file name with .. then still leads into the work folder
    folder.mkdir(parents=True)
    (work / "here").mkdir()
    os.chdir(work / "here")
    shard = folder / "train-00000.tar"
    shard.write_bytes(content)
    most = bound(content, images)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = peak()

    code, said = tokenized(kind, shard, shared, work / "out")
    outcome, dropped = "refused", Counter[str]()
    reference = json.loads((shared / f"{kind}.json").read_text())
    want = {f"good-{n}": ids for n, ids in enumerate(reference)}
    if code:
        assert refusable and (shard.name in said or "hold no samples" in said), (refusable, said)
    else:
        dropped = token_folder(work / "out", kept, want, count)
        outcome = "dropped and counted" if dropped.total() else "all kept"
    if kind == "pair":
        outcome += f", streamed: {streaming(shard, shared, work, code, kept, want, dropped)}"
    if rng.random() < 0.25 and kind != "interleaved":
        outcome += f", cached: {cached(kind, shard, shared, work)}"
    grown = peak() - before
    assert grown <= most, f"{grown / MiB:.0f} MiB more memory, above {most / MiB:.0f}"
    made = {path.relative_to(work).parts[0] for path in work.rglob("*") if path.is_file() and path != shard}
    beside = [path for path in (work / "a").rglob("*.*") if path.is_file() and path.parent != folder]
    beside += (work / "here").iterdir()
    assert made <= {"out", "cache", "a"} and not beside, (made, beside)
    assert not Path("/mmqk-evil.jpg").exists()
    return f"{kind} {outcome}"


def token_folder(out: Path, kept: set[str], want: dict[str, Any], count: int | None) -> Counter[str]:
    """Check a token folder and return the number of dropped samples by reason."""
    header, found = read_header(out), of_store(open_tokens(out)["train"])
    (record,) = header["about"]["shards"]
    dropped = Counter(header["dropped"])
    assert len(found) + dropped.total() == record["samples"], (
        len(found),
        header["dropped"],
        record["samples"],
    )
    named = [name.rpartition(": ")[2] for names in header["about"]["examples"].values() for name in names]
    assert not kept & set(named), f"dropped good samples: {header['about']['examples']}"
    rest = iter([ids.tolist() for ids in found])
    lost = [key for key, ids in want.items() if key in kept and ids not in rest]  # in order
    assert not lost, f"not among the documents, in order: {lost} ({header['dropped']})"
    if count is not None:
        unread = sum(header["about"]["unread"]["counts"].values())
        assert record["files"] == count, f"{record['files']} of {count} files counted"
        assert 2 * len(found) <= count - unread <= 4 * len(found), (
            len(found),
            count,
            header["about"]["unread"],
        )
    return dropped


def streaming(shard: Path, shared: Path, work: Path, refused: int, kept: set[str], want: dict[str, Any],
              dropped: Counter[str]) -> str:  # fmt: skip
    """Read all pairs twice, as training does, and return the outcome. The second read uses the stored index."""
    outcomes = []
    for _ in range(2):
        ids: dict[str, list[int]] = {}
        stores: dict[str, Any] = {}

        def read(_: Any, stores: dict[str, Any] = stores, ids: dict[str, list[int]] = ids) -> int:
            stores |= open_online(str(shard), shared / "tokenizers", work / "cache", 0.0)
            pairs = stores["train"]
            for n, (_, sample) in enumerate(pairs.samples_N2):
                ids[pairs.shards[0].keys[sample]] = pairs[n].tolist()
            return 0

        code, said = called(read)
        if not stores:
            assert code == refused == 2 and shard.name in said, (refused, said)
            outcomes.append("refused")
            continue
        assert not refused, f"refused when tokenized, but not when streamed: {said}"
        pairs = stores["train"]
        total, bad = pairs.account.total, dropped.total()
        if code:
            allowed = bad > max(1, MOST_UNUSABLE * total) or bad >= LEAST_UNUSABLE
            assert allowed and shard.name in said and "cannot be used" in said, (dropped, total, said)
            outcomes.append("too many dropped")
        else:
            assert Counter(pairs.skipped.values()) == dropped, (pairs.skipped, dropped)
            assert pairs.account.read == total, (pairs.account.read, total)
            different = [key for key in kept if ids.get(key) != want[key]]
            assert not different, f"other ids of good samples: {different}"
            outcomes.append("read")
    assert outcomes[0] == outcomes[1], outcomes
    return outcomes[0]


def cached(kind: str, shard: Path, shared: Path, work: Path) -> str:
    """Build the token cache of a manifest, as mmqk.train does, and return the outcome.

    The shard must be refused, or the cache must have all documents of the token folder.
    """
    folder, stores = shard.parent, dict[str, Any]()
    val = shared / ("pairs/val-00000.tar" if kind == "pair" else "text/val.jsonl.xz")
    shutil.copy(val, folder)
    if kind == "pair":
        code, said = called(shards.main, [str(folder)])
    else:
        code, said, out = 0, "", work / "out"
        n = read_header(out)["about"]["shards"][0]["samples"] if is_token_folder(out) else GOOD
        splits = {
            "train": (Shard(shard.name, n, sha256_file(shard)),),
            "val": (Shard(val.name, 8, sha256_file(val)),),
        }
        write_manifest(folder, Manifest(splits, {}))
    if not code:
        source = (kind, folder, shared / "tokenizers", work / "cache")
        code, said = called(lambda _: stores.update(open_source(*source)) or 0)
    if code:
        assert shard.name in said, said
        return "refused"
    one, other = (
        [ids.tolist() for ids in of_store(store["train"])] for store in (stores, open_tokens(work / "out"))
    )
    assert one == other, f"{len(one)} documents in the cache, {len(other)} in the token folder"
    return "read"
