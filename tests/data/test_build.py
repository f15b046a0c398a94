"""The shipped folders of data: nothing of a held-out pair is in the training split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.build.emoji import base_of
from mmqk.data.shards.manifest import read_pairs, read_text

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[Any]]:
    return {split: list(read_pairs(DATA / "emoji", split)) for split in ("train", "val")}


def test_shipped_split_leaks_nothing(shipped: dict[str, list[Any]]) -> None:
    train, val = shipped["train"], shipped["val"]
    assert 0.03 < len(val) / len(train) < 0.07
    for of in (lambda p: p.meta["group"], lambda p: base_of(p.meta["codepoint"]), lambda p: p.meta["name"],
               lambda p: p.caption, lambda p: p.image.tobytes()):  # fmt: skip
        assert not {of(p) for p in train} & {of(p) for p in val}
    # The control: if every second image goes into the other split, both splits have images of many emoji.
    both = {p.meta["codepoint"] for p in [*train, *val][::2]} & {p.meta["codepoint"] for p in [*train, *val][1::2]}
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
