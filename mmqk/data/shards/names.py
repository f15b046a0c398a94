"""Which shards a pattern or a URL names, and the file systems that have them. No shard is read here."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from braceexpand import braceexpand

from mmqk.store import UserError, check_local, check_regular
from mmqk.store.errors import reason_of

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
    found: list[str] = []
    for name in _braces(pattern):
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


def base_name(name: str) -> str:
    """Return the file name of a shard."""
    return name.partition("?")[0].rpartition("/")[2] if is_remote(name) else os.path.basename(name)


def expand(patterns: Sequence[str]) -> list[Path]:
    """Return the files that patterns name, in order.

    A pattern can have brace ranges (``a{000..012}b``), lists (``{a,b}``) and globs.

    Raises:
        UserError: a pattern names no file, a missing file, a folder, a pipe or a URL, or a file is named twice.
    """
    files: dict[str, Path] = {}
    real_folder = cache(os.path.realpath)  # a folder can have 100,000 shards
    for pattern in patterns:
        for path in _files_of(pattern):
            check_regular(path)
            folder, name = os.path.split(path)
            real = os.path.realpath(path) if os.path.islink(path) else os.path.join(real_folder(folder), name)
            if files.setdefault(real, path) is not path:
                raise UserError(f"{path} is named twice: name each file once")
    if not files:
        raise UserError("no files are named: give at least one path, such as 'shards/{00000..00099}.tar'")
    return list(files.values())


def _braces(pattern: str) -> list[str]:
    """Return the names that the brace ranges and lists of a pattern stand for."""
    try:
        return list(braceexpand(pattern, escape=False))
    except ValueError:  # unbalanced braces
        return [pattern]


def _files_of(pattern: str) -> Iterator[Path]:
    check_local(pattern)
    whole = os.path.expanduser(pattern)
    for name in [whole] if os.path.exists(whole) else _braces(whole):
        if os.path.exists(os.path.join(name, "tokens.json")):
            raise UserError(f"{name} is a token folder, not a shard: name shards, or read it with data.read tokens")
        if os.path.isdir(name):
            raise UserError(f"{name} is a folder: name its files, such as {os.path.join(name, '*.tar')!r}")
        if os.path.exists(name):
            yield Path(name)
        elif matches := sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else []:
            yield from map(Path, matches)
        elif name == whole:
            raise UserError(f"{pattern} names no file: check the path")
        else:
            raise UserError(f"{pattern} names {name}, which does not exist: check the path and the range")
