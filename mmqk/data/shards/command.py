"""Write the manifest of your own shards: ``mmqk data shards FOLDER``."""

from __future__ import annotations

from pathlib import Path

from mmqk.data.shards.manifest import MANIFEST, Manifest, Shard, sha256_file, write_manifest
from mmqk.data.shards.pairs import pairs_of
from mmqk.data.shards.samples import Unread, count_unread
from mmqk.data.shards.tars import index_tar
from mmqk.store import OneSentenceParser, UserError, check_regular
from mmqk.store.files import writing


def main(argv: list[str] | None = None) -> int:
    """Write the manifest of a folder of WebDataset shards."""
    parser = OneSentenceParser(
        prog="mmqk data shards",
        description="Write manifest.json for your own shards: tar files named SPLIT-NUMBER.tar.\n"
        "A sample is a 64x64 image (webp, png or jpg) and a caption (json with\n'caption', or txt).",
    )
    parser.add_argument("folder", type=Path, help="the folder with the shards")
    folder: Path = parser.parse_args(argv).folder
    unread, files = Unread(), 0
    splits: dict[str, tuple[Shard, ...]] = {}
    for path in sorted(folder.glob("*-*.tar")):
        check_regular(path)
        index = index_tar(path)
        samples = sum(1 for _ in pairs_of(index))  # every pair is checked
        split = path.name.rsplit("-", 1)[0]
        splits[split] = (*splits.get(split, ()), Shard(path.name, samples, sha256_file(path)))
        for key, sample in index:
            count_unread(index.unread, "pair", key, sample)
        unread.take(index.unread, f"{path.name}: ")
        files += index.files
    if not splits:
        raise UserError(f"{folder} has no shards: name them SPLIT-NUMBER.tar, such as train-00000.tar")
    manifest = Manifest(splits, {})
    with writing(folder, "make it writable"):
        write_manifest(folder, manifest)
    print(f"{folder / MANIFEST}: " + ", ".join(f"{split} {manifest.count(split)}" for split in splits))
    for line in unread.lines(files):
        print(line)
    return 0
