"""Functions that make damaged images, captions, tar members, archives and lines from a `random.Random`."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import struct
import tarfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from tests.shards.test_images import _announcing, _tiled, encoded, noise, png
from tests.tiny import draw

Rng = random.Random
Damage = Callable[[Rng], bytes]
BLOCK = tarfile.BLOCKSIZE


def flipped(content: bytes, rng: Rng, first: int = 0, bits: int = 8) -> bytes:
    """Flip up to ``bits`` random bits, none of them before byte ``first``."""
    damaged = bytearray(content)
    for _ in range(rng.randint(1, bits)):
        damaged[rng.randrange(first, len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut(content: bytes, rng: Rng) -> bytes:
    return content[: rng.randrange(len(content))]


def picture(rng: Rng, side: int | None = None) -> bytes:
    """Return a good image of any format; its file name may have the suffix of another format."""
    image = draw("red", "bar", rng.randrange(99)).resize((side or rng.choice((1, 40, 64, 200)),) * 2)
    return encoded(image, rng.choice(("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO")))


def mode(rng: Rng) -> bytes:
    """Return an image of a mode other than RGB, or with transparency."""
    base = noise(70, 70)
    deep = np.linspace(0, rng.choice((1.0, 255.0, np.nan, np.inf)), 4900, dtype=np.float32).reshape(70, 70)
    return rng.choice((
        lambda: encoded(Image.fromarray((np.asarray(base)[..., 0].astype(np.uint16) * 257)), "PNG"),
        lambda: encoded(base.convert("CMYK"), rng.choice(("JPEG", "TIFF"))),
        lambda: encoded(base.quantize(8), rng.choice(("PNG", "GIF")), transparency=rng.randrange(8)),
        lambda: encoded(base.quantize(8), "PNG", transparency=rng.randbytes(rng.randint(1, 8))),
        lambda: encoded(Image.fromarray(deep), "TIFF"),
        lambda: encoded(base.convert("LA"), "PNG"), lambda: encoded(base.convert("1"), "TIFF"),
    ))()  # fmt: skip


def animated(rng: Rng) -> bytes:
    frames = [Image.new("RGB", (80, 80), color) for color in ("red", "green", "blue")]
    whole = encoded(frames[0], rng.choice(("WEBP", "GIF", "PNG")), save_all=True, append_images=frames[1:])
    return rng.choice((whole, cut(whole, rng), flipped(whole, rng)))


def exif(rng: Rng) -> bytes:
    """Return a JPEG whose EXIF has orientations above 8, 60 kB of tags, or a tag directory that refers to itself."""
    entry = rng.choice(((0x0112, 3, 1, rng.randrange(10)), (0x8769, 4, 1, 8), (0x8825, 4, 2**30, 8),
                        (0x0112, rng.randrange(14), rng.choice((0, 1, 2**31)), 2**31)))  # fmt: skip
    tags = b"Exif\0\0II*\0" + struct.pack("<IHHHII", 8, rng.choice((1, 60000)), *entry)
    tail = struct.pack("<I", rng.choice((0, 8, 2**31)))
    return encoded(noise(90, 60), "JPEG", exif=(tags + tail).ljust(rng.choice((0, 60000)), b"x"))


def bomb(rng: Rng) -> bytes:
    """Return an image whose pixels, text or color profile are far larger than the file."""
    side = rng.choice((0, 1, 2000, 8193, 60000, 2**31 - 1))
    shape = (side, rng.choice((0, 1, side)), rng.choice((8, 16)), rng.choice((0, 2, 6)), 0, 0, 0)
    zeros = zlib.compress(bytes(2**25), 1)
    chunk = rng.choice(
        ((b"zTXt", b"k\0\0" + zeros), (b"iCCP", b"k\0\0" + zeros), (b"iTXt", b"k\0\1\0\0\0" + zeros))
    )
    return rng.choice((
        lambda: png(shape, bytes(10**6)), lambda: png((64, 64, 8, 2, 0, 0, 0), bytes(193 * 64), chunk),
        lambda: _announcing(rng.choice((16, 3000, 16383)), 16383), lambda: _tiled(rng.choice((64, 60000, 2**32 - 1))),
        lambda: encoded(Image.new("1", (65535, rng.choice((1, 900, 2000)))), "GIF"), lambda: scans(rng),
        lambda: sized_bmp(rng),
    ))()  # fmt: skip


def scans(rng: Rng) -> bytes:
    """Return a progressive JPEG whose last scan is repeated: each scan costs decoding time, even a short one."""
    side = rng.choice((64, 1000))
    whole = encoded(noise(side, side), "JPEG", progressive=True, quality=5)
    start = whole.rindex(b"\xff\xda")
    return whole[:start] + whole[start:-2] * rng.choice((10, 20000)) + whole[start:]


def sized_bmp(rng: Rng) -> bytes:
    whole = bytearray(encoded(noise(20, 20), "BMP"))
    whole[18:26] = struct.pack("<ii", *(rng.choice((0, -1, 20, -20, 3000, 2**31 - 1)) for _ in "wh"))
    return bytes(whole)


NO_IMAGES = (b"", b"\0" * 500, b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%!PS-Adobe-3.0 EPSF-3.0\n",
             b"\0\0\1\0" + bytes(30), b"<html>404</html>")  # fmt: skip
IMAGES: tuple[Damage, ...] = (
    lambda rng: flipped(picture(rng), rng), lambda rng: cut(picture(rng), rng), mode, animated, exif, bomb, bomb,
    lambda rng: rng.choice((*NO_IMAGES, rng.randbytes(300))), lambda rng: picture(rng) + rng.randbytes(50), picture,
)  # fmt: skip


def text(rng: Rng) -> bytes:
    """Return a caption or a document as JSON, damaged in form or in content."""
    good = "a flat red bar on a white ground"
    value: Any = rng.choice((
        good, "", "  \n", "\ud800", "\0", good * 3000, "é" * (2**22 if rng.random() < 0.05 else 9), None, 3,
        float("nan"), [good], {"caption": good}, True, 10**400, "\x1b[31m" + good, "\u202e" + good,
    ))  # fmt: skip
    names = rng.choice((("caption", "text"), ("caption", "text"), ("Caption",), ("text", "images")))
    whole = json.dumps(dict.fromkeys(names, value), ensure_ascii=rng.random() < 0.5).encode(
        "utf-8", "surrogatepass"
    )
    depth = rng.choice((5, 900, 10**5))
    return rng.choice((
        lambda: whole, lambda: whole, lambda: flipped(whole, rng), lambda: cut(whole, rng), lambda: whole + whole,
        lambda: b'{"caption": ' + b"[" * depth + b"]" * depth + b', "text": "x"}', lambda: b"\xef\xbb\xbf" + whole,
        lambda: whole.decode("utf-8", "replace").encode("utf-16"), lambda: whole.replace(b"a", b"\xff"), lambda: b"",
        lambda: b'{"caption": ' + b"9" * rng.choice((4000, 10**5)) + b"}", lambda: b"NaN", lambda: b'["caption"]',
        lambda: b'{"caption": "x", "caption": 4}', lambda: b" " * rng.choice((9, 2**24)) + whole,
        lambda: good.encode(),
    ))()  # fmt: skip


def lists(rng: Rng) -> bytes:
    """Return the damaged JSON of an interleaved document."""
    items = [None, "x", "", 0, "0.webp", "../0.webp", "https://a/0.webp", ["x"], float("nan"), "\ud800"]
    record = {name: [rng.choice(items) for _ in range(rng.randrange(4))] for name in ("images", "texts")}
    if rng.random() < 0.3:
        record[rng.choice(("images", "texts"))] = rng.choice((None, "x", {"0": "x"}, 5))  # type: ignore[assignment]
    return json.dumps(record).encode() if rng.random() < 0.7 else text(rng)


def member(name: str, content: bytes = b"", form: int = tarfile.GNU_FORMAT, **fields: Any) -> bytes:
    """Return one file of an archive with its headers."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(form, "utf-8", "surrogateescape") + content.ljust(
        -(-len(content) // BLOCK) * BLOCK, b"\0"
    )


