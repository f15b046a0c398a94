"""Write the shards of a manifest: tars of image+caption pairs, and xz-compressed JSON lines of text."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmqk.data.shards.manifest import Shard, sha256_file

# liblzma's manual recommends lc=4 and pb=0 for text.
_TEXT_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]


def write_shard(path: Path, samples: Iterable[tuple[str, bytes, dict[str, Any]]]) -> Shard:
    """Write (key, lossless WebP bytes, metadata) as one WebDataset tar; equal samples give equal bytes.

    Raises:
        ValueError: a key contains a dot, at which WebDataset would split it.
    """
    count = 0
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, webp, meta in samples:
            if "." in key:
                raise ValueError(f"sample key {key!r} contains a dot")
            text = json.dumps(meta, ensure_ascii=False, separators=(",", ":")).encode()
            for name, content in ((f"{key}.webp", webp), (f"{key}.json", text)):
                member = tarfile.TarInfo(name)  # mtime, uid and gid are 0
                member.size = len(content)
                member.mode = 0o644
                tar.addfile(member, io.BytesIO(content))
            count += 1
    return Shard(path.name, count, sha256_file(path))


def write_documents(path: Path, documents: Iterable[dict[str, str]]) -> Shard:
    """Write documents (``text``, ``source``) as xz-compressed JSON lines; equal documents give equal bytes."""
    count = 0
    with lzma.open(path, "wt", filters=_TEXT_FILTERS, encoding="utf-8", newline="\n") as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
            count += 1
    return Shard(path.name, count, sha256_file(path))
