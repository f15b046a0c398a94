"""The figures of outcomes over time and by layer have the numbers of the runs."""

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest

from mmqk.lab import load_study
from mmqk.lab.grid.claims import check_report
from mmqk.lab.page.figures.outcomes import outcome_figures
from mmqk.store import UserError
from tests.analysis.small_runs import small_run

LAYERS, PROBES = 3, 5


def value(arm, seed, layer, step):
    return (2.0 if arm == "a" else 7.0) + seed + 0.1 * layer + 0.01 * step


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for arm in "ab":
        for seed in range(3):
            series = {"loss/text": [5.0] * PROBES, "loss/image": [5.0] * PROBES}
            for layer in range(LAYERS):
                offsets = [value(arm, seed, layer, step) for step in range(PROBES)]
                series[f"attn_logit_offset_var/text/layer{layer:02d}"] = offsets
            small_run(folder / arm / f"seed{seed}", series, seed=seed)
    return load_study(folder)


def rows_of(figure):
    return list(csv.DictReader(io.StringIO(figure.csv())))


def test_a_line_is_the_median_over_the_runs_of_an_arm(study):
    over_time, by_layer = outcome_figures(replace(study, report={"outcomes": True}))
    rows = [row for row in rows_of(over_time) if row["statistic"] == "logit_offset/text"]
    assert len(rows) == 2 * PROBES  # medians only
    for row in rows:
        step = int(row["step"]) - 1
        of_seeds = [
            math.sqrt(np.mean([value(row["arm"], seed, layer, step) for layer in range(LAYERS)]))
            for seed in range(3)
        ]
        assert float(row["value"]) == pytest.approx(np.median(of_seeds), rel=1e-4)
    ends = rows_of(by_layer)
    assert len(ends) == 2 * LAYERS
    for row in ends:
        layer = int(float(row["at_layer"]))
        # The median over seeds of the median over the last three probes.
        assert float(row["value"]) == pytest.approx(math.sqrt(value(row["arm"], 1, layer, PROBES - 2)), rel=1e-4)


def test_only_the_named_arms_are_drawn_and_nothing_without_the_field(study):
    assert outcome_figures(study) == [] and outcome_figures(replace(study, report={"outcomes": False})) == []
    one = replace(study, report={"outcomes": ["b"]})
    assert {row["arm"] for figure in outcome_figures(one) for row in rows_of(figure)} == {"b"}


def test_an_arm_that_does_not_exist_is_refused():
    for right in (True, ["a"], "b"):
        check_report({"outcomes": right}, "ab", "g.yaml")
    with pytest.raises(UserError, match=r"report.outcomes: there is no arm 'c'"):
        check_report({"outcomes": ["c"]}, "ab", "g.yaml")