def edited(blob: bytes, place: int, value: bytes, checksum: bool = True) -> bytes:
    """Return the archive with ``value`` at byte ``place`` of its first header, and with a new checksum on demand."""
    header = bytearray(blob[:BLOCK])
    header[place : place + len(value)] = value
    if checksum:
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + blob[BLOCK:]


def pax(name: str, content: bytes, **headers: str) -> bytes:
    return member(name, content, tarfile.PAX_FORMAT, pax_headers=headers)


def odd_name(rng: Rng) -> str:
    return rng.choice(("../../../evil.jpg", "/mmqk-evil.jpg", "x/../../evil.json", "caf\udce9.jpg", "\x1b[2J.jpg",
                       "plain", ".hidden.jpg", "__meta__", "n/" * 2000 + "a.jpg", "/" * 200000, "a" * 4000 + ".jpg",
                       "k.", "k..jpg", "k.JPG", "k.__bad__", "k.__key__", "k.__url__", "k.inner.tar", "\n.jpg", "ſ.ſ",
                       "k.0.webp", "99999999999.webp", "k.99999999999.webp", "e\0.jpg", "e.jpg\0"))  # fmt: skip


def odd(rng: Rng, name: str = "") -> bytes:
    """Return a member that belongs to no good sample and leaves the archive readable."""
    name = name or odd_name(rng)
    inner = member("inner.jpg", b"x") + bytes(2 * BLOCK)
    kinds = (
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.FIFOTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.DIRTYPE,
    )
    if rng.random() < 0.3:
        return member(
            name.replace("\0", ""),
            type=rng.choice(kinds),
            linkname=rng.choice(("../../x", "/etc/passwd", name)),
        )
    content = rng.choice((b"", b"x", inner, bytes(3000)))
    return pax("x", content, path=name) if "\0" in name or rng.random() < 0.3 else member(name, content)


