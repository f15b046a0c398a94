"""Check the conversion of samples to image files and texts: the layouts of img2dataset and OBELICS, and every kind of
sample that has neither layout."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmqk.data.shards import samples
from mmqk.data.shards.images import Dropped
from mmqk.data.shards.samples import checked_text, interleaved_of, pair_of, text_of

RECORD = {"caption": "from json", "alt": "another", "none": None, "number": 3, "blank": " \n"}
BOTH = {"jpg": b"image", "txt": b"from txt", "json": json.dumps(RECORD).encode()}
HALF_A_PAIR = b'{"caption": "\\ud83d"}'


def without(*fields: str, **others: bytes) -> dict[str, bytes]:
    return {name: content for name, content in {**BOTH, **others}.items() if name not in fields}


def reason(call: Any, *arguments: Any) -> str:
    with pytest.raises(Dropped) as caught:
        call(*arguments)
    return caught.value.reason


def test_pairs_of_the_img2dataset_layout() -> None:
    assert pair_of(BOTH) == (b"image", "from json")
    assert pair_of(without("json")) == (b"image", "from txt")
    assert pair_of(without("txt")) == (b"image", "from json")
    for field in ("webp", "png", "jpg", "jpeg"):
        assert pair_of({field: b"x", "txt": b"t"})[0] == b"x"
    # If the caption is null, or the json file has no JSON object, the text file gives the caption.
    for broken in (b'{"caption": null}', b"{}", b"[1]", b"", b"{", b"\xff", b"[" * 100000):
        assert pair_of(without(json=broken))[1] == "from txt"
        assert reason(pair_of, without("txt", json=broken)) == samples.NO_CAPTION
    assert pair_of(without("json", txt="\ufeffgrößer 猫".encode()))[1] == "größer 猫"


def test_the_field_of_the_caption() -> None:
    assert pair_of(BOTH, "alt")[1] == "another"
    assert pair_of(BOTH, "txt")[1] == "from txt"
    # A field that the user names is not replaced by another field.
    for field in ("none", "number", "missing"):
        assert reason(pair_of, BOTH, field) == samples.NO_CAPTION
    assert reason(pair_of, without("txt"), "txt") == samples.NO_CAPTION
    assert reason(pair_of, BOTH, "blank") == samples.EMPTY_CAPTION


def test_pairs_that_are_none() -> None:
    assert reason(pair_of, without("jpg")) == samples.NO_IMAGE
    assert reason(pair_of, without("jpg", gif=b"x")) == samples.NO_IMAGE
    assert reason(pair_of, without("json", "txt")) == samples.NO_CAPTION
    assert reason(pair_of, without("json", txt=b"\xff\xfe")) == samples.NOT_UNICODE
    assert reason(pair_of, without("json", txt=b" \n\t")) == samples.EMPTY_CAPTION
    assert reason(pair_of, without(json=HALF_A_PAIR)) == samples.NOT_UNICODE
    assert checked_text("\U0001f63a\0") == "\U0001f63a\0"  # whole surrogate pairs and NUL are kept


def document(images: Any, texts: Any, **files: bytes) -> dict[str, bytes]:
    named = {name.replace("_", "."): content for name, content in files.items()}
    return {"json": json.dumps({"images": images, "texts": texts}).encode(), **named}


URL = "https://example.org/a.jpg"


@pytest.mark.parametrize("texts", [["one", None, "two", None]])
def test_images_are_found_by_count_place_or_name(texts: list[str | None]) -> None:
    images = [None, URL, None, URL]
    expected = ["one", b"A", "two", b"B"]
    by_count = {"n0_webp": b"A", "n1_png": b"B"}
    for files in (by_count, {"n1_webp": b"A", "n3_jpg": b"B"}):
        numbered = {name.removeprefix("n"): content for name, content in files.items()}
        assert interleaved_of(document(images, texts, **numbered)) == expected
    for names in (["1.webp", "0.webp"], ["doc.1.webp", "doc.0.webp"], ["a/b/doc.1.webp", "DOC.0.WEBP"]):
        named = document([None, names[0], None, names[1]], texts, **{"0_webp": b"B", "1_webp": b"A"})
        assert interleaved_of(named) == expected
    # If one of the names matches no file, all names are ignored.
    half = document([None, "1.webp", None, "x.webp"], texts, **{"0_webp": b"A", "1_webp": b"B"})
    assert interleaved_of(half) == expected
    # A URL that ends like the name of a file does not count as a name.
    address = document([None, "https://a/x.1.webp", None, "https://a/x.0.webp"], texts,
                       **{"0_webp": b"A", "1_webp": b"B"})  # fmt: skip
    assert interleaved_of(address) == expected


def test_a_text_beyond_the_limit_is_dropped_and_one_at_it_is_not(monkeypatch):
    from mmqk.data.shards import samples

    monkeypatch.setattr(samples, "MAX_TEXT", 100)
    monkeypatch.setattr(samples, "MAX_JSON", 400)

    def made(size, how):
        text = "ä" + "x" * (size - 2)  # of ``size`` bytes
        document = json.dumps({"images": [None, None], "texts": [text[: size // 2], text[size // 2 :]]}).encode()
        return {
            "line": lambda: text_of(json.dumps({"text": text}).encode()),
            "padded line": lambda: text_of(json.dumps({"text": "a", "more": "x" * (4 * size)}).encode()),
            "json": lambda: pair_of({"jpg": b"", "json": json.dumps({"caption": text}).encode()}),
            "padded json": lambda: pair_of({"jpg": b"", "txt": b"a", "json": b'{"a":"%s"}' % (b"x" * 4 * size)}),
            "txt": lambda: pair_of({"jpg": b"", "txt": text.encode()}),
            "interleaved": lambda: interleaved_of({"json": document}),
        }[how]()

    for how in ("line", "padded line", "json", "padded json", "txt", "interleaved"):
        with pytest.raises(Dropped, match="longer than 4 MiB"):
            made(101, how)
        assert made(90 if how.startswith("padded") else 100, how)
