"""Captions: CLDR names and keywords, and a WordNet gloss if it fits the picture.

A caption is ``name. keyword, keyword. gloss.``; each sample also stores the parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

GlossMatch = Literal["exact", "head", "none"]

# The first sense of a word often does not describe the picture (bank: sloping land; chicken: its flesh). So the sense
# must come from a WordNet lexicographer file that fits the subcategory of the emoji or, if the subcategory is not
# a key of FITTING_FILES, the category. The constants are the numbers of these files in lexnames(5WN).
ACT, ANIMAL, ARTIFACT, BODY, COMMUNICATION, EVENT, FEELING, FOOD, GROUP = 4, 5, 6, 8, 10, 11, 12, 13, 14
LOCATION, OBJECT, PERSON, PHENOMENON, PLANT, POSSESSION = 15, 17, 18, 19, 20, 21
SHAPE, SUBSTANCE, TIME = 25, 27, 28
FITTING_FILES: dict[str, frozenset[int]] = {
    "Smileys & Emotion": frozenset({FEELING, BODY, ARTIFACT}),
    "cat-face": frozenset({ANIMAL}),
    "monkey-face": frozenset({ANIMAL}),
    "People & Body": frozenset({BODY, PERSON, GROUP, ACT}),
    "Component": frozenset({BODY}),
    "animal-amphibian": frozenset({ANIMAL}),
    "animal-bird": frozenset({ANIMAL}),
    "animal-bug": frozenset({ANIMAL}),
    "animal-mammal": frozenset({ANIMAL}),
    "animal-marine": frozenset({ANIMAL}),
    "animal-reptile": frozenset({ANIMAL}),
    "plant-flower": frozenset({PLANT}),
    "plant-other": frozenset({PLANT, OBJECT}),
    "Food & Drink": frozenset({FOOD, PLANT}),
    "dishware": frozenset({ARTIFACT}),
    "food-marine": frozenset({ANIMAL}),
    "Travel & Places": frozenset({ARTIFACT, LOCATION, OBJECT, PHENOMENON, TIME}),
    "Activities": frozenset({ARTIFACT, ACT, EVENT, PLANT}),
    "Objects": frozenset({ARTIFACT, POSSESSION, COMMUNICATION, SUBSTANCE, OBJECT, FOOD}),
    "Symbols": frozenset({ARTIFACT, COMMUNICATION, SHAPE}),
    "zodiac": frozenset({LOCATION}),
    "Flags": frozenset({ARTIFACT}),
}
# Names whose selected WordNet sense still does not describe the picture; we read all selected glosses to find them.
# fmt: off
WRONG_SENSES = frozenset({
    "abacus", "bank", "black cat", "blue book", "broken heart", "chestnut", "Christmas tree",
    "cityscape", "construction", "crown", "dragon", "fire", "hammer", "headstone", "hole", "hook",
    "hot springs", "hut", "ice", "information", "jack-o-lantern", "joystick", "memo", "merman",
    "peacock", "person", "pick", "purple heart", "ribbon", "telephone receiver", "television",
    "toilet", "wireless", "wood",
})
# fmt: on


@dataclass(frozen=True)
class Synset:
    """One WordNet synset.

    Attributes:
        id: part of speech and byte offset, for example ``n02121234``.
        file: number of its lexicographer file.
        words: its lemmas, with spaces in place of underscores.
        gloss: definition and quoted examples, as written.
    """

    id: str
    file: int
    words: tuple[str, ...]
    gloss: str

    @property
    def definition(self) -> str:
        """The gloss without its quoted examples."""
        return re.split(r';\s*"', self.gloss)[0].strip().rstrip(";").strip()


@dataclass(frozen=True)
class WordNet:
    """WordNet's noun senses by lemma (most frequent first) and every synset in file order."""

    synsets: tuple[Synset, ...]
    noun_senses: dict[str, tuple[Synset, ...]]

    @classmethod
    def parse(cls, files: dict[str, bytes]) -> WordNet:
        """Parse the database files ``data.{noun,verb,adj,adv}`` and ``index.noun`` (formats: wndb(5WN)).

        Raises:
            KeyError: a file is missing.
        """
        synsets = [s for part in ("noun", "verb", "adj", "adv") for s in _synsets(files[f"data.{part}"])]
        nouns = {s.id: s for s in synsets if s.id.startswith("n")}
        senses: dict[str, tuple[Synset, ...]] = {}
        for line in _records(files["index.noun"]):
            fields = line.split()
            offsets = fields[len(fields) - int(fields[2]) :]
            senses[fields[0].replace("_", " ").lower()] = tuple(nouns[f"n{o}"] for o in offsets)
        return cls(tuple(synsets), senses)

    def sense(self, lemma: str, category: str, subcategory: str) -> Synset | None:
        """Return the most frequent noun sense of ``lemma`` that fits the emoji; None if there is none."""
        if lemma in WRONG_SENSES:
            return None
        fitting = FITTING_FILES.get(subcategory) or FITTING_FILES.get(category, frozenset())
        return next((s for s in self.noun_senses.get(lemma.lower(), ()) if s.file in fitting), None)


