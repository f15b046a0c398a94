"""Axes, families and learning rates: a claim compares the right runs, and selection and verdict use different
runs."""

import math

import numpy as np
import pytest
from scipy import stats

from mmqk.lab.study import load_study
from mmqk.lab.verdicts.judge import judge
from mmqk.lab.verdicts.measure import BestRate, choose, distinguishable
from mmqk.store import UserError
from tests.lab.fake_runs import Planted, write_grid
from tests.lab.verdicts.test_claims import passed

RATES = (0.01, 0.02, 0.04)
# The arms have the same configuration; their difference is planted.
ALIKE = {"declared": "planted numbers"}
CLAIM = {"id": "C", "treatment": "a", "control": "b", "min_effect": 0.2, "unchecked": ALIKE}


def planted(logit, excess):
    return Planted(logit, excess={"text": excess, "image": excess})


def own_best(tmp_path, excess, ran=None, rates=RATES):
    """Return the verdict on arms a and b; ``excess`` is the excess loss of each arm at each learning rate. The
    verdict runs of an arm have its best learning rate, or the one that ``ran`` names."""
    runs = []
    for arm, logit, losses in zip("ab", (20.0, 10.0), excess, strict=True):
        for rate, loss in zip(rates, losses, strict=True):
            for seed in range(2):
                entry = {"arm": f"{arm}-lr{rate:g}", "family": arm, "seed": 90 + seed, "role": "selection"}
                entry["point"] = {"optim.lr": rate}
                # These logits would reverse the verdict if they were used.
                runs.append((entry, planted(1000.0 if arm == "b" else 1.0, loss + 0.002 * seed), {"optim.lr": rate}))
        best = (ran or {}).get(arm, rates[int(np.argmin(losses))])
        runs += [
            ({"arm": arm, "family": arm, "seed": seed}, planted(logit, min(losses) + 0.001 * seed), {"optim.lr": best})
            for seed in range(6)
        ]
    grid = {"arms": {"a": {}, "b": {}}, "claims": [CLAIM], "lr": {"rule": "own_best", "metric": "final_excess"}}
    return judge(load_study(write_grid(tmp_path / "made", grid, runs)))[0]


def test_runs_that_chose_a_rate_decide_nothing(tmp_path):
    found = own_best(tmp_path, ([0.3, 0.1, 0.2], [0.3, 0.1, 0.2]))
    assert found.verdict == "reproduced" and found.effect.value == pytest.approx(math.log(2))
    assert len(found.runs) == 12 and all(passed(found).values())
    assert "Own best learning rates: 0.02 (a; tried 0.01, 0.02 and 0.04)" in " ".join(found.notes)


def test_rates_may_differ_where_the_choice_is_clear(tmp_path):
    rates = (0.01, 0.02, 0.04, 0.08)
    clear = ([0.3, 0.1, 0.3, 0.4], [0.4, 0.3, 0.1, 0.3])
    found = own_best(tmp_path / "clear", clear, rates=rates)
    assert found.verdict == "reproduced" and passed(found)["learning rates differ by more than chance"]
    luck = ([0.3, 0.100, 0.101, 0.4], [0.4, 0.101, 0.100, 0.3])
    found = own_best(tmp_path / "luck", luck, rates=rates)
    assert found.verdict == "inconclusive" and not passed(found)["learning rates differ by more than chance"]
    assert "the selection runs do not distinguish" in next(c.detail for c in found.checks if "chance" in c.name)


def test_a_best_rate_at_an_end_leaves_it_open(tmp_path):
    found = own_best(tmp_path, ([0.3, 0.2, 0.1], [0.3, 0.2, 0.1]))
    assert found.verdict == "inconclusive" and not passed(found)["own best learning rate inside the grid"]


def test_runs_at_another_rate_than_the_best_leave_it_open(tmp_path):
    found = own_best(tmp_path, ([0.3, 0.1, 0.2], [0.3, 0.1, 0.2]), ran={"a": 0.04})
    assert found.verdict == "inconclusive" and not passed(found)["own best learning rate"]


def test_the_mean_of_what_is_trained_chooses_and_a_divergence_is_worst(tmp_path):
    def tried(rate, excess, **more):
        entry = {"arm": f"a-{rate}", "family": "a", "seed": 0, "role": "selection", "point": {"optim.lr": rate}}
        return entry, Planted(1.0, excess=dict(zip(("text", "image"), excess, strict=True)), **more), {}

    runs = [tried(0.1, (0.2, 0.2)), tried(0.2, (0.1, 0.28)), tried(0.4, (0.01, 0.01), diverges=150)]
    made = write_grid(tmp_path / "made", {"arms": {"a": {}}, "claims": []}, runs)
    found = choose(load_study(made).runs)
    assert found.means == pytest.approx({0.1: 0.2, 0.2: 0.19, 0.4: math.inf}) and found.rate == 0.2
    assert choose(load_study(made).runs, "final_excess/image").rate == 0.1
    assert choose([]) is None
    with pytest.raises(UserError, match="single run"):
        choose(load_study(made).runs, "first_unstable_lr")


