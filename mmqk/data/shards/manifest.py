"""The manifest of a folder of shards: the files of each split, with their sample counts and sha256.

``mmqk data shards FOLDER`` writes one for your own shards (``train-*.tar``, ``val-*.tar``).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmqk.store import DamagedFile, UserError, check_regular, identity_hash, read_json, write_json

MANIFEST = "manifest.json"
RESTORE = "restore it with git, or rebuild with python -m data.build"


@dataclass(frozen=True)
class Shard:
    """One file: its name in the folder, the number of samples (documents) in it, and its sha256."""

    file: str
    samples: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A folder's shards by split, in the order in which they are read, and free-form metadata on their origin."""

    splits: dict[str, tuple[Shard, ...]]
    about: dict[str, Any]

    def count(self, split: str) -> int:
        """Return the number of samples in a split."""
        return sum(shard.samples for shard in self.splits[split])


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into ``folder``."""
    splits = {split: [asdict(shard) for shard in shards] for split, shards in manifest.splits.items()}
    write_json(folder / MANIFEST, {**manifest.about, "splits": splits})


def load_manifest(folder: Path | str) -> Manifest:
    """Read ``manifest.json``.

    Raises:
        UserError: the file is missing, or is not a manifest.
    """
    path = Path(folder) / MANIFEST
    record = read_json(path, advice=RESTORE)
    if record is None:
        raise UserError(f"{path} is missing: {RESTORE}; for your own shards run mmqk data shards {folder}")
    try:
        splits = {
            split: tuple(Shard(s["file"], int(s["samples"]), s["sha256"]) for s in shards)
            for split, shards in record.pop("splits").items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(path, f"it is not a manifest: {error!r}", RESTORE) from None
    return Manifest(splits, record)


def manifest_hash(folder: Path | str) -> str:
    """Return the hash of a folder's samples: 10 hex digits over split, file, count and sha256 of every shard."""
    manifest = load_manifest(folder)
    return identity_hash({split: [asdict(s) for s in shards] for split, shards in manifest.splits.items()})


def checked_shards(folder: Path | str, split: str) -> list[tuple[Path, Shard]]:
    """Return the files of a split, after a comparison with the manifest.

    Raises:
        UserError: the manifest lacks the split, or a shard is missing or differs from the manifest.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    if split not in manifest.splits:
        splits = ", ".join(manifest.splits)
        raise UserError(f"{folder / MANIFEST} has no split {split!r}: choose one of {splits}")
    shards = []
    for shard in manifest.splits[split]:
        path = folder / shard.file
        check_regular(path)
        if not path.is_file():
            raise UserError(f"shard {path} is missing: {RESTORE}")
        try:
            digest = sha256_file(path)
        except OSError as error:
            raise UserError(f"shard {path} cannot be read ({error.strerror}): {RESTORE}") from None
        if digest != shard.sha256:
            raise UserError(
                f"shard {path} differs from its manifest "
                f"(sha256 {digest[:10]}, expected {shard.sha256[:10]}): {RESTORE}"
            )
        shards.append((path, shard))
    return shards
