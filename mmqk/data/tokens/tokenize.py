"""Tokenize shards once into a token folder: `mmqk data tokenize`.

No run uses this file: a run reads the folder that the command wrote. The command keeps finished shards, so that it
continues after an interruption.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mmqk.data.shards.files import expand
from mmqk.data.shards.manifest import SHARE, check_sha256, default_share, fractions_of, small_set_sentence
from mmqk.data.shards.read import read_samples
from mmqk.data.shards.samples import ReasonCounts
from mmqk.data.tokenizers.files import tokenizers_hash
from mmqk.data.tokenizers.training_data import add_sample_arguments
from mmqk.data.tokens.encode import TokenizeJob, run_shards
from mmqk.data.tokens.folder import SPLITS, Part, TokenWriter, is_token_folder, layout_of, read_header
from mmqk.progress import track
from mmqk.store import DamagedFile, OneSentenceParser, UserError, find_file, read_json, write_json
from mmqk.store.errors import slice_of
from mmqk.store.files import writing

# Subfolder with the options of the command and a record per finished shard; removed when all parts are written.
UNFINISHED = "unfinished"
OPTIONS = "options.json"

EPILOG = """\
--shards takes tar archives as img2dataset writes them ({key}.jpg .txt .json; also png, webp), or with --interleaved
documents of several images and texts ({key}.json with the lists "images" and "texts", {key}.0.webp ...). --text takes
JSON lines with a field "text", plain or compressed with gzip or xz. Put patterns (brace ranges, globs) in quotes.

A sample that cannot be used is dropped and counted by reason, and so is a document of more than 4 MiB of text; a
shard that cannot be read to its end is an error.
Finished shards are kept: after an interruption or a repair of a shard, the same command continues. Samples with
equal images (documents with equal content) fall into the same split. --fit decides how an image is made square:
crop keeps the center, pad adds white, stretch distorts.

