"""Test the whole pipeline on equal arms and on planted effects, with docs/experiments/null_arms.py."""

import math
from pathlib import Path

import null_arms as null
import numpy as np
import pytest

from mmqk.lab.metrics import find_metric, metric_value

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_thousand_splits_of_arms_that_are_alike():
    """With six claims, selected learning rates and a true effect of min_effect (the worst case), at most 6.5 % of the
    random splits of the seeds into arms have a false verdict."""
    rate = null.false_verdicts(null.SIX, draws=1000)
    assert rate.draws == 1000 and rate.upper <= 0.065


@pytest.mark.slow
def test_without_its_rules_the_pipeline_is_wrong_more_often():
    assert null.by_chance(60).value > 0.2
    assert null.false_verdicts(null.WITHOUT_HOLM, draws=100).value > 0.1


@pytest.mark.slow
def test_without_an_effect_nothing_is_reproduced():
    assert null.false_verdicts(null.SIX, null.Planted(), draws=100).upper <= 0.065


@pytest.mark.slow
def test_a_planted_effect_is_found():
    """The true effect is a factor of 2; the claim states a factor above 1.25."""
    planted = null.Planted(math.log(2))
    assert null.found(null.MATCHED, planted, draws=120).value >= 0.6
    assert null.found(null.MATCHED, null.Planted(null.DELTA_LOG), draws=80).value <= 0.05
    assert null.found(null.SIX, planted, draws=100).value >= 0.35
    assert null.found(null.TWELVE, planted, draws=60).value >= 0.95


def test_the_series_are_those_of_the_file():
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
