"""Token folders: documents as arrays of ids in one joint vocabulary, memory-mapped when training.

```
FOLDER/tokens.json                    kind, layout, parts with counts and sha256, counts of dropped samples
FOLDER/train/00000.ids.npy            ids of all documents of a part, concatenated, uint16 or uint32
FOLDER/train/00000.lengths.npy        tokens of each document, uint32
FOLDER/train/00000.keys.json          key of each document in its shard; not part of the folder's hash
FOLDER/val/...
```

A document has no ``<bos>``. Its content depends on the kind of the folder:

pair           ``<image> codes </image> caption <eos>``
text           text and ``<eos>``
interleaved    text and ``<image> codes </image>`` in order, and ``<eos>``
tokens         the ids of other tokenizers, unchanged; ``mmqk data ids`` makes such a folder
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmqk.data.shards.manifest import MANIFEST, check_sha256, manifest_hash, sha256_file
from mmqk.data.tokenizers.files import BEGIN_IMAGE, BOS, END_IMAGE, EOS, PAD, vocab_sizes_of
from mmqk.store import DamagedFile, UserError, check_regular, identity_hash, read_json, write_json
from mmqk.store.files import read_regular, replacing

TOKENS = "tokens.json"
FORMAT = 2
KINDS = ("pair", "text", "interleaved", "tokens")
SPLITS = ("train", "val")
SPECIAL_NAMES = ("bos", "eos", "pad", "begin_image", "end_image")


@dataclass(frozen=True)
class Layout:
    """The ids of each modality, and the special ids.

    Attributes:
        vocab_sizes: name and number of ids of each modality, in order; the first modality starts at id 0.
        bos: id of the token that begins a row; None for documents without one.
        eos: id that ends a document, or None.
        pad: id that pads rows; None pads with 0. Any id can pad, because padding is neither attended to nor a target.
        begin_image: id before the codes of an image, or None.
        end_image: id after the codes of an image, or None.
    """

    vocab_sizes: dict[str, int]
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    begin_image: int | None = None
    end_image: int | None = None

    @property
    def size(self) -> int:
        """Number of ids."""
        return sum(self.vocab_sizes.values())

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The smallest integer type that can hold every id; token folders use it."""
        return np.uint16 if self.size <= 2**16 else np.uint32

    @property
    def edges(self) -> np.ndarray:
        """First id of each modality, and the end of the last modality: shape (modalities + 1)."""
        return np.cumsum([0, *self.vocab_sizes.values()])

    @property
    def specials(self) -> list[int]:
        """The special ids that are not None."""
        return [i for name in SPECIAL_NAMES if (i := getattr(self, name)) is not None]

    def modality(self, ids: np.ndarray) -> np.ndarray:
        """Return the modality of each id, as its position in ``vocab_sizes``, int64."""
        return np.searchsorted(self.edges[1:-1], ids, side="right").astype(np.int64)


def layout_of(tokenizers: Path | str) -> Layout:
    """Return the layout of mmqk's own tokenizers in a folder.

    Raises:
        UserError: a tokenizer file is missing or damaged.
    """
    return Layout(vocab_sizes_of(tokenizers), BOS, EOS, PAD, BEGIN_IMAGE, END_IMAGE)


@dataclass(frozen=True)
class Part:
    """A part of one split: its name, its counts, and the sha256 of its ids and of its lengths."""

    name: str
    documents: int
    tokens: int
    sha256: list[str]


@dataclass(frozen=True)
class Header:
    """The content of tokens.json.

    Attributes:
        kind: kind of the documents, one of `KINDS`.
        layout: layout of the ids.
        tokenizers: hash of mmqk's tokenizers that made the ids; empty for ids of other tokenizers.
        splits: parts of each split.
        dropped: number of dropped samples by reason.
        about: free-form metadata, which is not part of the folder's hash.
    """

    kind: str
    layout: Layout
    tokenizers: str
    splits: dict[str, list[Part]]
    dropped: dict[str, int]
    about: dict[str, Any]


