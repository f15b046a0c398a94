"""Compare Kaplan-Meier curves and the log-rank test with their definitions, and check for which claims they are
computed."""

import json

import numpy as np
import pytest
from scipy import stats

from mmqk.lab import judge, load_study
from mmqk.lab.page.figures import survival
from mmqk.lab.stats.exact import kaplan_meier, log_rank
from tests.lab.fake_runs import Planted
from tests.lab.verdicts.test_claims import BASIC, study

RNG = np.random.default_rng(5)


def test_the_curve_is_the_product_of_the_shares_that_survive_each_failure():
    times, failed = RNG.integers(1, 12, 30).astype(float), RNG.random(30) < 0.6
    steps, shares = kaplan_meier(times, failed)
    survival = 1.0
    for step, share in zip(steps, shares, strict=True):
        here = failed & (times == step)
        if step:
            survival *= 1 - here.sum() / (times >= step).sum()
        assert share == pytest.approx(survival)
    naive = [(times > step).mean() for step in steps]  # the control: censored runs counted as failed
    assert not np.allclose(naive, shares)


def test_the_log_rank_test_compares_observed_with_expected_failures():
    a, b = RNG.integers(1, 20, 25).astype(float), RNG.integers(5, 40, 25).astype(float)
    failed_a, failed_b = RNG.random(25) < 0.8, RNG.random(25) < 0.8
    observed = expected = variance = 0.0
    for step in np.unique(np.concatenate([a[failed_a], b[failed_b]])):
        n, m = (a >= step).sum(), (b >= step).sum()
        d = (failed_a & (a == step)).sum() + (failed_b & (b == step)).sum()
        observed += (failed_a & (a == step)).sum()
        expected += d * n / (n + m)
        if n + m > 1:
            variance += d * n * m * (n + m - d) / ((n + m) ** 2 * (n + m - 1))
    p = 2 * stats.norm.sf(abs(observed - expected) / np.sqrt(variance))
    assert log_rank(a, failed_a, b, failed_b) == pytest.approx(p, rel=1e-9)
    assert log_rank(b, failed_b, b, failed_b) == pytest.approx(1)  # the control: equal arms
    assert np.isnan(log_rank([5.0], [False], [5.0], [False]))


CLAIM = BASIC | {"metric": "time_of_divergence", "direction": "less", "min_effect": 0.1}


def test_a_claim_about_a_time_of_failure_has_the_test_and_the_curves(tmp_path):
    arms = {"a": lambda seed: Planted(10, diverges=100 + seed, validated=False), "b": Planted(10)}
    made = study(tmp_path, arms, [CLAIM])
    (verdict,) = judge(made)
    p = log_rank([100 + s for s in range(6)], [True] * 6, [200] * 6, [False] * 6)
    assert any(f"Log-rank test of equal survival: p = {p:.2g}." in note
               for note in verdict.notes)  # fmt: skip
    figure = survival(load_study(made.folder))
    lines = {line.arm: line for line in figure.rows[0][0].lines}
    assert lines["a"].y[-1] == 0 and lines["b"].y[-1] == 1
    assert lines["a"].x.max() == 105 and lines["b"].x.max() == 200
    # The interactive chart draws one value per step, so each drop takes one step.
    assert lines["a"].x.tolist() == [0, 99, 100, 101, 102, 103, 104, 105]
    assert lines["a"].y.tolist() == pytest.approx([1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])


def test_the_interval_of_a_time_uses_only_the_two_arms(tmp_path):
    """An arm without failures has no spread, so it must not narrow or widen the interval of other arms."""
    def late(seed):
        return Planted(10, diverges=100 + 10 * seed, validated=False)

    arms = {"a": late, "b": Planted(10)}
    effects = [
        judge(study(tmp_path / name, arms | more, [CLAIM]))[0].effect
        for name, more in (("two", {}), ("calm", {"c": Planted(10)}), ("failing", {"c": late}))
    ]
    assert {effect.of for effect in effects} == {"two arms"} and effects[0] == effects[1] == effects[2]
    times = np.array([0.5 + 0.05 * seed for seed in range(6)])
    assert effects[0].interval(0.05) == pytest.approx(stats.ttest_1samp(times - 1, 0).confidence_interval())


def test_the_notes_say_what_the_comparison_leaves_out(tmp_path):
    arms = {"a": lambda seed: Planted(10, diverges=100 + seed, validated=False), "b": Planted(10)}
    notes = " ".join(judge(study(tmp_path / "all", arms, [CLAIM]))[0].notes)
    assert "Failed runs of “b”: 0 of 6; the interval ignores" in notes and "does not train" not in notes
    made = study(tmp_path / "off", arms, [CLAIM])
    for record in made.folder.glob("b-*/*/run.json"):
        content = json.loads(record.read_text())
        content["details"]["config"]["loss"] = {"weights": {"image": 0.0}}
        record.write_text(json.dumps(content))
    notes = " ".join(judge(load_study(made.folder))[0].notes)
    assert "Losses that “b” does not train: image." in notes


def test_unfinished_runs_have_no_test_and_a_warning(tmp_path):
    arms = {"a": lambda seed: Planted(10, diverges=100 + seed, validated=False), "b": Planted(10)}
    made = study(tmp_path, arms, [CLAIM])
    status = next(made.folder.glob("b-*/seed0/status.json"))
    status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "running"}))
    made = load_study(made.folder)
    notes = " ".join(judge(made)[0].notes)
    assert "Failed runs of “a”: 6 of 6." in notes and "Log-rank" not in notes


def test_other_claims_have_neither(tmp_path):
    made = study(tmp_path, {"a": Planted(20), "b": Planted(10)}, [BASIC])
    assert survival(made) is None
    assert not any("Log-rank" in note for note in judge(made)[0].notes)
