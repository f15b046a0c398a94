"""The token cache: shards are tokenized once, into token folders under ``.cache/tokens``."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from mmqk.data.tokens.folder import (
    SPLITS,
    TokenStore,
    TokenWriter,
    is_token_folder,
    layout_of,
    open_tokens,
    read_header,
    tokens_hash,
)
from mmqk.shards.manifest import MANIFEST, manifest_hash
from mmqk.shards.pairs import read_pairs, read_text
from mmqk.store import UserError, locked, new_folder

FORMAT = 3
ENCODE_BATCH = 64


def source_hash(folder: Path, kind: str) -> str:
    """Hash of the samples of a source, a folder of shards or of tokens (10 hex digits).

    Raises:
        UserError: the folder is neither.
    """
    if is_token_folder(folder):
        return tokens_hash(folder)
    if kind == "interleaved" or not (folder / MANIFEST).exists():
        what = {"interleaved": "--interleaved --shards", "text": "--text"}.get(kind, "--shards")
        online = "; or read tars as they are with --data.read shards" if kind == "pair" else ""
        raise UserError(
            f"{folder} is neither a folder of tokens nor of shards with a manifest: make one of tokens with"
            f" python -m mmqk.data.tokenize {what} PATTERN --out FOLDER{online}."
        )
    return manifest_hash(folder)


def open_source(
    kind: str,
    folder: Path,
    tokenizers: Path,
    root: Path,
    say: Callable[[str], None] | None = None,
) -> dict[str, TokenStore]:
    """The documents of a source by split: those of a token folder, or the cached tokens of shards, made if missing.

    Args:
        kind: pair, text or interleaved.
        folder: token folder, or shards with their manifest.
        tokenizers: folder of the tokenizers.
        root: folder of the cache.
        say: receives progress messages; prints to stderr by default.

    Raises:
        UserError: shards, tokenizers or the cache folder cannot be read or written, or do not match.
    """
    from mmqk.tokenizers import tokenizers_hash

    made_by = tokenizers_hash(tokenizers)
    if is_token_folder(folder):
        header = read_header(folder)
        if header["kind"] != kind:
            raise UserError(
                f"{folder} holds documents of kind {header['kind']}, not {kind}: give another folder."
            )
        if header["tokenizers"] != made_by:
            raise UserError(
                f"{folder} was made with the tokenizers {header['tokenizers'] or 'of somebody else'}, but"
                f" {tokenizers} are {made_by}: set --data.tokenizers to those, or tokenize the shards again."
            )
        return open_tokens(folder, root)
    digest = hashlib.sha256(f"{FORMAT}/{kind}/{manifest_hash(folder)}/{made_by}".encode()).hexdigest()[:10]
    made = root / digest
    if not is_token_folder(made):
        _make(kind, folder, tokenizers, made_by, made, say or _to_stderr)
    try:
        return open_tokens(made, root)
    except UserError as error:
        raise UserError(
            f"The token cache {made} does not match its shards and tokenizers: delete it, and it is made again"
            f" ({error})"
        ) from None


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _make(
    kind: str, folder: Path, tokenizers: Path, made_by: str, made: Path, say: Callable[[str], None]
) -> None:
    with ExitStack() as stack:
        try:
            made.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(Path(f"{made}.lock")))
        except OSError as error:
            raise UserError(
                f"The token cache {made.parent} cannot be written ({error.strerror}): set --data.cache."
            ) from error
        if is_token_folder(made):  # by a process that had the lock before us
            return
        with new_folder(made) as folder_of_tokens:
            writer = TokenWriter(folder_of_tokens, kind, layout_of(tokenizers), made_by)
            encode = _pairs if kind == "pair" else _documents
            for split in SPLITS:
                say(f"tokenizing the {split} shards of {folder} (once; kept in {made})")
                writer.add_part(split, "00000", list(encode(folder, split, tokenizers)))
            writer.finish(about={"from": str(folder)})
            if made.exists():  # half a cache, left by a process that was killed
                shutil.rmtree(made)


def _documents(folder: Path, split: str, tokenizers: Path) -> Iterator[np.ndarray]:
    from mmqk.tokenizers import TextTokenizer
    from mmqk.tokenizers.vocabulary import EOS, JointVocabulary

    tokenizer, vocabulary = TextTokenizer.load(tokenizers), JointVocabulary.load(tokenizers)
    for document in read_text(folder, split):
        yield np.array([*vocabulary.text(tokenizer.encode(document)), EOS])


def _pairs(folder: Path, split: str, tokenizers: Path) -> Iterator[np.ndarray]:
    import torch
    from torchvision.transforms.functional import pil_to_tensor

    from mmqk.tokenizers import ImageTokenizer, TextTokenizer
    from mmqk.tokenizers.vocabulary import BEGIN_IMAGE, END_IMAGE, EOS, JointVocabulary

    text, image = TextTokenizer.load(tokenizers), ImageTokenizer.load(tokenizers)
    vocabulary = JointVocabulary.load(tokenizers)
    waiting: list[tuple[str, torch.Tensor]] = []

    def encoded() -> Iterator[np.ndarray]:
        if waiting:
            codes_NG = image.encode(torch.stack([pixels for _, pixels in waiting]).float() / 255).numpy()
            for (caption, _), codes_G in zip(waiting, codes_NG, strict=True):
                words = vocabulary.text(text.encode(caption))
                yield np.array([BEGIN_IMAGE, *vocabulary.image(codes_G), END_IMAGE, *words, EOS])
            waiting.clear()

    for pair in read_pairs(folder, split):
        waiting.append((pair.caption, pil_to_tensor(pair.image)))
        if len(waiting) == ENCODE_BATCH:
            yield from encoded()
    yield from encoded()
