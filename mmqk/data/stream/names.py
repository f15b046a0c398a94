"""The names of the shards of a source, its identity, and the file systems that have them. No shard is read here."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from braceexpand import braceexpand

from mmqk.data.shards.archives import expand
from mmqk.data.shards.manifest import MANIFEST, SHARE, load_manifest, manifest_hash
from mmqk.store import UserError, hash_fraction, identity_hash

TIMEOUT = 30  # seconds without a byte
REMOTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def is_remote(name: str) -> bool:
    """Return whether a name is a URL."""
    return REMOTE.match(name) is not None


def shard_names(pattern: str) -> list[str]:
    """Return the shards that a pattern names, in order: URLs, or the paths of `expand`.

    A brace range of URLs is not compared with what exists; a glob lists its folder.

    Raises:
        UserError: the pattern names no shard, or the engine of its protocol is missing.
    """
    if not is_remote(pattern):
        return [str(path) for path in expand([pattern])]
    try:
        names = list(braceexpand(pattern, escape=False))
    except ValueError:  # unbalanced braces
        names = [pattern]
    found: list[str] = []
    for name in names:
        address = name.partition("://")[2]
        if "*" in address or "[" in address or ("?" in address and not name.startswith("http")):
            system = filesystem(name)
            try:
                found += [system.unstrip_protocol(path) for path in sorted(system.glob(name))]
            except Exception as error:
                raise UserError(
                    f"{name} cannot be listed ({reason_of(error)}): check the address and the access"
                ) from None
        else:
            found.append(name)
    if not found:
        raise UserError(f"{pattern} names no shard: check the address")
    if len(set(found)) < len(found):
        raise UserError(f"{pattern} names a shard twice: name each shard once")
    return found


def filesystem(url: str) -> Any:
    """Return fsspec's file system of a URL, with time limits.

    Raises:
        UserError: its engine is not installed, or the protocol is unknown.
    """
    import fsspec

    protocol = url.partition("://")[0]
    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT)
        options["client_kwargs"] = {"timeout": timeout}
    elif protocol in ("s3", "s3a"):
        options["config_kwargs"] = {"connect_timeout": TIMEOUT, "read_timeout": TIMEOUT}
    try:
        return fsspec.filesystem(protocol, **options)
    except ImportError:
        extra = "mmqk[s3]" if protocol.startswith("s3") else f"the package of fsspec for {protocol}://"
        raise UserError(f"{url} needs a package that is not installed: pip install '{extra}'") from None
    except ValueError as error:
        raise UserError(f"{url} cannot be read ({error}): give a local path, s3://, https:// or hf://") from None


def split_shards(pattern: str, val_fraction: float | None) -> tuple[list[str], list[str]]:
    """Return the names of the training shards and of the held-out shards.

    A manifest lists both. Of a pattern, a shard is held out if `hash_fraction` of its file name is below
    ``val_fraction`` (by default 0.01); if none is, the one with the smallest fraction.
    """
    folder = Path(pattern)
    if not is_remote(pattern) and (folder / MANIFEST).exists():
        splits = load_manifest(folder).splits
        train, val = ([str(folder / shard.file) for shard in splits.get(split, ())] for split in ("train", "val"))
        if not train or not val:
            raise UserError(f"{folder / MANIFEST} lists no shard of the splits train and val: write it again")
        return train, val
    names = shard_names(pattern)
    if len(names) < 2:
        raise UserError(
            f"{pattern} names one shard, but training and validation need one each: split it into several tars, or"
            " make a token folder with mmqk data tokenize"
        )
    fractions = [hash_fraction(base_name(name).encode()) for name in names]
    share = max(val_fraction or SHARE, float(np.nextafter(min(fractions), 1)))
    train = [name for name, fraction in zip(names, fractions, strict=True) if fraction >= share]
    if not train:
        raise UserError(f"data.val_fraction {val_fraction} holds out all {len(names)} shards: give a smaller one")
    return train, [name for name, fraction in zip(names, fractions, strict=True) if fraction < share]


def stream_hash(pattern: str) -> str:
    """Return the identity of the shards (10 hex digits): the hash of the manifest, or of the names of the shards and
    of the sizes of local ones. No shard is read."""
    if not is_remote(pattern) and (Path(pattern) / MANIFEST).exists():
        return manifest_hash(pattern)
    sizes = [[base_name(name), None if is_remote(name) else os.stat(name).st_size] for name in shard_names(pattern)]
    return identity_hash({"shards": sizes})


def base_name(name: str) -> str:
    """Return the file name of a shard."""
    return name.partition("?")[0].rpartition("/")[2] if is_remote(name) else os.path.basename(name)


def reason_of(error: BaseException) -> str:
    """Return an error of an engine in a few words."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    return re.sub(r"^shard \S+ ", "it ", text).partition(": copy or download")[0][:200]
