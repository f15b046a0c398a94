"""Test the shipped claims: each is registered once per scale, has enough seeds, and can be decided."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
import yaml

from mmqk.lab.effects import FEWEST_OF_EACH, quantile_t
from mmqk.lab.grid import Grid, load_grids
from mmqk.lab.grid.decidable import MOST_CONFIRMATORY, by_family, decidable_claims, few_seeds
from tests.lab.grid.resolved import ROOT

FOLDER = ROOT / "configs/claims"
NAMES = ("learning_rates", "modalities", "placement", "competition")
GRIDS = {"cpu": [FOLDER / f"{name}.yaml" for name in NAMES], "gpu": [FOLDER / f"gpu/{name}.yaml" for name in NAMES[:3]]}
EVERY = {f"C{i}" for i in range(1, 27)}
# The grids outside the two pools.
OTHERS = (
    *(f"configs/ablations/{path.name}" for path in sorted((ROOT / "configs/ablations").glob("*.yaml"))),
    "configs/failures/late.yaml", "configs/claims/norm_competition.yaml",
    "configs/claims/norm_competition_real.yaml", "configs/claims/size.yaml", "configs/claims/final_norm.yaml",
    "configs/claims/logit_scale.yaml", "configs/claims/temperature.yaml",
)  # fmt: skip
FEWEST_SEEDS = 6


@pytest.fixture(scope="module")
def pools() -> dict[str, Grid]:
    return {scale: load_grids(paths) for scale, paths in GRIDS.items()}


@pytest.mark.parametrize("scale", GRIDS)
def test_every_claim_is_registered_once(scale):
    registered = Counter(claim["id"] for path in GRIDS[scale] for claim in yaml.safe_load(path.read_text())["claims"])
    assert {id for id in registered if re.fullmatch(r"C\d+", id)} == EVERY
    assert set(registered.values()) == {1}
    assert sorted(GRIDS["gpu"]) == sorted((FOLDER / "gpu").glob("*.yaml"))


@pytest.mark.parametrize("scale", GRIDS)
def test_the_claims_can_be_decided(pools, scale):
    pool = pools[scale]
    claims = decidable_claims(pool)
    assert not few_seeds(claims, pool.jobs)
    for claim in claims:
        assert claim.not_run or claim.status == "control" or claim.seeds >= FEWEST_SEEDS, claim.id
        assert not claim.decided or (claim.would_contradict and claim.source), claim.id


@pytest.mark.parametrize("scale", GRIDS)
def test_families_are_small_and_their_seeds_suffice(pools, scale):
    families = by_family(decidable_claims(pools[scale]), "confirmatory")
    assert len(families) >= 3
    for members in families.values():
        assert len(members) <= MOST_CONFIRMATORY
        for claim in members:
            if claim.test == "prediction":  # an AUROC has no seed spread
                assert claim.seeds >= 2 * FEWEST_OF_EACH
                continue
            # If the seed spread is min_effect / 2 and the effect is twice min_effect, the interval at the first level
            # of the Holm correction excludes min_effect.
            error = claim.min_effect / 2 * math.sqrt(2 / claim.seeds)
            assert quantile_t(1 - 0.025 / len(members), 2 * claim.seeds - 2) * error < claim.min_effect


@pytest.mark.parametrize("path", OTHERS)
def test_the_claims_of_the_other_grids_can_be_decided(path):
    claims = yaml.safe_load((ROOT / path).read_text()).get("claims") or ()
    assert len(decidable_claims(load_grids([ROOT / path]))) == len(claims)
