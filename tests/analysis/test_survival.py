"""Compare Kaplan-Meier curves and the log-rank test with their definitions, and check for which claims they are
computed."""

import numpy as np
import pytest
from scipy import stats

from mmqk.analysis import judge, load_study
from mmqk.analysis.stats.survival import kaplan_meier, log_rank
from mmqk.report.figures.survival import survival_figure
from tests.analysis.fake_runs import Planted
from tests.analysis.test_analysis_claims import BASIC, study

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
    assert any(f"Failed runs: 6 of 6 in a and 0 of 6 in b; log-rank test of equal survival: p = {p:.2g}" in note
               for note in verdict.notes)  # fmt: skip
    figure = survival_figure(load_study(made.folder))
    lines = {line.arm: line for line in figure.rows[0][0].lines}
    assert lines["a"].values[-1] == 0 and lines["b"].values[-1] == 1
    assert lines["a"].steps.max() == 105 and lines["b"].steps.max() == 200
    assert "6 of 6 (a)" in figure.reading
    # The interactive chart draws one value per step, so each drop takes one step.
    assert lines["a"].steps.tolist() == [0, 99, 100, 101, 102, 103, 104, 105]
    assert lines["a"].values.tolist() == pytest.approx([1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])


def test_other_claims_have_neither(tmp_path):
    made = study(tmp_path, {"a": Planted(20), "b": Planted(10)}, [BASIC])
    assert survival_figure(made) is None
    assert not any("log-rank" in note for note in judge(made)[0].notes)
