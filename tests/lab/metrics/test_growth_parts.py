"""Test the metric that shows which part of the mean squared logit grew: the power of q and k, or their alignment."""

import math

import pytest

from mmqk.lab.metrics import METRICS
from tests.lab.small_runs import small_run

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


def test_growth_of_matrices_is_relative_to_their_norm_and_per_step(tmp_path):
    """If the text loss makes W 1 % longer in 50 steps, ‖W‖² grows by ln(1.01²) / 0.05 per 1,000 steps."""
    before, after = 3.0, 3.0 * 1.01
    series = {"budget_window": [50.0] * 3}
    for matrix in "qk":
        for layer in ("layer00", "layer01"):
            series[f"w_{matrix}_growth/text/{layer}"] = [after**2 - before**2] * 3
            series[f"w_{matrix}_growth/image/{layer}"] = [-1.0] * 3
            series[f"w_{matrix}_growth_total/{layer}"] = [after**2 - before**2 - 1.0] * 3
            series[f"w_{matrix}_sq/{layer}"] = [after**2] * 3
    run = small_run(tmp_path / "grew", series)
    metric = METRICS["weight_growth"]
    rate = 2 * math.log(after / before) / 0.05
    assert metric.measure(run, "text") == pytest.approx(rate, rel=0.02)
    assert metric.measure(run, "image") == pytest.approx(-1000 / 50 / after**2)
    assert metric.measure(run, None) == pytest.approx(metric.measure(run, "text") + metric.measure(run, "image"))
    series["budget_window"] = [100.0] * 3  # negative control: the same growth in twice as many steps
    slower = small_run(tmp_path / "slower", series)
    assert metric.measure(slower, "text") == pytest.approx(metric.measure(run, "text") / 2)


def test_a_run_without_a_budget_has_no_growth_of_matrices(tmp_path):
    run = small_run(tmp_path / "none", {"q_norm/text/layer00": [1.0] * 3})
    assert math.isnan(METRICS["weight_growth"].measure(run, "text"))
