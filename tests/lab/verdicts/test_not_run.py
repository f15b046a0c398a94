"""A claim that is registered with the reason why no run tests it."""

import pytest

from mmqk.lab import judge
from mmqk.store import UserError
from tests.lab.fake_runs import Planted
from tests.lab.verdicts.test_claims import BASIC, study

REASON = "It would need a larger model, about 8 hours of one GPU"
ABSENT = {"id": "C5", "statement": "a trend over sizes", "not_run": REASON}
ARMS = {"a": Planted(20), "b": Planted(10)}


def test_it_is_not_run_with_its_reason(tmp_path):
    decided, absent = judge(study(tmp_path, ARMS, [BASIC, ABSENT]))
    assert (decided.verdict, absent.verdict) == ("reproduced", "not run")
    assert absent.notes == (f"{REASON}.",) and absent.runs == () and absent.adjusted is None


def test_it_takes_no_level_from_its_family(tmp_path):
    alone = judge(study(tmp_path / "alone", ARMS, [BASIC]))[0]
    beside, second = judge(study(tmp_path / "two", ARMS, [BASIC, ABSENT]))[0], BASIC | {"id": "C6"}
    three = judge(study(tmp_path / "three", ARMS, [BASIC, second]))[0]
    assert beside.adjusted.claims == alone.adjusted.claims == 1
    assert three.adjusted.claims == 2  # the control: a claim with arms counts in the family


@pytest.mark.parametrize(
    "also", [{"arms": ["a"]}, {"treatment": "a", "control": "b", "min_effect": 0.2}, {"status": "control"}]
)
def test_it_has_no_arms(tmp_path, also):
    with pytest.raises(UserError, match="claim C5: it has not_run: remove"):
        study(tmp_path, ARMS, [ABSENT | also])