class TokenWriter:
    """Writes a token folder part by part. The folder cannot be read before ``finish``.

    Args:
        folder: made if it does not exist.
        kind: kind of the documents, one of `KINDS`.
        layout: layout of the ids.
        tokenizers: hash of mmqk's tokenizers that made the ids; empty for ids of other tokenizers.
    """

    def __init__(self, folder: Path, kind: str, layout: Layout, tokenizers: str = "") -> None:
        self.folder, self.kind, self.layout, self.tokenizers = folder, kind, layout, tokenizers

    def add_part(
        self, split: str, name: str, documents: Sequence[np.ndarray], keys: Sequence[str] | None = None
    ) -> None:
        """Write one part, and the keys of its documents in their shard, if known.

        Raises:
            ValueError: a document is empty or has an id outside the layout. OSError: the folder cannot be written.
        """
        for place, ids in enumerate(documents):
            if not len(ids):
                raise ValueError(f"document {place} of part {name} is empty")
            if ids.min() < 0 or ids.max() >= self.layout.size:
                wrong = int(ids[(ids < 0) | (ids >= self.layout.size)][0])
                raise ValueError(f"document {place} of part {name} has id {wrong}: ids are 0 to {self.layout.size - 1}")
        ids = np.concatenate(documents) if len(documents) else np.zeros(0)
        lengths = np.array([len(d) for d in documents], dtype=np.uint32)
        (self.folder / split).mkdir(parents=True, exist_ok=True)
        _save(self.folder / split / f"{name}.ids.npy", ids.astype(self.layout.dtype))
        if keys is not None:
            write_json(self.folder / split / f"{name}.keys.json", list(keys))
        _save(self.folder / split / f"{name}.lengths.npy", lengths)

    def finish(self, dropped: Mapping[str, int] | None = None, about: Mapping[str, Any] | None = None) -> None:
        """Write tokens.json, which makes the folder readable.

        Args:
            dropped: number of dropped samples by reason.
            about: free-form metadata, which is not part of the folder's hash.
        """
        splits = {split: self._parts(split) for split in SPLITS}
        header = Header(self.kind, self.layout, self.tokenizers, splits, dict(dropped or {}), dict(about or {}))
        write_json(self.folder / TOKENS, {"format": FORMAT, **asdict(header)})

    def _parts(self, split: str) -> list[Part]:
        parts = []
        for path in sorted((self.folder / split).glob("*.lengths.npy")):
            name = path.name.removesuffix(".lengths.npy")
            lengths = np.load(path, mmap_mode="r")
            hashes = [sha256_file(p) for p in (path.parent / f"{name}.ids.npy", path)]
            parts.append(Part(name, len(lengths), int(lengths.sum(dtype=np.int64)), hashes))
        return parts


def _save(path: Path, array: np.ndarray) -> None:
    with replacing(path, path.with_name(f"{path.name}.partial")) as file:
        np.save(file, array)


class TokenStore:
    """N documents of one split, read from memory-mapped parts.

    Attributes:
        kind: kind of the documents, one of `KINDS`.
        layout: layout of the ids.
        parts: ids of each part.
        lengths_N: tokens of each document, int64.
    """

    def __init__(self, kind: str, layout: Layout, parts: Sequence[np.ndarray], lengths: Sequence[np.ndarray]) -> None:
        # Use plain arrays: a slice of a memmap is a memmap, and creating one takes longer than reading the document.
        self.kind, self.layout, self.parts = kind, layout, [np.asarray(part) for part in parts]
        self.lengths_N = np.concatenate([np.zeros(0), *lengths]).astype(np.int64)
        self._first = np.cumsum([0, *map(len, lengths)])
        self._places = np.cumsum([0, *map(len, parts)])
        starts = [np.cumsum(n, dtype=np.int64) - n for n in lengths]
        self._starts_N = np.concatenate([np.zeros(0, dtype=np.int64), *starts])

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.lengths_N.sum())

    def __getitem__(self, n: int) -> np.ndarray:
        """Return the ids of document n, int64."""
        return self.cut(n, 0, self.lengths_N[n])

    def cut(self, n: int, start: int, end: int) -> np.ndarray:
        """Return ids ``start`` to ``end`` of document n, int64; ``end`` is at most the length of the document."""
        part = int(np.searchsorted(self._first, n, side="right")) - 1
        first = self._starts_N[n]
        return self.parts[part][first + start : first + end].astype(np.int64)

    def stream(self, start: int, n: int) -> np.ndarray:
        """Return ids ``start`` to ``start + n`` of the concatenated documents, int64; fewer if the documents end."""
        ids = []
        part = int(np.searchsorted(self._places, start, side="right")) - 1
        while n > 0 and part < len(self.parts):
            rows = self.parts[part][start - self._places[part] :][:n]
            ids.append(rows.astype(np.int64))
            start, n, part = start + len(rows), n - len(rows), part + 1
        return np.concatenate([np.zeros(0, dtype=np.int64), *ids])

    @cached_property
    def image_tokens(self) -> int:
        """Tokens of an image with its two boundary tokens, equal for all images of a folder of pairs.

        Raises:
            UserError: the first document does not begin with an image.
        """
        first = self[0]
        if first[0] != self.layout.begin_image or self.layout.end_image not in first:
            raise UserError("The token folder of pairs has documents that do not begin with an image.")
        return int(np.argmax(first == self.layout.end_image)) + 1


