"""Each control of a verdict can fail: a planted violation changes the verdict."""


import pytest

from tests.lab.fake_runs import Planted
from tests.lab.verdicts.test_claims import BASIC, one, passed

ARMS = {arm: Planted(logit, spread=0.05) for arm, logit in {"a": 20, "b": 10, "c": 10, "d": 30}.items()}
SHOWS = {"id": "N", "treatment": "d", "control": "b", "min_effect": 0.2, "status": "exploratory"}


@pytest.mark.parametrize(
    "violation",
    [{"treatment": "b", "control": "c"}, {"min_effect": 5.0}, {"treatment": "b", "control": "d"}],
    ids=["no effect", "too small", "the other way"],
)
@pytest.mark.parametrize("use", ["positive_control", "manipulation_check"])
def test_a_claim_that_does_not_show_its_effect_is_no_control(tmp_path, violation, use):
    """C is an equivalence. Its verdict needs its positive control and its manipulation check."""
    same = BASIC | {"treatment": "b", "control": "c", "test": "equivalence", use: "N"}
    shown = one(tmp_path / "shown", ARMS, [same, SHOWS])
    assert shown.verdict == "reproduced" and passed(shown)[f"{use.replace('_', ' ')} N"]
    found = one(tmp_path / "violated", ARMS, [same, SHOWS | violation])
    assert found.verdict == "inconclusive" and not passed(found)[f"{use.replace('_', ' ')} N"]


def test_a_control_that_is_not_run_is_no_control(tmp_path):
    same = BASIC | {"treatment": "b", "control": "c", "test": "equivalence", "positive_control": "N"}
    found = one(tmp_path, ARMS, [same, {"id": "N", "statement": "a trend", "not_run": "It needs a GPU."}])
    assert found.verdict == "inconclusive" and not passed(found)["positive control N"]


def test_a_best_rate_that_nothing_chose_turns_an_equivalence(tmp_path):
    same = BASIC | {"treatment": "b", "control": "c", "test": "equivalence", "lr_rule": "own_best"}
    assert one(tmp_path / "free", ARMS, [same | {"lr_rule": None}]).verdict == "reproduced"
    found = one(tmp_path / "bound", ARMS, [same])
    assert found.verdict == "inconclusive" and not passed(found)["own best learning rate"]
