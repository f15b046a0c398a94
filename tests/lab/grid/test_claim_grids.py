"""Test the grids of configs/claims: each claim is registered once per scale and has enough seeds, and the runs for
the CPU take less than 3 hours."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
import yaml

from mmqk.lab.grid.check import MOST_CONFIRMATORY, by_family, few_seeds
from mmqk.lab.grid.grid import Grid, load_grids
from mmqk.lab.stats.effects import FEWEST_OF_EACH, quantile_t
from tests.lab.grid.resolved import ROOT, decidable_claims

FOLDER = ROOT / "configs/claims"
NAMES = ("learning_rates", "modalities", "placement", "competition")
GRIDS = {
    "cpu": [FOLDER / f"{name}.yaml" for name in NAMES],
    "gpu": [FOLDER / f"gpu/{name}.yaml" for name in NAMES[:3]],
}
EVERY = {f"C{i}" for i in range(1, 27)}
# This claim is decided in norm_competition.yaml.
ELSEWHERE = {"C11"}
DECIDED = {f"C{i}" for i in (1, 2, 3, 8, 9, 10, 11, 12, 13, 15, 18, 24, 25)} - ELSEWHERE
# Seconds per run on one core of a small machine, with startup: 300 steps of demo.yaml, 1,500 steps of dial.yaml.
SECONDS = {"demo.yaml": 15.0, "dial.yaml": 95.0}
MOST_HOURS, CORES, FEWEST_SEEDS = 3.0, 2, 6


@pytest.fixture(scope="module")
def pools() -> dict[str, Grid]:
    return {scale: load_grids(paths) for scale, paths in GRIDS.items()}


def hours(pool: Grid) -> float:
    """Return an upper bound on the training time on two cores; equal runs of different arms are counted twice."""
    seconds = 0.0
    for job in pool.jobs:
        base = next(name for name in SECONDS if any(arg.endswith(f"/{name}") for arg in job.args))
        seconds += SECONDS[base]
    return seconds / CORES / 3600


@pytest.mark.parametrize("scale", GRIDS)
def test_every_claim_is_registered_once(scale):
    registered = Counter(
        claim["id"] for path in GRIDS[scale] for claim in yaml.safe_load(path.read_text())["claims"]
    )
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


def test_the_cpu_pool_decides_what_it_should_in_time(pools):
    claims = {claim.id: claim for claim in decidable_claims(pools["cpu"])}
    assert {id for id in EVERY if claims[id].decided} >= DECIDED
    assert all(claims[id].not_run for id in ELSEWHERE)
    assert 0.5 < hours(pools["cpu"]) < MOST_HOURS
    # The control: five times as many seeds would take too long.
    assert 5 * hours(pools["cpu"]) > MOST_HOURS


def test_make_claims_trains_the_cpu_pool():
    recipe = (ROOT / "Makefile").read_text().split("\nclaims:")[1].split("\n\n")[0]
    assert [f"configs/claims/{name}.yaml" for name in NAMES] == re.findall(
        r"configs/claims/\S+\.yaml", recipe
    )
