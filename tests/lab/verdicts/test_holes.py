"""No verdict is reached without the required evidence."""

import math

import pytest

from mmqk.lab.grid.claims import Claim
from mmqk.lab.verdicts.judge import judge
from mmqk.lab.verdicts.measure import measure, spread_outcomes
from mmqk.lab.verdicts.study import compare, load_study
from tests.lab.fake_runs import DEMO, Planted, write_demo


def verdicts(folder, planted=None, change=None):
    study = load_study(write_demo(folder, planted, change=change))
    return {verdict.claim.id: verdict for verdict in judge(study)}


def control(verdict, kind):
    return next(control for control in verdict.checks if control.name.startswith(kind))


def test_no_difference_is_no_positive_control(tmp_path):
    """C2 is the positive control of C10: first C2 claims an effect, then an equivalence that is reproduced."""
    assert verdicts(tmp_path / "effect")["C10"].verdict == "contradicted"

    def change(grid):
        grid["claims"][0] |= {"test": "equivalence"}

    found = verdicts(tmp_path / "equal", {"mixed-qk": Planted(60.0)}, change)
    assert found["C2"].verdict == "reproduced"
    assert not control(found["C10"], "positive").passed and found["C10"].verdict == "inconclusive"


def test_runs_that_were_not_measured_do_not_count_as_not_reached(tmp_path):
    def change(grid):
        grid["claims"][0] |= {"test": "count", "at_least": 40.0, "min_effect": 0.05}

    seeds = tuple(range(6))
    study = load_study(write_demo(tmp_path / "demo", seeds=seeds, change=change))
    found = judge(study)[0]
    assert found.counts == {"mixed": (6, 6), "mixed-qk": (0, 6)} and found.verdict == "reproduced"
    for path in (tmp_path / "demo").glob("mixed-qk*/seed*/metrics.jsonl"):
        path.write_text(path.read_text().replace("attn_logit_absmax", "attn_logit_other"))
    found = judge(load_study(tmp_path / "demo"))[0]
    assert found.verdict == "inconclusive"
    assert found.open == "Without a value: “mixed, QK-Norm” seed 0, “mixed, QK-Norm” seed 1 and 4 more."


@pytest.mark.parametrize(("forked", "arms"), [(False, 5), (True, 3)])
def test_forks_of_one_run_give_the_spread_once(tmp_path, forked, arms):
    """Forks of one run count once, because each fork would otherwise add degrees of freedom without a new seed."""
    planted = DEMO | {"late": Planted(60.0), "later": Planted(60.0)}

    def change(grid):
        for arm in ("late", "later"):
            grid["arms"][arm] = {"label": arm, "block": "decided", "set": {}}

    from tests.lab import fake_runs

    fake = {arm: fake_runs.SETTINGS["mixed"] for arm in ("late", "later")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_runs, "SETTINGS", fake_runs.SETTINGS | fake)
        patch.setattr(fake_runs, "LABELS", fake_runs.LABELS | {arm: arm for arm in fake})
        study = load_study(write_demo(tmp_path / "demo", planted, change=change))
    parents = {run.seed: run.name for run in study.runs if run.arm == "mixed"}
    for run in study.runs:
        if forked and run.arm.startswith("late"):
            run.fork = {"parent": parents[run.seed], "step": 100}
    claim = Claim("T", "", metric="largest_attention_logit", treatment="mixed", control="mixed-qk")
    compared = compare(study, claim)
    spread = spread_outcomes(compared, measure(compared.groups, claim.metric))
    assert len(spread) == arms and math.isfinite(sum(map(sum, spread.values())))
