"""Image+caption pairs of the emoji of three vendors: their images, splits and order."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image

from data.build.captions import Annotations, Caption, WordNet, caption
from data.build.sources import SOURCES, read_members
from data.build.write import write_shard
from mmqk.data.shards.images import on_white
from mmqk.data.shards.manifest import IMAGE_SIZE, Manifest, write_manifest
from mmqk.store import UserError, hash_fraction

SAMPLES_PER_SHARD = 550
VAL_SHARE = 20  # one group in twenty

CLDR_FILE = "package/annotations/en/annotations.json"
VENDORS = {"google": "Noto Color Emoji", "twitter": "Twemoji", "fluent": "Fluent Emoji 3D"}

# Code points that make a variant of an emoji: presentation, joiner, skin tones, gender signs, direction arrow.
_MODIFIERS = frozenset({"fe0f", "200d", "2640", "2642", "27a1", *(f"1f3f{c}" for c in "bcdef")})
_NEUTRAL = {
    **dict.fromkeys(("1f468", "1f469", "1f474", "1f475", "1f9d3"), "1f9d1"),  # man, woman, old people: person
    **dict.fromkeys(("1f466", "1f467"), "1f9d2"),  # boy, girl: child
    **dict.fromkeys(("1f46b", "1f46c", "1f46d"), "1f9d1-1f91d-1f9d1"),  # people holding hands
    **dict.fromkeys(("1f934", "1f478"), "1fac5"),  # prince, princess: person with crown
    "1f57a": "1f483",  # man dancing, woman dancing
    "1f936": "1f385",  # Mrs. Claus, Santa Claus
}


def base_of(codepoint: str) -> str:
    """Return the base of an emoji: its code points without skin tone, gender, age and direction.

    All emoji of a base are in one split. For example, ``1f469-1f3fd-200d-1f680`` (woman astronaut, medium skin) and
    ``1f468-200d-1f680`` (man astronaut) have the base ``1f9d1-1f680``.
    """
    return "-".join(_NEUTRAL.get(c, c) for c in codepoint.split("-") if c not in _MODIFIERS) or codepoint


@dataclass(frozen=True)
class Sample:
    """One pair before it is written: vendor, code point, pixels (64x64 RGB), caption, category."""

    vendor: str
    codepoint: str
    image: Image.Image
    caption: Caption
    category: str

    @property
    def key(self) -> str:
        """Sample key in the shard."""
        return f"{self.vendor}-{self.codepoint}"


def collect(archives: dict[str, Path], wordnet: WordNet) -> list[Sample]:
    """Return all pairs: every base emoji of emoji-datasource, once for each vendor that has it.

    Raises:
        UserError: an archive lacks a file.
    """
    index = _member(archives["google"], "package/emoji.json")
    annotations = Annotations(json.loads(_member(archives["cldr"], CLDR_FILE)))
    entries = {e["unified"].lower(): e for e in json.loads(index)}
    captions = {c: caption(c, e, annotations, wordnet) for c, e in entries.items()}
    samples = []
    for vendor in VENDORS:
        folder = "package/assets/" if vendor == "fluent" else f"package/img/{vendor}/{IMAGE_SIZE}/"
        members = read_members(archives[vendor], partial(_is_in, folder))
        # Only some packages have the variation selector (fe0f) in their file names.
        files = {PurePosixPath(name).stem.replace("-fe0f", ""): raw for name, raw in members.items()}
        for codepoint, entry in entries.items():
            raw = files.get(codepoint.replace("-fe0f", ""))
            if raw is not None:
                image = _square(raw, archives[vendor], codepoint)
                samples.append(Sample(vendor, codepoint, image, captions[codepoint], entry["category"]))
    return samples


def _is_in(folder: str, name: str) -> bool:
    return name.startswith(folder)


def _member(path: Path, name: str) -> bytes:
    members = read_members(path, lambda n: n == name)
    if not members:
        raise UserError(f"{path} has no {name}: get the pinned archive")
    return members[name]


def _square(raw: bytes, path: Path, codepoint: str) -> Image.Image:
    try:
        with Image.open(io.BytesIO(raw)) as opened:
            image = on_white(opened)
    except (OSError, ValueError):
        raise UserError(f"the image of {codepoint} in {path} cannot be decoded: get it again") from None
    # Resize after compositing on white, so that the color of transparent pixels does not blend into the edge.
    if image.size != (IMAGE_SIZE, IMAGE_SIZE):
        image = image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.LANCZOS)
    return image


def groups_of(samples: Iterable[Sample]) -> dict[str, str]:
    """Return the group of each code point: its base (see `base_of`).

    Two bases share a group if a vendor has equal images of both (the flags of Norway and Svalbard).
    """
    leader: dict[str, str] = {}

    def find(base: str) -> str:
        while leader.setdefault(base, base) != base:
            base = leader[base]
        return base

    bases: dict[str, str] = {}
    base_of_image: dict[tuple[str, bytes], str] = {}
    for sample in samples:
        base = bases[sample.codepoint] = base_of(sample.codepoint)
        pixels = hashlib.sha256(sample.image.tobytes()).digest()
        a, b = sorted((find(base), find(base_of_image.setdefault((sample.vendor, pixels), base))))
        leader[b] = a
    return {codepoint: find(base) for codepoint, base in bases.items()}


def split_of(group: str) -> str:
    """Return ``val`` for about 5 % of the groups, by hash, so that a group keeps its split if emoji are added."""
    return "val" if hash_fraction(f"mmqk emoji split {group}".encode()) < 1 / VAL_SHARE else "train"


def write(out: Path, samples: list[Sample], built_with: dict[str, str]) -> set[str]:
    """Write the shards and the manifest into ``out``; return the synset ids of the glosses in val captions."""
    groups = groups_of(samples)
    # Sort by hash, so that every shard is a random sample.
    ordered = sorted(samples, key=lambda s: hashlib.sha256(f"mmqk emoji order {s.key}".encode()).digest())
    splits = {}
    for split in ("train", "val"):
        chosen = [s for s in ordered if split_of(groups[s.codepoint]) == split]
        n_shards = max(1, round(len(chosen) / SAMPLES_PER_SHARD))
        bounds = [round(i * len(chosen) / n_shards) for i in range(n_shards + 1)]
        parts = [chosen[a:b] for a, b in itertools.pairwise(bounds)]
        splits[split] = tuple(
            write_shard(out / f"{split}-{i:05d}.tar", (_record(s, groups) for s in part))
            for i, part in enumerate(parts)
        )
    about = {
        "name": "emoji",
        "sources": [f"{SOURCES[v].package} {SOURCES[v].version}" for v in (*VENDORS, "cldr", "wordnet")],
        "built_with": built_with,
    }
    write_manifest(out, Manifest(splits, about))
    val = (s.caption for s in samples if split_of(groups[s.codepoint]) == "val")
    return {c.synset for c in val if c.gloss_match == "exact"}


def _record(sample: Sample, groups: dict[str, str]) -> tuple[str, bytes, dict[str, Any]]:
    buffer = io.BytesIO()
    # Method 6 gives 1 % smaller files than method 4 but takes 20 times as long.
    sample.image.save(buffer, "WEBP", lossless=True, quality=100, method=4)
    source = SOURCES[sample.vendor]
    meta = {
        "caption": sample.caption.text,
        "name": sample.caption.name,
        "name_source": sample.caption.name_source,
        "keywords": list(sample.caption.keywords),
        "gloss": sample.caption.gloss,
        "gloss_match": sample.caption.gloss_match,
        "category": sample.category,
        "codepoint": sample.codepoint,
        "group": groups[sample.codepoint],
        "source": f"{VENDORS[sample.vendor]}, {source.package} {source.version}",
        "licence": source.license,
    }
    return sample.key, buffer.getvalue(), meta
