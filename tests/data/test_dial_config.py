"""Check the configuration of the dial: error messages of one sentence, the parents of tokens, the printed table."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from mmqk.data.synthetic.dial import Dial, DialConfig, forest

THREE = DialConfig(
    vocabulary={"text": 12, "image": 16, "audio": 8},
    skew={"text": 0.5, "image": 1.0, "audio": 0.0},
    entropy={"text": 1.5, "image": 1.8, "audio": 0.9},
    tokens={"text": 12, "image": 24, "audio": 10},
    lag={"text": 3, "image": 2, "audio": 4},
    grid={"image": 6},
    mutual_information=1.2,
)


def chain(**fields) -> DialConfig:
    """Return a dial with text of lag 3 and images of lag 2, and so few ids that all pairs can be counted."""
    base = DialConfig(
        vocabulary={"text": 12, "image": 12},
        skew={"text": 0.8, "image": 0.8},
        entropy={"text": 1.2, "image": 2.0},
        tokens={"text": 24, "image": 24},
        lag={"text": 3, "image": 2},
    )
    return replace(base, **fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"vocabulary": {}}, "data.dial.vocabulary is empty"),
        ({"vocabulary": {"text": 1, "image": 12}}, "data.dial.vocabulary.text is 1: it must be a whole number"),
        ({"vocabulary": {"text": 12, "layer00": 12}}, "data.dial.vocabulary has an invalid name: "),
        ({"grid": {"image": 7}}, "data.dial.grid.image is 7: give 0 (a chain) or a divisor of data.dial.tokens."),
        ({"grid": {"sound": 6}}, "data.dial.grid has sound and data.dial.vocabulary has text, image"),
        ({"tokens": {"text": 24}}, "data.dial.tokens has text and data.dial.vocabulary has text, image"),
        ({"entropy": {}}, "data.dial.entropy has no modality and"),
        ({"order": "sideways"}, "data.dial.order must be one of forward, backward, both, but is 'sideways'."),
    ],
)
def test_what_makes_no_source_is_refused_in_one_sentence(fields, sentence):
    with pytest.raises(ValueError) as refusal:
        chain(**fields)
    assert str(refusal.value).startswith(sentence) and str(refusal.value).endswith(".")
    assert chain(grid={"image": 6}, lag={"text": 99, "image": 1})  # a valid configuration is not refused


@pytest.mark.parametrize(
    ("tokens", "lag", "width"), [(24, 1, 6), (24, 2, 6), (24, 4, 0), (5, 9, 0), (12, 3, 4), (9, 1, 1)]
)
def test_parents_stand_where_the_configuration_says(tokens, lag, width):
    parent = {int(c): int(p) for level in forest(tokens, lag, width) for c, p in zip(*level, strict=True)}
    assert sorted(parent) == list(range(tokens))
    for t, p in parent.items():
        above, left = t - lag * width, t - lag
        if width and above >= 0:
            assert p == above
        elif left >= 0 and (not width or left // width == t // width):
            assert p == left
        else:
            assert p == -1
    known: set[int] = set()
    for level in forest(tokens, lag, width):  # the parents of each level are in earlier levels
        assert set(level.parent.tolist()) <= known | {-1}
        known |= set(level.child.tolist())
    assert (
        parent != {int(c): int(p) for lv in forest(tokens, lag + 1, width) for c, p in zip(*lv, strict=True)}
        or lag > 8
    )


def test_a_run_too_short_for_a_source_gets_a_warning():
    config = DialConfig(vocabulary={"text": 128, "image": 4096})
    dial = Dial(config)
    (sentence,) = dial.unlearnable(1_000_000)
    assert sentence.startswith(
        "Tokens of image cannot be learned in this run: each of the 8,191 transitions occurs"
    )
    needed = int(re.search(r"at least ([\d,]+) tokens", sentence).group(1).replace(",", ""))
    assert not dial.unlearnable(needed) and dial.unlearnable(needed - 1000)
    assert len(dial.unlearnable(0)) == 2
    ties = Dial(DialConfig(mutual_information=4.0)).unlearnable(1_000_000)
    assert len(ties) == 1 and ties[0].startswith("Ties of text and image")
    high = config.entropy_interval("image")[1]
    nothing = replace(config, entropy={"text": 2.75, "image": high - 0.05})  # nothing to learn
    assert not Dial(nothing).unlearnable(1_000_000)


def test_occurrences_are_what_counting_finds():
    config = chain(order="forward", entropy={"text": 1.5, "image": 2.0})
    dial = Dial(config)
    ids = dial.documents(0, 0, 2_000)[:, :24]
    row = dial.describe(2_000 * 48)[0]
    pairs = np.bincount(ids[:, :-3].ravel() * 12 + ids[:, 3:].ravel(), minlength=144)
    p = np.bincount(ids.ravel(), minlength=12) / ids.size
    by_chance = np.outer(p, p).ravel()
    tied = pairs / pairs.sum() > by_chance
    # A share ρ of the pairs is drawn from the coupling. The others are drawn independently, and some of these are
    # pairs of the coupling by chance.
    rho = (pairs[tied].sum() / pairs.sum() - by_chance[tied].sum()) / (1 - by_chance[tied].sum())
    assert row["transitions"] == 23 and pairs.sum() == 2_000 * 21
    assert rho * pairs.sum() / 23 == pytest.approx(row["seen"], rel=0.05)
    assert pairs.sum() / 23 > row["seen"] * 1.2
