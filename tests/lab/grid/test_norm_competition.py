"""Test the study of norm competition: the arms of a contrast differ only in the intended fields."""

from __future__ import annotations

import pytest

from mmqk.config import RunConfig
from mmqk.data.dial import Dial
from tests.lab.grid.resolved import resolved, unequal

STUDY = "configs/claims/norm_competition.yaml"
MECHANISMS = "configs/claims/norm_competition_mechanisms.yaml"


@pytest.fixture(scope="module")
def study():
    return resolved(STUDY, seed=1)


@pytest.fixture(scope="module")
def mechanisms():
    return resolved(MECHANISMS, seed=61)


def trained_targets(run: RunConfig) -> int:
    """Return the number of trained targets per step; each document fills a row, and its first token is not a
    target."""
    dial, weights = run.data.dial, run.loss.weights
    per_row = sum(n for m, n in dial.tokens.items() if weights.get(m, 1.0) > 0)
    return run.data.batch_size * per_row


def test_the_primary_contrasts_change_one_thing_each(study):
    _, runs = study
    for rate in ("low", "high", "edge"):
        mid = runs[f"mid-{rate}"]
        entropies = {"data.dial.entropy.text", "data.dial.entropy.image"}
        assert unequal(mid, runs[f"hi-{rate}"]) == entropies
        if rate == "edge":  # only the gap is tested there
            continue
        assert unequal(mid, runs[f"lag1-{rate}"]) == {"data.dial.lag.text", "data.dial.lag.image"}
        assert unequal(mid, runs[f"image_off-{rate}"]) == {"loss.weights.image", "data.batch_size"}
        assert trained_targets(mid) == trained_targets(runs[f"image_off-{rate}"])
    for rate in ("low", "high", "edge"):
        floors = {name: Dial(runs[f"{name}-{rate}"].data.dial).floors() for name in ("mid", "hi")}
        assert floors["mid"]["image"] == pytest.approx(floors["mid"]["text"])
        assert floors["hi"]["image"] - floors["hi"]["text"] > 1.5
        assert sum(floors["hi"].values()) == pytest.approx(sum(floors["mid"].values()))
    # The controls: other arms differ in more fields, and an arm with the image loss off and the same batch size has a
    # different number of targets.
    assert unequal(runs["mid-low"], runs["hi-high"]) > entropies
    assert trained_targets(runs["mid-low"]) != trained_targets(runs["image_off_16-low"])


def test_each_mechanism_is_removed_from_the_same_run(mechanisms):
    _, runs = mechanisms
    for name in ("sink", "qk", "adamh", "embed_norm", "split", "untie_norms", "untie_qk", "untie_mlp", "batch"):
        changed = unequal(runs["hi"], runs[name]) - {"backend"}
        assert len(changed) == 1, (name, changed)
    assert trained_targets(runs["text_only"]) == trained_targets(runs["mid"])
    assert trained_targets(runs["batch"]) == 4 * trained_targets(runs["hi"])
    shares = runs["shares"].loss.weights
    assert shares["text"] * 1.5 == pytest.approx(shares["image"] * 3.5)
    assert sum(shares.values()) == pytest.approx(2)
