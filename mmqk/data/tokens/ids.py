"""Make a token folder from arrays of ids of other tokenizers: `mmqk data ids`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mmqk.data.shards.files import expand
from mmqk.data.shards.manifest import SHARE, default_share, small_set_sentence, split_of
from mmqk.data.tokens.folder import Layout, TokenWriter, load_array
from mmqk.store import OneSentenceParser, UserError, check_empty, hash_fraction, new_folder
from mmqk.store.files import writing
from mmqk.store.metrics import tag

EPILOG = """\
An array is a .npy file. In a 2-D array each row is a document. A 1-D array NAME.npy takes the documents' lengths from
NAME.lengths.npy; without that file it is one document. Ids of a modality must lie in one range, and the ranges follow
each other from id 0 in the order of --vocab-sizes. No ids are added to a document. A document longer than
data.seq_len is cut into pieces. Train on the result with --data.tokens FOLDER --data.mix '{"tokens": 1}'.

example:
  mmqk data ids --train 'ids/train-*.npy' --val 'ids/val-*.npy' \\
    --vocab-sizes text=65536,image=8192 --out tokens
"""


def main(argv: list[str] | None = None) -> int:
    """Check the arrays and write the folder.

    Raises:
        UserError: there are no arrays, ids are outside the vocabulary, lengths do not fit the ids, or the folder
            cannot be written.
    """
    parser = OneSentenceParser(
        prog="mmqk data ids",
        description="Make a token folder for training from arrays of ids, which can come from any tokenizer.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--train", required=True, help="path or pattern of the training arrays")
    add("--val", default="", help="path or pattern of the held-out arrays (default: split --train)")
    share = f"share to hold out without --val, chosen by a hash ({SHARE}; more of a small set)"
    add("--val-fraction", type=float, help=share)
    add("--vocab-sizes", required=True, help="number of ids of each modality, in id order: text=65536,image=8192")
    add("--pad", type=int, help="padding id, which no document may use (default: 0, which documents may use)")
    add("--begin-image", type=int, help="id before an image's codes; with it, documents are not cut inside images")
    add("--end-image", type=int, help="id after an image's codes")
    add("--out", type=Path, required=True, help="the folder to write")
    args = parser.parse_args(argv)
    layout = Layout(
        parse_vocab_sizes(args.vocab_sizes), pad=args.pad, begin_image=args.begin_image, end_image=args.end_image
    )
    if any(not 0 <= i < layout.size for i in layout.specials):
        raise UserError(f"--pad, --begin-image and --end-image must be ids from 0 to {layout.size - 1}.")
    if args.val_fraction is not None and (args.val or not 0 < args.val_fraction < 1):
        raise UserError(f"--val-fraction is {args.val_fraction}: give a share between 0 and 1 or --val, not both.")
    if (args.begin_image is None) != (args.end_image is None):
        raise UserError("--begin-image and --end-image belong together: give both or neither.")
    files = {split: _files(pattern) for split, pattern in (("train", args.train), ("val", args.val))}
    if both := set(map(Path.resolve, files["train"])) & set(map(Path.resolve, files["val"])):
        raise UserError(f"{min(both)} is in --train and in --val: give other arrays to --val.")
    with writing(args.out, "give another --out."):
        check_empty(args.out)
        counts = _write(args, layout, files)
    print(f"{args.out}: {counts['train']:,} training and {counts['val']:,} held-out documents")
    return 0


def parse_vocab_sizes(text: str) -> dict[str, int]:
    """Return the number of ids by modality, in the order of the ids, of ``--vocab-sizes text=65536,image=8192``.

    Raises:
        UserError: the text does not have this form, or a name cannot be part of a tag.
    """
    try:
        pairs = [(name.strip(), int(size)) for name, size in (part.split("=") for part in text.split(","))]
        for name, _ in pairs:
            tag("loss", name)
    except ValueError:
        pairs = []
    sizes = dict(pairs)
    if not sizes or not all(map(str.isidentifier, sizes)) or len(sizes) < len(pairs) or min(sizes.values()) < 1:
        raise UserError(
            f"--vocab-sizes is {text!r}: give each modality once with its number of ids, such as text=65536,image=8192."
        )
    return sizes


def _write(args: argparse.Namespace, layout: Layout, files: dict[str, list[Path]]) -> dict[str, int]:
    """Write a temporary folder and rename it to --out when complete; return the document counts by split."""
    with new_folder(args.out) as folder:
        writer = TokenWriter(folder, "tokens", layout)
        counts = {"train": 0, "val": 0}
        share = args.val_fraction
        if share is None and not args.val:
            share = default_share(hash_fraction(_identity(d)) for path in files["train"] for d in _documents(path))
            if share > SHARE:
                print(small_set_sentence(share), flush=True)
        for split, paths in files.items():
            for number, path in enumerate(paths):
                documents = list(_documents(path))
                if layout.pad is not None and any((d == layout.pad).any() for d in documents):
                    raise UserError(
                        f"{path} has documents with id {layout.pad}, which is --pad: give one that no document uses."
                    )
                parts = {split: documents}
                if not args.val:
                    parts = {"train": [], "val": []}
                    for d in documents:
                        parts[split_of(_identity(d), share)].append(d)
                for name, chosen in parts.items():
                    counts[name] += len(chosen)
                    try:
                        writer.add_part(name, f"{number:05d}", chosen)
                    except ValueError as error:
                        raise UserError(f"{path} does not fit --vocab-sizes ({error}).") from None
        if not counts["train"] or not counts["val"]:
            raise UserError(
                f"{args.out} would have {counts['train']} training and {counts['val']} held-out documents: give more"
                " documents, --val, or another --val-fraction."
            )
        writer.finish(about={"train": args.train, "val": args.val or f"{share} of them"})
    return counts


def _identity(document: np.ndarray) -> bytes:
    return document.astype(np.int64).tobytes()


def _files(pattern: str) -> list[Path]:
    paths = expand([pattern]) if pattern else []
    return [path for path in paths if not path.name.endswith(".lengths.npy")]


def _documents(path: Path) -> Iterator[np.ndarray]:
    ids = load_ids(path)
    lengths_path = path.with_name(f"{path.stem}.lengths.npy")
    if ids.ndim == 2 and lengths_path.exists():
        raise UserError(f"{path} has {lengths_path.name} and 2 dimensions: save it in one dimension without padding.")
    if ids.ndim == 2:
        yield from ids
    elif ids.ndim == 1 and lengths_path.exists():
        ends = np.cumsum(load_ids(lengths_path).astype(np.int64))
        if not len(ends) or ends[-1] != len(ids):
            raise UserError(
                f"The lengths in {lengths_path} do not add up to the {len(ids)} ids of {path}: write them again."
            )
        yield from np.split(ids, ends[:-1])
    elif ids.ndim == 1:
        yield ids
    else:
        raise UserError(f"{path} has {ids.ndim} dimensions: give documents as rows, or ids in one dimension.")


def load_ids(path: Path) -> np.ndarray:
    """Return the integers of a .npy file.

    Raises:
        UserError: the file is no array of integers.
    """
    try:
        array = load_array(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as an array ({error}): write it with numpy.save.") from None
    if not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{path} has {array.dtype}, not integers: write ids as integers.")
    return array
