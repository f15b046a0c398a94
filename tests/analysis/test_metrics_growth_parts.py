"""Test the metric that shows which part of the mean squared logit grew: the power of q and k, or their alignment."""

import math

import pytest

from mmqk.analysis.metrics import METRICS
from tests.analysis.small_runs import small_run

METRIC = METRICS["norms_over_alignment"]
START = (2.0, 3.0, -4.0)


def run_with(folder, parts):
    """Return a run with two layers; ``parts`` are the log power of q, the log power of k and the log alignment."""
    names = ("logit_q_power", "logit_k_power", "logit_alignment")
    return small_run(
        folder,
        {f"{n}/text-image/layer0{i}": [x] * 3 for n, x in zip(names, parts, strict=True) for i in (0, 1)},
    )


@pytest.mark.parametrize("grew", [(1.0, 1.0, 0.5), (0.2, 0.2, 1.0), (0.5, 0.4, 1.0)])
def test_it_grows_if_norms_explain_more_than_half_of_the_growth(tmp_path, grew):
    first = run_with(tmp_path / "a", START)
    last = run_with(tmp_path / "b", [x + more for x, more in zip(START, grew, strict=True)])
    growth = METRIC.on_scale(METRIC.measure(last, None)) - METRIC.on_scale(METRIC.measure(first, None))
    assert math.isclose(growth, grew[0] + grew[1] - grew[2], abs_tol=1e-9)
    assert (growth > 0) == ((grew[0] + grew[1]) / sum(grew) > 0.5)


def test_a_run_without_these_parts_has_no_value(tmp_path):
    assert math.isnan(METRIC.measure(small_run(tmp_path / "none", {"q_norm/text/layer00": [1.0] * 3}), None))


def test_log_z_is_the_last_one_on_held_out_data(tmp_path):
    run = small_run(tmp_path / "z", {"val_log_z/text": {0: 6.9, 3: 2.5}, "log_z/text": [9.0, 8.0, 7.0]})
    assert METRICS["final_log_z"].measure(run, "text") == 2.5
    assert math.isnan(METRICS["final_log_z"].measure(run, "image"))
