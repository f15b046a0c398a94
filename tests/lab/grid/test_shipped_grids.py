"""Test the shipped grids: what the arms have in common and what they change."""

from __future__ import annotations

from itertools import combinations

import pytest
import yaml

from mmqk.config import RunConfig, resolve
from mmqk.lab.grid import Grid, load_grid
from mmqk.lab.remedies import REMEDIES
from mmqk.store import flatten
from tests.lab.grid.resolved import ROOT, resolved, targets_of_a_row, unequal

DEMO = "configs/ablations/demo.yaml"
QK, PRE, POST = "model.qk_norm.kind", "model.pre_norm", "model.post_norm"
BATCH = "data.batch_size"


def strays(grid: Grid, runs: dict[str, RunConfig]) -> dict[tuple[str, str], set[str]]:
    """Return the unintended differences of each pair of arms: fields that differ although neither arm sets them, or
    although both arms set them to the same value."""
    found = {}
    for a, b in combinations(grid.arms, 2):
        named = a.fields.keys() | b.fields.keys()
        same = {name for name in named if a.fields.get(name, a) == b.fields.get(name, b)}
        difference = unequal(runs[a.name], runs[b.name])
        if difference - (named - same):
            found[a.name, b.name] = difference - (named - same)
    return found


def test_arms_differ_only_in_what_they_set(monkeypatch):
    grid, runs = resolved(DEMO, seed=1)
    assert strays(grid, runs) == {}
    for arm in grid.arms:
        for name, value in arm.fields.items():
            assert flatten(runs[arm.name].nested())[name] == value, (arm.name, name)
    decided = [arm.name for arm in grid.arms if arm.block == "decided"]
    assert {(a, b): unequal(runs[a], runs[b]) for a, b in combinations(decided, 2)} == {
        ("mixed", "mixed-qk"): {QK},
        ("mixed", "image-off-matched"): {"loss.weights.image", BATCH},
        ("mixed-qk", "image-off-matched"): {QK, "loss.weights.image", BATCH},
    }
    assert unequal(runs["mixed"], runs["image-off"]) == {"loss.weights.image"}
    assert unequal(runs["high-pre"], runs["high-post"]) == {PRE, POST}
    # The control: an arm that is resolved with one more field is detected.
    monkeypatch.chdir(ROOT)
    wider = resolve([*next(j.args for j in grid.jobs if j.arm == "mixed"), "--optim.beta2=0.99"])
    assert strays(grid, {**runs, "mixed": wider})["mixed", "mixed-qk"] == {"optim.beta2"}


def test_the_arm_without_the_image_loss_trains_as_many_targets_a_step():
    _, runs = resolved(DEMO, seed=1)
    mix, length = runs["mixed"].data.mix, runs["mixed"].data.seq_len
    assert (mix, length) == ({"pair": 3.0, "text": 1.0}, 128)
    count = targets_of_a_row(length)

    def targets(arm: str) -> float:
        run = runs[arm]
        trained = (name for name in ("text", "image") if run.loss.weights.get(name, 1.0) > 0)
        return run.data.batch_size * sum(count[name] for name in trained)

    assert targets("image-off-matched") == pytest.approx(targets("mixed"), rel=0.01)
    # The control: the arm that keeps its batch size trains about half as many targets.
    assert targets("image-off") < 0.6 * targets("mixed")


# The tournament -------------------------------------------------------------------------------------------


def missing_remedies(grid: Grid) -> set[str]:
    """Return the remedies that have no arm with their name and settings."""
    settings = {arm.name: flatten(dict(arm.fields)) for arm in grid.arms}
    return {remedy.key for remedy in REMEDIES if settings.get(remedy.key) != flatten(dict(remedy.settings))}


def test_the_tournament_has_every_remedy_and_an_arm_without_one_for_each_backend(tmp_path):
    path = ROOT / "configs/ablations/tournament.yaml"
    grid = load_grid(path)
    assert missing_remedies(grid) == {"mup"}  # it relates widths, and the tournament has one
    settings = {arm.name: dict(arm.fields) for arm in grid.arms}
    backends = {name: fields.get("backend", "sdpa") for name, fields in settings.items()}
    without = {backends[name]: name for name in grid.raw["report"]["ranking"]}
    assert set(backends.values()) == set(without) and settings["plain"] == {}
    assert settings[without["math"]] == {"backend": "math"}
    assert len(grid.raw["quick"]) == 10 and not {1, 2, 3} & set(grid.arms[0].lr.seeds)
    # The control: a remedy whose arm has a different value counts as missing.
    raw = yaml.safe_load(path.read_text())
    raw["base"] = [str(ROOT / "configs/demo.yaml")]
    raw["arms"]["qk_clip"]["set"]["optim.qk_clip"] = 50.0
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    assert missing_remedies(load_grid(tmp_path / "t.yaml")) == {"mup", "qk_clip"}
