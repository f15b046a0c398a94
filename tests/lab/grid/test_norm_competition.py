"""Test the study of norm competition: the arms of a contrast differ only in the intended fields."""

from __future__ import annotations

from collections import Counter

import pytest

from mmqk.config import RunConfig
from mmqk.data.synthetic.dial import Dial
from mmqk.lab.grid import load_grid
from tests.lab.grid.resolved import ROOT, resolved, unequal

STUDY, PILOT = "configs/claims/norm_competition.yaml", "configs/claims/norm_competition_pilot.yaml"
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


def test_seeds_families_and_registration(study):
    grid, _ = study
    pilot = load_grid(ROOT / PILOT)
    seeds = {arm.name: set(arm.seeds) for arm in grid.arms}
    assert not set.union(*seeds.values()) & {seed for arm in pilot.arms for seed in arm.seeds}
    claims = grid.raw["claims"]
    primary = [claim for claim in claims if claim.get("status") == "confirmatory"]
    assert Counter(claim["alpha_family"] for claim in primary) == {"primary": 6, "edge": 1}
    for claim in primary:
        arms = {claim[side].partition("-")[0] for side in ("treatment", "control")}
        assert all(len(seeds[arm]) == claim["seeds"] == 12 for arm in arms) and arms <= set(grid.raw["quick"])
    assert max(Counter(claim["alpha_family"] for claim in claims if "not_run" not in claim).values()) <= 6
    assert len(grid.raw["hypotheses"]) == 5
