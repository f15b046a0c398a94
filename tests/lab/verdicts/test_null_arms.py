"""Test the whole pipeline on equal arms and on planted effects, with docs/experiments/null_arms.py."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mmqk.lab.metrics import find_metric, metric_value
from mmqk.lab.stats.exact import clopper_pearson, level_of_look

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def null():
    spec = importlib.util.spec_from_file_location("null_arms", ROOT / "docs/experiments/null_arms.py")
    module = sys.modules["null_arms"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["null_arms"]


@pytest.mark.slow
def test_a_thousand_splits_of_arms_that_are_alike(null):
    """With six claims, selected learning rates and a true effect of min_effect (the worst case), at most 6.5 % of the
    random splits of the seeds into arms have a false verdict."""
    rate = null.false_verdicts(null.SIX, draws=1000)
    assert rate.draws == 1000 and rate.upper <= 0.065


@pytest.mark.slow
def test_without_its_rules_the_pipeline_is_wrong_more_often(null):
    assert null.by_chance(60).value > 0.2
    assert null.false_verdicts(null.WITHOUT_HOLM, draws=100).value > 0.1


def test_without_an_effect_nothing_is_reproduced(null):
    assert null.false_verdicts(null.SIX, null.Planted(), draws=100).upper <= 0.065


def smallest_p(null, metrics, first, last, orders):
    """Return for each metric and each row of ``orders`` the smallest p-value of scipy's t-test over all looks. A row
    has the seeds of the control, then those of the treatment."""
    found = []
    for name in metrics:
        values = np.array([metric_value(null.pool()[0.04, seed], name) for seed in null.SEEDS])
        values = values if "excess" in name else np.log(values)
        b, a = values[orders[:, :last]], values[orders[:, last : 2 * last]]
        ps = [stats.ttest_ind(a[:, :n], b[:, :n], axis=1).pvalue for n in range(first, last + 1)]
        found.append(np.min(ps, axis=0))
    return np.array(found)


@pytest.mark.slow
def test_seeds_that_are_added_are_paid_for(null):
    """The first test of the pipeline equals scipy's t-tests at the level of a look. These tests err in at most
    6.5 % of 20,000 splits; without the correction for looks, they err in more than 8 %."""
    metrics = ("largest_attention_logit", "final_norm", "final_excess/text")
    rng = np.random.default_rng(7)
    orders = np.argsort(rng.random((20_000, len(null.SEEDS))), axis=1)
    smallest = smallest_p(null, metrics, 6, 10, orders).min(axis=0)
    wrong, free = (int((smallest <= level).sum()) for level in (level_of_look(0.05 / 3, 6, 10), 0.05 / 3))
    assert clopper_pearson(wrong, len(orders))[1] <= 0.065
    assert free / len(orders) > 0.08
    # Take splits in which scipy's t-tests err, and as many splits in which they do not.
    chosen = [*np.flatnonzero(smallest <= 0.01)[:15], *np.flatnonzero(smallest > 0.01)[:15]]
    pools = {"plain": null.pool(), "a": null.pool(null.AT_DELTA)}
    for paid, level in ((True, level_of_look(0.05 / 3, 6, 10)), (False, 0.05 / 3)):
        design = null.looks(6, 10, paid)
        for i in chosen:
            seeds = {"plain": list(orders[i, :10]), "a": list(orders[i, 10:20])}
            judged = [v for n in range(6, 11) for v in null.verdicts(design, seeds, pools, n)]
            assert any(v.p <= v.adjusted.alpha for v in judged) == (smallest[i] <= level)
            assert all(v.p <= v.adjusted.alpha for v in judged if null.is_wrong(v, null.AT_DELTA))


@pytest.mark.slow
def test_a_planted_effect_is_found(null):
    """The true effect is a factor of 2; the claim states a factor above 1.25."""
    planted = null.Planted(math.log(2))
    assert null.found(null.MATCHED, planted, draws=120).value >= 0.6
    assert null.found(null.MATCHED, null.Planted(null.DELTA_LOG), draws=80).value <= 0.05
    assert null.found(null.SIX, planted, draws=100).value >= 0.35
    assert null.found(null.TWELVE, planted, draws=60).value >= 0.95


def test_the_series_are_those_of_the_file(null):
    """The metrics of the runs equal the numbers computed by hand from the lines of the file."""
    lines = [line.split(",") for line in (ROOT / "docs/experiments/null_arms.csv").read_text().splitlines()]
    head, runs = lines[0], null.pool(null.Planted(math.log(3), 0.5))
    assert len(runs) == len(null.RATES) * len(null.SEEDS) == (len(lines) - 1) / 3
    for (rate, seed), run in list(runs.items())[::17]:
        mine = [line for line in lines[1:] if (float(line[0]), int(line[1])) == (rate, seed)]
        logits = [float(line[head.index("attn_logit_absmax")]) for line in mine]
        assert metric_value(run, "largest_attention_logit") == pytest.approx(3 * np.median(logits))
        excess = float(mine[-1][head.index("val_excess/text")])
        metric, modality = find_metric("final_excess/text")
        assert metric.measure(run, modality) == pytest.approx(excess + 0.5)
