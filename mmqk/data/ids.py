"""Make a token folder from arrays of ids of other tokenizers: `python -m mmqk.data.ids`."""

from __future__ import annotations

import argparse
import glob
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mmqk.data.tokens.folder import TOKENS, Layout, TokenWriter
from mmqk.store import OneSentenceParser, UserError, check_regular, hash_fraction, new_folder, run_main, tag

EPILOG = """\
An array is a .npy file. In a 2-D array each row is a document. A 1-D array NAME.npy takes the documents' lengths from
NAME.lengths.npy; without that file it is one document. Ids of a modality must lie in one range, and the ranges follow
each other from id 0 in the order of --vocab-sizes. Nothing is added to a document; one longer than data.seq_len is
cut into pieces. Train on the result with --data.tokens FOLDER --data.mix '{"tokens": 1}'.

example:
  python -m mmqk.data.ids --train 'ids/train-*.npy' --val 'ids/val-*.npy' \\
    --vocab-sizes text=65536,image=8192 --out tokens
"""


def main(argv: list[str] | None = None) -> int:
    """Check the arrays and write the folder.

    Raises:
        UserError: no arrays, ids outside the vocabulary, lengths that do not fit, or a folder that cannot be written.
    """
    parser = OneSentenceParser(
        prog="python -m mmqk.data.ids",
        description="Make a folder to train on from arrays of ids of any tokenizers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--train", required=True, help="arrays, a path or pattern")
    parser.add_argument(
        "--val", default="", help="held-out arrays; by default --val-fraction of the training documents"
    )
    parser.add_argument(
        "--val-fraction", type=float, default=0.01, help="share held out, by a hash of the document (0.01)"
    )
    parser.add_argument(
        "--vocab-sizes", required=True, help="modalities and their numbers of ids: text=65536,image=8192"
    )
    parser.add_argument(
        "--pad",
        type=int,
        help="an id that no document uses, for padding (default: 0, which is never attended to)",
    )
    parser.add_argument(
        "--begin-image", type=int, help="id before an image's codes: documents are not cut inside one"
    )
    parser.add_argument("--end-image", type=int, help="id after an image's codes")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    args = parser.parse_args(argv)
    layout = Layout(
        _vocab_sizes(args.vocab_sizes), pad=args.pad, begin_image=args.begin_image, end_image=args.end_image
    )
    if any(not 0 <= i < layout.size for i in layout.specials):
        raise UserError(f"--pad, --begin-image and --end-image must be ids from 0 to {layout.size - 1}.")
    if not args.val and not 0 < args.val_fraction < 1:
        raise UserError(f"--val-fraction is {args.val_fraction}: give a share between 0 and 1, or --val.")
    if (args.begin_image is None) != (args.end_image is None):
        given, other = ("begin", "end") if args.end_image is None else ("end", "begin")
        raise UserError(f"--{given}-image is given without --{other}-image: give both or neither.")
    if (args.out / TOKENS).exists():
        raise UserError(f"{args.out} is a token folder already: give another --out.")
    try:
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            raise UserError(f"{args.out} exists and is not an empty folder: give another --out.")
        counts = _write(args, layout)
    except OSError as error:
        raise UserError(f"{args.out} cannot be written ({error.strerror}): give another --out.") from None
    print(f"{args.out}: {counts['train']:,} training and {counts['val']:,} held-out documents")
    return 0


def _write(args: argparse.Namespace, layout: Layout) -> dict[str, int]:
    """Write the folder elsewhere and move it to --out when complete; return the document counts by split."""
    with new_folder(args.out) as folder:
        writer = TokenWriter(folder, "tokens", layout)
        counts = {"train": 0, "val": 0}
        for split, pattern in (("train", args.train), ("val", args.val)):
            for number, path in enumerate(_files(pattern)):
                documents = list(_documents(path))
                if layout.pad is not None and any((d == layout.pad).any() for d in documents):
                    raise UserError(
                        f"{path} has documents with id {layout.pad}, which is --pad: give one that no document uses."
                    )
                parts = {split: documents}
                if not args.val:
                    held_out = [
                        hash_fraction(d.astype(np.int64).tobytes()) < args.val_fraction for d in documents
                    ]
                    parts["train"] = [d for d, held in zip(documents, held_out, strict=True) if not held]
                    parts["val"] = [d for d, held in zip(documents, held_out, strict=True) if held]
                for name, chosen in parts.items():
                    counts[name] += len(chosen)
                    _add(writer, name, f"{number:05d}", chosen, path)
        if not counts["train"] or not counts["val"]:
            raise UserError(
                f"{args.out} would have {counts['train']} training and {counts['val']} held-out documents: give more"
                " documents, --val, or another --val-fraction."
            )
        writer.finish(about={"train": args.train, "val": args.val or f"{args.val_fraction} of them"})
    return counts


def _vocab_sizes(text: str) -> dict[str, int]:
    try:
        pairs = [(name, int(size)) for name, size in (part.split("=") for part in text.split(","))]
    except ValueError:
        pairs = []
    vocab_sizes = dict(pairs)
    try:
        for name in vocab_sizes:
            tag("loss", name)
    except ValueError as error:
        raise UserError(f"--vocab-sizes is {text!r}: {error}.") from None
    if not vocab_sizes or min(vocab_sizes.values()) < 1 or not all(name.isidentifier() for name in vocab_sizes):
        raise UserError(
            f"--vocab-sizes is {text!r}: give names and numbers of ids, such as text=65536,image=8192."
        )
    if len(vocab_sizes) < len(pairs):
        raise UserError(f"--vocab-sizes is {text!r}: give each modality once.")
    return vocab_sizes


def _files(pattern: str) -> list[Path]:
    if not pattern:
        return []
    paths = sorted(Path(p) for p in glob.glob(pattern) if not p.endswith(".lengths.npy"))
    if not paths:
        raise UserError(f"{pattern} names no file: give a path or pattern of .npy arrays.")
    return paths


def _documents(path: Path) -> Iterator[np.ndarray]:
    ids = _load(path)
    lengths_path = path.with_name(f"{path.stem}.lengths.npy")
    if ids.ndim == 2:
        yield from ids
    elif ids.ndim == 1 and lengths_path.exists():
        ends = np.cumsum(_load(lengths_path).astype(np.int64))
        if not len(ends) or ends[-1] != len(ids):
            raise UserError(
                f"{lengths_path} does not add up to the {len(ids)} ids of {path}: write it again."
            )
        yield from np.split(ids, ends[:-1])
    elif ids.ndim == 1:
        yield ids
    else:
        raise UserError(f"{path} has {ids.ndim} dimensions: give documents as rows, or ids end to end.")


def _load(path: Path) -> np.ndarray:
    check_regular(path)
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as an array ({error}): write it with numpy.save.") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise UserError(f"{path} is an archive of arrays (.npz): write one array with numpy.save.")
    if not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{path} holds {array.dtype}, not integers: ids are whole numbers.")
    return array


def _add(writer: TokenWriter, split: str, name: str, documents: list[np.ndarray], path: Path) -> None:
    try:
        writer.add_part(split, name, documents)
    except ValueError as error:
        raise UserError(f"{path} does not fit --vocab-sizes ({error}).") from None


if __name__ == "__main__":
    run_main(main)