examples:
  mmqk data tokenize --shards 'path/{00000..00099}.tar' --out tokens/mine
  mmqk data tokenize --shards 'docs/*.tar' --interleaved --fit pad --out tokens/docs
  mmqk data tokenize --shards 'path/*.tar' --out tokens/mine --slice 3/8     # on the third of 8 machines
  mmqk data tokenize --text 'web/*.jsonl.gz' --val-fraction 0.001 --out tokens/web
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = OneSentenceParser(
        prog="mmqk data tokenize", description="Turn your shards into a folder of tokens to train on.", epilog=EPILOG
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--shards", nargs="+", metavar="PATTERN", help="tar archives")
    source.add_argument("--text", nargs="+", metavar="PATTERN", help="JSON lines of text-only documents")
    p.add_argument("--out", type=Path, required=True, help="the folder to write")
    p.add_argument("--interleaved", action="store_true", help="the archives have interleaved documents, not pairs")
    p.add_argument("--tokenizers", type=Path, default=find_file("data/tokenizers"), help="(data/tokenizers)")
    workers = "worker processes; each tokenizes one shard at a time (default: one per core; 0: in this process)"
    p.add_argument("--workers", type=int, help=workers)
    every = "every N-th shard from the K-th on; all slices share --out"
    p.add_argument("--slice", type=slice_of, default=(1, 1), metavar="K/N", help=every)
    add_sample_arguments(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Tokenize the shards that are not done yet, and finish the folder when all shards are done.

    Raises:
        UserError: options are invalid or differ from those in the folder, a shard cannot be read, no sample can be
            used, or the folder cannot be written.
    """
    args = parser().parse_args(argv)
    _check(args)
    paths = expand(args.text or args.shards)
    kind = "text" if args.text else "interleaved" if args.interleaved else "pair"
    layout_of(args.tokenizers)  # raises for missing tokenizers before anything is written
    if is_token_folder(args.out):
        return _already_finished(args, kind, paths)
    k, n = args.slice
    name = "lock" if n == 1 else f"lock{k}of{n}"
    with writing(args.out, "give another --out or make room"), _locked(args.out, name):
        if is_token_folder(args.out):  # another process finished it before this one got the lock
            return _already_finished(args, kind, paths)
        place = args.out / UNFINISHED / OPTIONS
        begun = read_json(place, advice="remove the folder and run the command again")
        options = _options(args, kind, paths, begun)
        share = options["val_fraction"]
        job = TokenizeJob(kind, args.tokenizers, args.out, share, args.fit, args.max_pixels, args.caption_field)
        if begun is None:
            write_json(place, options)
        width = max(5, len(str(len(paths) - 1)))
        shards = {f"{i:0{width}d}": path for i, path in enumerate(paths)}
        mine = dict(list(shards.items())[k - 1 :: n])
        records = _tokenize(job, shards, mine, args.workers)
        if len(records) < len(shards) and not is_token_folder(args.out):
            print(f"slice {k}/{n} is done: {len(records)} of {len(shards)} shards are tokenized")
            return 0
        with FileLock(args.out / UNFINISHED / "finish"):  # slices may end at the same time
            if is_token_folder(args.out):
                shutil.rmtree(args.out / UNFINISHED)
                return 0
            _finish(job, options, [records[part] for part in shards])
    held_out = sum(record["documents"]["val"] for record in records.values())
    if args.val_fraction is None and held_out and share > SHARE:
        print(small_set_sentence(share))
    elif share and not held_out:
        again = f"remove {args.out} and run the command again without --val-fraction"
        advice = again if args.val_fraction else "give more documents"
        print(f"no document was held out: training needs some, so {advice}")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, ignored in (("interleaved", False), ("caption_field", None), ("fit", "crop")):
        if args.text and getattr(args, name) != ignored:
            raise UserError(f"--{name.replace('_', '-')} is for --shards: documents of --text have no images")
    if args.interleaved and args.caption_field:
        raise UserError("--caption-field is for pairs: interleaved documents have their texts in a list")
    if args.val_fraction is not None and not 0 <= args.val_fraction < 1:
        raise UserError(f"--val-fraction is {args.val_fraction}: give a share of at least 0 and below 1")
    if args.workers is not None and args.workers < 0:
        raise UserError(f"--workers is {args.workers}: give 0 or more")
    if args.max_pixels < 1:
        raise UserError(f"--max-pixels is {args.max_pixels}: give 1 or more")


def _readable(paths: list[Path], kind: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    for path in paths:
        with suppress(UserError):  # `_tokenize` names all damaged shards
            yield from read_samples(path, kind)


def _options(args: argparse.Namespace, kind: str, paths: list[Path], begun: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options that the documents depend on, by flag. Without --val-fraction, the share is that of the
    options ``begun``, with which the folder was made so far, or else the default.

    Raises:
        UserError: they differ from ``begun``.
    """
    share = args.val_fraction
    if share is None:
        samples = _readable(paths, kind)
        share = begun["val_fraction"] if begun else default_share(fractions_of(samples, kind, args.caption_field))
    options = {
        "kind": kind,
        "text" if args.text else "shards": [path.name for path in paths],
        "tokenizers": tokenizers_hash(args.tokenizers),
        "val_fraction": float(share),
        "fit": args.fit,
        "max_pixels": args.max_pixels,
        "caption_field": args.caption_field,
    }
    was = options if begun is None else begun
    if differing := [name for name in {**options, **was} if was.get(name) != options.get(name)]:
        flags = " and ".join("documents" if name == "kind" else f"--{name.replace('_', '-')}" for name in differing)
        raise UserError(f"{args.out} was made with other {flags}: give the same again, or another --out")
    return options


def _already_finished(args: argparse.Namespace, kind: str, paths: list[Path]) -> int:
    header = read_header(args.out)
    command = header.about.get("command")
    if not isinstance(command, dict):
        raise UserError(f"{args.out} holds tokens that another command made: give another --out")
    _options(args, kind, paths, command)
    for path, made in zip(paths, header.about["shards"], strict=False):
        # Another shard may have the same name, and a shard may have changed.
        advice = f"give another --out, or remove {args.out}"
        check_sha256(path, made["sha256"], f"the shard that {args.out} was made of", advice)
    print(f"{args.out} is finished: " + _counts(header.splits))
    return 0


def _locked(out: Path, name: str) -> AbstractContextManager[object]:
    """Lock the folder against other processes; return the context that unlocks it."""
    unfinished = out / UNFINISHED
    if out.exists() and not unfinished.is_dir() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not a token folder: give another --out")
    unfinished.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(unfinished / name, timeout=0).acquire()
    except Timeout:
        raise UserError(f"another process is writing {out}: wait for it, or give another --out") from None


def _tokenize(
    job: TokenizeJob, shards: dict[str, Path], mine: dict[str, Path], workers: int | None
) -> dict[str, dict[str, Any]]:
    """Tokenize those of ``mine`` that have no record yet; return the records of the shards that have one by then."""
    unfinished = job.out / UNFINISHED
    stats = {part: path.stat() for part, path in shards.items()}
    states = {part: [stat.st_size, stat.st_mtime_ns] for part, stat in stats.items()}
    records = _finished(unfinished, states)
    left = {part: path for part, path in mine.items() if part not in records}
    _remove_parts(job.out, set(left))
    broken: list[str] = []
    if records and left:
        print(f"continuing with {len(left)} of {len(shards)} shards", flush=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    results = run_shards(job, left, min(cores if workers is None else workers, len(left)))
    try:
        with closing(results):
            for part, kind, content in track(results, len(left), f"shards of {job.out} tokenized"):
                if kind == "unwritable":
                    raise UserError(
                        f"{job.out} cannot be written ({content}): make room and run the same command again"
                    )
                if kind == "done":
                    # Write the record last: a shard is finished if its record exists.
                    write_json(unfinished / f"{part}.json", {"state": states[part], "record": content})
                    records[part] = content
                else:
                    broken.append(content)
    except KeyboardInterrupt:
        # Count the record files: the interrupt may have come after a record was written and before it was stored in
        # `records`.
        kept = len(_finished(unfinished, states))
        print(f"{kept} of {len(shards)} shards are kept in {job.out}: the same command continues")
        raise
    if broken:
        more = f"; and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise UserError(
            f"{len(broken)} of {len(shards)} shards cannot be used ({'; '.join(broken[:3])}{more}): "
            "the others are kept, and the same command continues once these are repaired"
        )
    return records if len(mine) == len(shards) else _finished(unfinished, states)


def _finished(unfinished: Path, states: Mapping[str, list[int]]) -> dict[str, dict[str, Any]]:
    """Return the records of the finished shards by part. A shard is tokenized again if it has changed, or if
    its record is damaged."""
    records = {}
    for part, state in states.items():
        with suppress(DamagedFile):
            kept = read_json(unfinished / f"{part}.json") or {}
            if kept.get("state") == state:
                records[part] = kept["record"]
    return records


def _remove_parts(out: Path, parts: set[str]) -> None:
    # Remove parts and temporary files that an interrupted command wrote, or that come from an earlier state of a shard.
    for split in SPLITS:
        if (out / split).is_dir():
            for path in list((out / split).iterdir()):
                if re.split("[._]", path.name.lstrip("."))[0] in parts:
                    path.unlink()


def _finish(job: TokenizeJob, options: Mapping[str, Any], records: list[dict[str, Any]]) -> None:
    dropped, unread = ReasonCounts(), ReasonCounts()
    for record in records:
        source = f"{record['file']}: "
        dropped.take(ReasonCounts(record["dropped"], record["examples"]), source)
        unread.take(ReasonCounts(**record["unread"]), source)
    samples = sum(record["samples"] for record in records)
    files = sum(record.get("files", 0) for record in records)
    reasons = [*dropped.reason_lines(), *unread.unread_lines(files)]
    if dropped.total == samples:
        shutil.rmtree(job.out / UNFINISHED)  # so that the next attempt may use other options
        why = "; ".join(line.strip() for line in reasons) or "the shards are empty"
        raise UserError(
            f"none of the {samples:,} samples can be used ({why}): check the layout of the shards, --interleaved and"
            " --caption-field, or the field 'text' of each line"
        )
    hidden = ("examples", "unread")
    shards = [{name: value for name, value in record.items() if name not in hidden} for record in records]
    writer = TokenWriter(job.out, job.kind, layout_of(job.tokenizers), str(options["tokenizers"]))
    about = {"command": dict(options), "shards": shards, "examples": dropped.examples, "unread": asdict(unread)}
    writer.finish(dropped.by_count(), about)
    shutil.rmtree(job.out / UNFINISHED)
    print(f"{job.out}: " + _counts(read_header(job.out).splits))
    if dropped.total:
        print(f"{dropped.total:,} of {samples:,} samples were dropped:")
    print(*reasons, sep="\n", end="\n" * bool(reasons))


def _counts(splits: Mapping[str, list[Part]]) -> str:
    counts = []
    for split in SPLITS:
        documents, tokens = (sum(getattr(part, what) for part in splits[split]) for what in ("documents", "tokens"))
        counts.append(f"{split} {documents:,} documents of {tokens:,} tokens")
    return ", ".join(counts)
