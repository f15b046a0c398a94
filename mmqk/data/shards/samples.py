"""Convert samples of an archive to documents: lists of image files (not yet decoded) and texts.

There are two layouts. A pair has the files that `img2dataset` writes (`{key}.jpg .txt .json`). An interleaved
document has the two equally long lists of OBELICS (Laurençon et al., 2306.16527) in `{key}.json`, and its images in
`{key}.0.webp`, `{key}.1.webp` and so on. Files and samples that no document uses are counted by reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmqk.data.shards.images import Dropped

EXAMPLES = 5
LONGEST_SHOWN = 200  # characters of a name

IGNORED = "in no sample: the name has no dot or begins with one, or the file is a link or a device"
UNUSED = "in a sample that does not use them"
DOTTED = "with a second dot in the name, while the key of a sample ends at the first dot"

# Longest text of a document, in bytes of UTF-8; the tokenizer needs about 150 times this size in memory.
MAX_TEXT = 2**22
# Longest line and longest JSON in bytes: more than for the text, because a JSON may contain escapes and other fields.
# Of a longer line only this many bytes plus one are read into memory.
LONGEST_LINE = MAX_JSON = 2**24

IMAGE_FIELDS = ("webp", "png", "jpg", "jpeg")
TEXT_MEMBER = "txt"
LINE = "line"  # the field of a line of JSON, which is a sample of kind text

NO_IMAGE = "no image file"
NO_CAPTION = "no caption"
EMPTY_CAPTION = "caption is empty"
TOO_LONG = "text is longer than 4 MiB, or its json is longer than 16 MiB"
NOT_UNICODE = "text is not valid Unicode"
NO_LISTS = "no json with the lists images and texts"
EMPTY_DOCUMENT = "document is empty"
NOT_JSON = "line is not a JSON object"
NO_TEXT = "no field text"
NO_MATCH = "image files do not match the lists"

_NUMBERED = re.compile(rf"([0-9]{{1,9}})\.(?:{'|'.join(IMAGE_FIELDS)})")


@dataclass
class ReasonCounts:
    """Counts by reason.

    Attributes:
        counts: number by reason.
        examples: the first few names by reason.
    """

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The sum of the counts."""
        return sum(self.counts.values())

    def add(self, reason: str, name: str) -> None:
        """Add one to the count of a reason, and keep the name if the reason has fewer than 5 examples."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(name)

    def take(self, other: ReasonCounts, source: str = "") -> None:
        """Add other counts and their examples; ``source`` becomes a prefix of each example."""
        for reason, names in other.examples.items():
            self.counts[reason] = self.counts.get(reason, 0) + other.counts[reason]
            examples = self.examples.setdefault(reason, [])
            examples += [source + name for name in names[: EXAMPLES - len(examples)]]

    def by_count(self) -> dict[str, int]:
        """Return the counts, the largest first."""
        return dict(sorted(self.counts.items(), key=lambda item: (-item[1], item[0])))

    def reason_lines(self) -> Iterator[str]:
        """Yield a line per reason: its count and examples."""
        for reason, count in self.by_count().items():
            yield f"  {reason}: {count:,} ({', '.join(map(printable, self.examples[reason]))})"

    def unread_lines(self, total: int) -> Iterator[str]:
        """Yield the lines to print if these files were not read out of ``total``; none if all files were read."""
        if self.total:
            yield f"{self.total:,} of {total:,} files were not read:"
            yield from self.reason_lines()


def printable(text: str) -> str:
    """Return the text with control characters replaced by "?", because a name in an archive may contain terminal
    commands. The middle of a long text is left out."""
    if len(text) > LONGEST_SHOWN:
        text = f"{text[: LONGEST_SHOWN // 2]}...{text[-LONGEST_SHOWN // 2 :]}"
    return "".join(c if c.isprintable() else "?" for c in text)


def count_unread(unread: ReasonCounts, kind: str, key: str, fields: Collection[str]) -> None:
    """Count those files of a sample that no document of a kind (pair or interleaved) uses. The json and txt of a pair
    count as used."""
    numbered = {field for field in fields if kind == "interleaved" and _NUMBERED.fullmatch(field)}
    image = next((field for field in IMAGE_FIELDS if field in fields), None)
    used = {"json", *numbered} if kind == "interleaved" else {image, "json", TEXT_MEMBER}
    for name in fields:
        if name not in used:
            unread.add(DOTTED if "." in name else UNUSED, f"{key}.{name}")


def pair_of(sample: Mapping[str, bytes], caption_field: str | None = None) -> tuple[bytes, str]:
    """Return the image file and the caption of a sample.

    Args:
        sample: content by field, as returned by `TarIndex.read`.
        caption_field: the field of the JSON with the caption, or "txt" for the text file. If None, the caption
            is the field "caption" of the JSON or, if that is missing, the text file.

    Raises:
        Dropped: the image file or the caption is missing, or the caption is blank, too long or not valid Unicode.
    """
    image = next((sample[field] for field in IMAGE_FIELDS if field in sample), None)
    if image is None:
        raise Dropped(NO_IMAGE)
    caption = None
    if caption_field != TEXT_MEMBER:
        caption = json_of(sample).get(caption_field or "caption")
    if not isinstance(caption, str) and caption_field in (None, TEXT_MEMBER) and TEXT_MEMBER in sample:
        caption = _decoded(sample[TEXT_MEMBER])
    if not isinstance(caption, str):
        raise Dropped(NO_CAPTION)
    if not caption.strip():
        raise Dropped(EMPTY_CAPTION)
    return image, checked_text(caption)


def interleaved_of(sample: Mapping[str, bytes]) -> list[bytes | str]:
    """Return the items of an interleaved document in order: each is an image file's bytes or a text.

    At each index exactly one of `images` and `texts` is not null. An image file is matched by name if `images`
    has the names of all image files; otherwise by its number, which counts the images (0, 1, 2, ...) or is the index
    in the lists.

    Raises:
        Dropped: the lists, the image files or the texts cannot be used; `Dropped.reason` names the cause.
    """
    record = json_of(sample)
    images, texts = record.get("images"), record.get("texts")
    if not isinstance(images, list) or not isinstance(texts, list):
        raise Dropped(NO_LISTS)
    if len(images) != len(texts):
        raise Dropped("lists images and texts are not equally long")
    pairs = zip(images, texts, strict=True)
    if not all(isinstance(text, str) if image is None else text is None for image, text in pairs):
        raise Dropped("not exactly one of image and text at some index of the lists")
    files = _image_files(images, sample)
    if not files and not any(texts):
        raise Dropped(EMPTY_DOCUMENT)
    checked_text("".join(text for text in texts if text is not None))
    return [files[i] if text is None else checked_text(text) for i, text in enumerate(texts)]


def document_of(
    sample: Mapping[str, bytes], kind: str = "", caption_field: str | None = None
) -> tuple[bytes, list[bytes | str]]:
    """Return the bytes whose hash decides the split of a sample, and its image files and texts in order.

    Args:
        sample: content by field.
        kind: "pair", "interleaved", "text" (see `mmqk.data.shards.read.read_samples`), or "" for the first two.
        caption_field: as for `pair_of`.

    Raises:
        Dropped: the sample cannot be used.
    """
    if kind == "text":
        text = text_of(sample[LINE])
        return text.encode(), [text]
    if kind == "interleaved":
        return sample.get("json", b""), interleaved_of(sample)
    try:
        content, caption = pair_of(sample, caption_field)
        return content, [content, caption]
    except Dropped as fault:
        if kind == "pair":
            raise
        try:
            return sample.get("json", b""), interleaved_of(sample)
        except Dropped as other:
            raise (fault if other.reason == NO_LISTS else other) from None


def text_of(line: bytes) -> str:
    """Return the field "text" of a line of JSON.

    Raises:
        Dropped: the line is not a JSON object in UTF-8, or its text is missing, blank or too long.
    """
    if len(line) > MAX_JSON:
        raise Dropped(TOO_LONG)
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise Dropped(NOT_UNICODE) from None
    except (ValueError, RecursionError):
        raise Dropped(NOT_JSON) from None
    if not isinstance(record, dict):
        raise Dropped(NOT_JSON)
    if not isinstance(text := record.get("text"), str):
        raise Dropped(NO_TEXT)
    if not text.strip():
        raise Dropped(EMPTY_DOCUMENT)
    return checked_text(text)


def checked_text(text: str) -> str:
    """Return the text unchanged if it can be used.

    Raises:
        Dropped: the text is too long, or contains an unpaired surrogate, which JSON can write but UTF-8 cannot.
    """
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise Dropped(NOT_UNICODE) from None
    if size > MAX_TEXT:
        raise Dropped(TOO_LONG)
    return text


def json_of(sample: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the json of a sample; empty if it is missing, damaged or not an object.

    Raises:
        Dropped: the json is too long.
    """
    if len(sample.get("json", b"")) > MAX_JSON:
        raise Dropped(TOO_LONG)
    try:
        record = json.loads(sample["json"])
    except (KeyError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _image_files(images: list[Any], sample: Mapping[str, bytes]) -> dict[int, bytes]:
    """Return the content of each image file, by the index of its entry in ``images``."""
    places = [place for place, image in enumerate(images) if image is not None]
    numbers = {field: int(m[1]) for field in sample if (m := _NUMBERED.fullmatch(field))}
    # Try three ways to match indices with fields; a match must use every file exactly once.
    by_name = [_field_named(images[place]) for place in places]
    by_number = {number: field for field, number in numbers.items()}
    by_count = [by_number.get(count) for count in range(len(places))]
    by_place = [by_number.get(place) for place in places]
    for fields in (by_name, by_count, by_place):
        if len(set(fields)) == len(places) == len(numbers) and set(fields) == numbers.keys():
            return {place: sample[str(field)] for place, field in zip(places, fields, strict=True)}
    raise Dropped(NO_MATCH)


def _field_named(image: Any) -> str | None:
    # The image is "0.webp", or "key.0.webp" with or without its folder; a URL does not name a member.
    if not isinstance(image, str) or "://" in image:
        return None
    base = image.rsplit("/", 1)[-1].lower()
    return base if _NUMBERED.fullmatch(base) else base.partition(".")[2]


def _decoded(content: bytes) -> str:
    if len(content) > MAX_TEXT:
        raise Dropped(TOO_LONG)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Dropped(NOT_UNICODE) from None