def open_tokens(folder: Path | str, cache: Path | None = None) -> dict[str, TokenStore]:
    """Open a token folder by split.

    The arrays are compared with the hashes in tokens.json, and their ids with the layout. ``cache`` stores which
    files matched; such a file is compared again only after its size, inode or modification time changes.

    Args:
        folder: the token folder.
        cache: folder of the records of matched files; None compares all files at each call.

    Raises:
        UserError: the folder is unfinished, a part is missing, or a part differs from tokens.json.
    """
    folder = Path(folder)
    header = read_header(folder)
    kept, states = dict[str, Any](), dict[str, Any]()
    if cache is not None:
        name = hashlib.sha256(f"{folder.resolve()}/{header.layout.size}".encode()).hexdigest()[:20]
        record = cache / "compared" / f"{name}.json"
        with contextlib.suppress(DamagedFile):  # then all files are compared again
            kept = read_json(record) or {}
    stores = {}
    for split in SPLITS:
        parts = header.splits.get(split, [])
        arrays = [_read_part(folder / split / part.name, part, header.layout, kept, states) for part in parts]
        stores[split] = TokenStore(header.kind, header.layout, [a for a, _ in arrays], [n for _, n in arrays])
    if cache is not None and states != kept:
        with contextlib.suppress(OSError):  # then the next run compares the files again
            record.parent.mkdir(parents=True, exist_ok=True)
            write_json(record, states)
    return stores


def load_array(path: Path) -> np.ndarray:
    """Map the array of a file that numpy.save has written into memory.

    Raises:
        OSError or ValueError: the file cannot be read, or is not one array.
        UserError: the path is not a regular file.
    """
    check_regular(path)
    return np.lib.format.open_memmap(path, mode="r")  # numpy.load would also take an archive of arrays


def _read_part(
    stem: Path, part: Part, layout: Layout, kept: Mapping[str, Any], states: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and lengths of a part, after a comparison with tokens.json.

    A file whose state in ``kept`` has not changed is not compared again. ``states`` receives the new states.
    """
    paths, changed = [Path(f"{stem}.{what}.npy") for what in ("ids", "lengths")], False
    try:
        ids, lengths = map(load_array, paths)
        for path, sha256 in zip(paths, part.sha256, strict=True):
            about = path.stat()
            states[str(path)] = state = [sha256, about.st_size, about.st_mtime_ns, about.st_ino]
            if kept.get(str(path)) == state:
                continue
            changed = True
            check_sha256(path, sha256, TOKENS, "copy it again, or make the folder again.")
    except (OSError, ValueError) as error:
        raise UserError(f"Part {stem} of a token folder cannot be read ({error}): make it again.") from None
    if changed and len(ids) and (largest := int(ids.max())) >= layout.size:
        raise UserError(
            f"{paths[0]} has the id {largest}, but the ids of {TOKENS} are 0 to {layout.size - 1}: make the folder"
            " again."
        )
    return ids, lengths


def read_header(folder: Path | str) -> Header:
    """Read tokens.json.

    Raises:
        UserError: the file is missing, damaged, or of another format.
    """
    path = Path(folder) / TOKENS
    record = read_json(path, advice="make it again.")
    if record is None:
        raise UserError(
            f"{path} is missing: the folder is not a token folder, or was not finished (run its command again)."
        )
    try:
        splits = {split: [Part(**part) for part in parts] for split, parts in record["splits"].items()}
        layout = Layout(**record["layout"])
        header = Header(record["kind"], layout, record["tokenizers"], splits, record["dropped"], record["about"])
        known = record["format"] == FORMAT and header.kind in KINDS
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(path, f"it is not the record of a token folder: {error!r}", "make it again.") from None
    if not known:
        raise UserError(f"{path} is not the record of a token folder of format {FORMAT}: make it again.")
    return header


def read_keys(folder: Path, split: str, part: str) -> list[str] | None:
    """Return the keys of the documents of a part in their shard; None if the folder has none."""
    path = folder / split / f"{part}.keys.json"
    return json.loads(read_regular(path)) if path.exists() else None


def is_token_folder(folder: Path | str) -> bool:
    """Return whether the folder has a tokens.json."""
    return (Path(folder) / TOKENS).exists()


def tokens_hash(folder: Path | str) -> str:
    """Return the identity of a folder's documents: 10 hex digits of the hash of its kind, its layout, and the counts
    and sha256 of every part."""
    header = read_header(folder)
    record = {"kind": header.kind, "layout": asdict(header.layout)}
    record["splits"] = {split: [asdict(part) for part in parts] for split, parts in header.splits.items()}
    return identity_hash({**record, "modalities": list(header.layout.vocab_sizes)})


def source_hash(folder: Path, kind: str) -> str:
    """Return the hash (10 hex digits) of the samples of a source, which is a folder of shards or of tokens.

    Raises:
        UserError: the folder has neither shards with a manifest nor tokens.
    """
    if is_token_folder(folder):
        return tokens_hash(folder)
    if not folder.exists() and not glob.has_magic(str(folder)) and "{" not in str(folder):
        raise UserError(f"{folder} does not exist: check the path, or make a token folder there.")
    if kind == "interleaved" or not (folder / MANIFEST).exists():
        what = {"interleaved": "--interleaved --shards", "text": "--text"}.get(kind, "--shards")
        online = "; or read tars as they are with --data.read shards" if kind == "pair" else ""
        raise UserError(
            f"{folder} is neither a token folder nor a folder of shards with a manifest: make a token folder with"
            f" mmqk data tokenize {what} PATTERN --out FOLDER{online}."
        )
    return manifest_hash(folder)
