"""The grid on the shipped pairs: what each arm changes, and its targets counted in the data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mmqk.analysis.verdicts.claims import check_claims
from mmqk.analysis.verdicts.decidable import check_decidable
from mmqk.config import resolve
from mmqk.data.datamodule import TokenDataModule
from mmqk.grid import load_grid
from mmqk.grid.claims import read_claims
from mmqk.store import flatten

ROOT = Path(__file__).parents[2]
STUDY = "configs/claims/norm_competition_real.yaml"
SEQUENCES = 2400  # 10 cycles of the mixture
TEXT, IMAGE = "text", "image"


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        grid = load_grid(STUDY)
        return grid, {job.arm: resolve(list(job.args)) for job in grid.jobs if job.seed == 41}


@pytest.fixture(scope="module")
def targets(study):
    """Mean targets of a step by arm and modality, from the rows of the run."""
    counts = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name in ("plain", "shuffled", "text-only", "image-off", "images-removed"):
            config = study[1][name].data
            data = TokenDataModule(config, seed=41)
            data.setup()
            counts[name] = {m: n * config.batch_size for m, n in data.targets(SEQUENCES).items()}
    return counts


def unequal(a, b) -> set[str]:
    flat_a, flat_b = flatten(a.nested()), flatten(b.nested())
    return {key for key in flat_a.keys() | flat_b.keys() if flat_a.get(key) != flat_b.get(key)} - {"loss.weights"}


def test_each_arm_changes_what_it_names(study):
    _, runs = study
    changed = {name: unequal(runs["plain"], run) for name, run in runs.items()}
    assert changed == {
        "plain": set(),
        "qk": {"model.qk_norm.kind"},
        "shuffled": {"data.pairing"},
        "text-only": {"data.mix.pair", "data.seq_len"},
        "image-off": {"loss.weights.image", "data.batch_size"},
        "images-removed": {"data.pairing"},
        "shares": {"loss.weights.text", "loss.weights.image"},
    }


def test_matched_targets_are_counted_in_the_data(targets):
    plain = targets["plain"]
    total = plain[TEXT] + plain[IMAGE]
    assert plain[TEXT] == pytest.approx(8 * 55.06, rel=0.02) and plain[IMAGE] == pytest.approx(8 * 48, rel=0.02)
    assert targets["shuffled"] == pytest.approx(plain, rel=0.02)
    assert targets["text-only"] == pytest.approx({TEXT: total, IMAGE: 0}, rel=0.02)
    assert targets["image-off"][TEXT] == pytest.approx(total, rel=0.02)
    assert targets["images-removed"] == pytest.approx({TEXT: plain[TEXT], IMAGE: 0}, rel=0.02)
    # The control: another batch size is not matched.
    assert targets["image-off"][TEXT] * 14 / 15 != pytest.approx(total, rel=0.02)


def test_claims_are_exploratory_in_one_small_family(study):
    grid, _ = study
    assert {arm.name: list(arm.seeds) for arm in grid.arms} == dict.fromkeys(study[1], [41, 42, 43, 44])
    names = {arm.name for arm in grid.arms}
    claims = read_claims(grid.raw["claims"], names, grid.name, grid.path)
    check_claims(claims, {arm.name: tuple(arm.points.values()) for arm in grid.arms}, "cpu")
    check_decidable(claims, grid.jobs, "cpu")
    assert max(Counter(claim.alpha_family for claim in claims).values()) <= 6
    for claim in claims:
        assert (claim.status, claim.metric, claim.min_effect) == ("exploratory", "largest_attention_logit", 0.4055)
        assert claim.source and claim.would_contradict and claim.estimand, claim.id