def test_rates_are_told_apart_by_a_t_test_of_what_exchanging_them_costs():
    rng = np.random.default_rng(0)
    for gap in (0.004, 0.02, 0.05):
        cells = {arm: {r: rng.normal(0.1, 0.01, 3) for r in RATES} for arm in "ab"}
        cells["a"][0.04] += gap
        cells["b"][0.01] += gap
        means = {arm: {r: float(v.mean()) for r, v in c.items()} for arm, c in cells.items()}
        first, second = (
            BestRate(best, means[arm], {r: tuple(v) for r, v in cells[arm].items()}, True)
            for arm, best in (("a", 0.01), ("b", 0.04))
        )
        loss = means["a"][0.04] - means["a"][0.01] + means["b"][0.01] - means["b"][0.04]
        sd = np.sqrt(np.mean([v.var(ddof=1) for c in cells.values() for v in c.values()]))
        p = stats.t.sf(loss / (sd * math.sqrt(4 / 3)), 12)
        assert distinguishable(first, second, []) == (p < 0.01 / 6)
    assert distinguishable(first, second, []) and not distinguishable(first, second, [[0.0, 1.0, 2.0]] * 2)


# Axes --------------------------------------------------------------------------------------------------------------


def crossed(tmp_path, claim):
    """Return a study of two families over an axis; the log of the largest logit has the slope of the family."""
    runs = []
    for family, slope in (("a", 0.5), ("b", 0.1)):
        for depth in (2, 4, 8):
            for seed in range(4):
                point = {"model.n_layers": depth}
                entry = {"arm": f"{family}-n_layers{depth}", "family": family, "point": point, "seed": seed}
                of_seed = slope + 0.002 * seed  # otherwise the slopes have no spread
                runs.append((entry, Planted(10 * math.exp(of_seed * depth), spread=0.05), point))
    grid = {"arms": {"a": {"label": "first"}, "b": {}}, "claims": [claim]}
    return load_study(write_grid(tmp_path / "made", grid, runs))


@pytest.mark.parametrize("depth", [2, 8])
def test_a_point_of_two_families_is_compared(tmp_path, depth):
    found = judge(crossed(tmp_path, CLAIM | {"at": {"model.n_layers": depth}}))[0]
    assert found.effect.value == pytest.approx(0.4 * depth) and len(found.runs) == 8
    assert found.verdict == "reproduced"


@pytest.mark.parametrize(("highest", "verdict"), [(4.0, "reproduced"), (3.5, "inconclusive")])
def test_a_number_of_a_family_is_compared_by_seed(tmp_path, highest, verdict):
    """The sensitivity of each arm is the mean over two learning rates of the loss above the lowest."""
    runs = [
        (
            {"arm": f"{arm}-{rate}", "family": arm, "seed": seed, "point": {"optim.lr": rate}},
            Planted(10.0, {"text": loss + seed * rate, "image": 4.6}),
            {"optim.lr": rate},
        )
        for arm, worst in (("a", highest), ("b", 3.5))
        for rate, loss in ((0.01, 3.0), (0.02, worst))
        for seed in range(4)
    ]
    claim = CLAIM | {"metric": "lr_sensitivity/text", "min_effect": 0.1}
    grid = {"arms": {"a": {}, "b": {}}, "claims": [claim]}
    found = judge(load_study(write_grid(tmp_path / "made", grid, runs)))[0]
    assert found.effect.value == pytest.approx((highest - 3.5) / 2, abs=1e-3) and found.effect.n == 4
    assert found.verdict == verdict and len(found.runs) == 16


def test_the_bound_of_a_family_stays_its_value(tmp_path):
    """Arm a is stable up to 0.03, so its first unstable learning rate is at least 0.09; that of arm b is 0.3."""
    runs = [
        (
            {"arm": f"{arm}-{rate}", "family": arm, "seed": seed, "point": {"optim.lr": rate}},
            Planted(10.0, {"text": 5.0 if rate == 0.3 else 3.0 - rate, "image": 4.6 - rate}),
            {"optim.lr": rate},
        )
        for arm, rates in (("a", (0.01, 0.03)), ("b", (0.1, 0.3)))
        for rate in rates
        for seed in range(4)
    ]
    grid = {"arms": {"a": {}, "b": {}}, "claims": [CLAIM | {"metric": "first_unstable_lr"}]}
    found = judge(load_study(write_grid(tmp_path / "made", grid, runs)))[0]
    assert found.effect.value == pytest.approx(math.log(0.09 / 0.3)) and found.verdict == "inconclusive"


def test_a_family_that_lacks_a_run_is_open(tmp_path):
    claim = CLAIM | {"metric": "lr_sensitivity/text"}
    study = crossed(tmp_path, claim)
    path = next(run.path for run in study.runs if run.arm == "b-n_layers8" and run.seed == 2)
    (path / "status.json").write_text('{"status": "interrupted", "step": 3}')
    found = judge(load_study(tmp_path / "made"))[0]
    assert found.verdict == "inconclusive" and "11 of 12 planned runs of “b” finished." in found.notes
