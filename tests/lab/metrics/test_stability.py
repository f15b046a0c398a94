"""Compare the divergence of a run with numbers computed by hand."""

import math

import pytest

from mmqk.lab.metrics import find_metric
from mmqk.lab.metrics.outcomes import divergence_step
from tests.lab.small_runs import config, small_run


def value(name, run, modality=None):
    metric, wanted = find_metric(name)
    return metric.measure(run, modality or wanted)


def rising(steps=200, at=80, by=0.2, start=5.0):
    """Return losses that are ``by`` above the first value from step ``at`` on."""
    return [start if step < at else start + by for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        # The loss is 0.1 nat above its first value for 50 steps; the 50th is step 129.
        (rising(at=80), 129),
        (rising(at=80, by=0.09), None),
        # The median of the last 50 steps is 0.5 above its best when 26 of the 50 are high, at step 105.
        ([5.0] * 10 + [3.0] * 69 + [3.6] * 121, 105),
        ([5.0] * 10 + [3.0] * 69 + [3.4] * 121, None),
        ([5.0] * 60 + [math.nan] * 3, 61),
        ([5.0] * 60 + [math.inf], 61),
    ],
)
def test_step_of_divergence_by_hand(tmp_path, losses, step):
    run = small_run(tmp_path / "x", {"loss/text": losses}, config=config(len(losses)))
    assert divergence_step(run) == step
    assert value("time_of_failure", run) == (1.0 if step is None else step / len(losses))
    assert value("diverged", run) == (step is not None)


def test_only_what_is_trained_diverges(tmp_path):
    series = {"loss/text": [4.0] * 200, "loss/image": rising(at=80, by=3)}
    off = config(200, loss={"weights": {"image": 0.0}})
    assert divergence_step(small_run(tmp_path / "off", series, config=off)) is None
    assert divergence_step(small_run(tmp_path / "on", series, config=config(200))) is not None


def test_the_excess_decides_where_there_is_one(tmp_path):
    # The data becomes harder by 0.2 nat at step 80, and the excess loss does not change.
    series = {"loss/text": rising(at=80), "excess/text": [1.0] * 200}
    assert divergence_step(small_run(tmp_path / "x", series, config=config(200))) is None
    del series["excess/text"]
    assert divergence_step(small_run(tmp_path / "y", series, config=config(200))) == 129


def test_what_ended_the_run_counts_too(tmp_path):
    # A gradient norm that is not finite ends a run as diverged, even if all its losses are finite.
    series = {"loss/text": [4.0] * 60}
    run = small_run(tmp_path / "x", series, status="diverged", step=57, config=config(100))
    assert divergence_step(run) == 57 and value("time_of_failure", run) == 0.57
    # A run that was stopped has no value, because its future is unknown.
    run = small_run(tmp_path / "y", series, status="interrupted", config=config(100))
    assert math.isnan(value("time_of_failure", run)) and math.isnan(value("diverged", run))