def broken(rng: Rng) -> bytes:
    """Return a damaged member; a reader may refuse the archive that contains it."""
    blob = member("odd.jpg", bytes(700))
    kind = rng.choice(b"xgLKSV\0D9")
    sparse = rng.choice(({"GNU.sparse.map": "0,9,x"}, {"GNU.sparse.size": "9", "GNU.sparse.offset": "z"},
                         {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
                         {"GNU.sparse.name": "../x.jpg"}))  # fmt: skip
    return rng.choice((
        lambda: edited(blob, 156, bytes([kind])),
        lambda: edited(blob, rng.randrange(512), rng.randbytes(3), checksum=False),
        lambda: pax("odd.jpg", b"9\n" * 9, **sparse),
    ))()  # fmt: skip


def archive_damage(blobs: list[tuple[str, bytes]], rng: Rng) -> tuple[bytes, set[str]]:
    """Return a damaged archive and the samples whose bytes differ. A reader must keep the other samples, or refuse
    the archive."""
    end, whole = bytes(2 * BLOCK), b"".join(blob for _, blob in blobs)
    i = rng.randrange(len(blobs))
    if (kind := rng.randrange(8)) == 0:  # flipped bits
        key, _ = blobs[i]
        return b"".join(flipped(b, rng, bits=3) if n == i else b for n, (_, b) in enumerate(blobs)) + end, {
            key
        }
    before, after = (b"".join(blob for _, blob in part) for part in (blobs[:i], blobs[i:]))
    return {
        1: lambda: cut(whole + end, rng),
        2: lambda: (whole + end)[: len(before) + rng.choice((0, 1, BLOCK - 1, BLOCK))],
        3: lambda: before + bytes(BLOCK * rng.randint(1, 4)) + after + end,
        4: lambda: whole + end + rng.choice((whole + end, b"x", bytes(10240) + b"x", rng.randbytes(600))),
        5: lambda: rng.choice((gzip.compress, bz2.compress, lzma.compress))(whole + end),
        6: lambda: whole + rng.choice((b"", bytes(BLOCK), bytes(BLOCK - 1), rng.randbytes(BLOCK))),
        7: lambda: before + (blobs[i - 1][1] if rng.random() < 0.5 else broken(rng)) + after + end,
    }[kind](), {blobs[i][0]} if kind == 7 else set()


def line_damage(lines: list[bytes], rng: Rng) -> tuple[bytes, bool]:
    """Return a file of lines, plain or compressed, intact or damaged, and whether a reader may refuse it or end
    early."""
    whole = b"".join(line + b"\n" for line in lines)
    half = rng.randrange(len(lines))
    first, second = (b"".join(line + b"\n" for line in part) for part in (lines[:half], lines[half:]))
    pack = rng.choice((gzip.compress, lzma.compress, gzip.compress, lzma.compress, lambda data: data))
    joined = pack(first) + bytes(rng.choice((0, 4, 3))) + flipped(pack(second), rng, 0, 1)
    if pack(b"") == b"":
        return rng.choice((whole, whole[:-1], whole.replace(b"\n", b"\r\n"), b"\n\n" + whole)), False
    return rng.choice((
        lambda: (pack(whole), False), lambda: (pack(first) + pack(second), False),
        lambda: (flipped(pack(whole), rng, 6), True),
        lambda: (cut(pack(whole), rng), True), lambda: (joined, True), lambda: (pack(whole) + rng.randbytes(9), True),
        lambda: (pack(whole + bytes(2**26)), False), lambda: (bz2.compress(whole), True),
        lambda: (pack(first) + flipped(pack(second)[:12], rng, 0, 1) + pack(second)[12:], True),
    ))()  # fmt: skip