def _records(raw: bytes) -> Iterator[str]:
    # Only the license at the start of each file is indented.
    return (line for line in raw.decode("utf-8").splitlines() if line and not line.startswith(" "))


def _synsets(raw: bytes) -> Iterator[Synset]:
    for line in _records(raw):
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        n_words = int(fields[3], 16)
        # Adjectives have a syntactic marker: "galore(ip)".
        words = tuple(re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in fields[4 : 4 + 2 * n_words : 2])
        pos = "a" if fields[2] == "s" else fields[2]
        yield Synset(f"{pos}{fields[0]}", int(fields[1]), words, gloss.strip())


@dataclass(frozen=True)
class Caption:
    """A caption and its parts.

    Attributes:
        name: CLDR short name, or the name of emoji-datasource if CLDR has none.
        name_source: ``cldr`` or ``emoji-datasource``.
        keywords: all keywords, in CLDR's order.
        gloss: WordNet definition, "" if there is none.
        gloss_match: ``exact`` if the whole name is a WordNet noun; ``head`` if only its last word is a noun (such a
            gloss often does not describe the picture, so ``text`` leaves it out); ``none`` if there is no gloss.
        synset: id of the gloss's synset, "" without a gloss.
    """

    name: str
    name_source: Literal["cldr", "emoji-datasource"]
    keywords: tuple[str, ...]
    gloss: str
    gloss_match: GlossMatch
    synset: str

    @property
    def text(self) -> str:
        """The caption: the name, the keywords that add a word to the name, and an exact gloss."""
        words = set(self.name.lower().replace(":", " ").replace(",", " ").split())
        keywords = [k for k in self.keywords if not set(k.lower().split()) <= words]
        parts = [self.name, ", ".join(keywords), self.gloss if self.gloss_match == "exact" else ""]
        return "".join(f"{p.rstrip('.')}. " for p in parts if p).rstrip()


class Annotations:
    """CLDR's English annotations by emoji, without the variation selector U+FE0F."""

    def __init__(self, document: dict[str, Any]) -> None:
        """``document`` is the parsed ``annotations/en/annotations.json``."""
        entries = document["annotations"]["annotations"]
        self._by_emoji = {k.replace("\ufe0f", ""): v for k, v in entries.items()}

    def find(self, codepoint: str) -> tuple[str, tuple[str, ...]] | None:
        """Return the name and keywords of a code point such as ``1f468-200d-1f680``; None if CLDR has no entry."""
        emoji = "".join(chr(int(c, 16)) for c in codepoint.split("-"))
        entry = self._by_emoji.get(emoji.replace("\ufe0f", ""))
        if entry is None or not entry.get("tts"):
            return None
        return entry["tts"][0], tuple(entry.get("default", ()))


def caption(codepoint: str, entry: dict[str, Any], annotations: Annotations, wordnet: WordNet) -> Caption:
    """Return the caption of one base emoji.

    Args:
        codepoint: lower-case code points joined by hyphens.
        entry: record of the emoji in emoji-datasource's ``emoji.json`` (``name``, ``category``, ``subcategory``).
        annotations: CLDR names and keywords.
        wordnet: source of the gloss.
    """
    annotation = annotations.find(codepoint)
    if annotation:
        name, keywords = annotation
        source: Literal["cldr", "emoji-datasource"] = "cldr"
    else:
        # Flags, keycaps and most families are in CLDR's derived annotations, which the package lacks.
        name, source = _plain_name(entry), "emoji-datasource"
        mirrored = annotations.find(codepoint.removesuffix("-200d-27a1-fe0f"))
        keywords = mirrored[1] if mirrored else (entry["subcategory"].replace("-", " "),)
    place = entry["category"], entry["subcategory"]
    match: GlossMatch = "exact"
    sense = wordnet.sense(name, *place)
    if sense is None:
        match = "head"
        sense = wordnet.sense(name.split()[-1], *place)
    if sense is None:
        return Caption(name, source, keywords, "", "none", "")
    return Caption(name, source, keywords, sense.definition, match, sense.id)


def _plain_name(entry: dict[str, Any]) -> str:
    # emoji-datasource has Unicode names in capitals ("KEYCAP TEN") and flags in title case ("Argentina Flag").
    name: str = entry["name"]
    return name.lower() if name.isupper() else re.sub(r" Flag$", " flag", name)
