"""Compare spikes and divergence of a run with brute force and with numbers computed by hand."""

import math

import numpy as np
import pytest

from mmqk.lab.metrics import divergence_step, find_metric
from tests.lab.small_runs import config, small_run


def noise(n, seed=0, size=0.02):
    return 4.0 + size * np.random.default_rng(seed).standard_normal(n)


def value(name, run, modality=None):
    metric, wanted = find_metric(name)
    return metric.measure(run, modality or wanted)


def brute_spike_score(values, window=1000, fewest=100, stds=7.0):
    """Return the percentage of values at least 7 sample standard deviations above the mean of the window before
    them."""
    judged = [
        (v, np.array(values[max(0, i - window) : i], dtype=np.float64))
        for i, v in enumerate(values)
        if i >= fewest
    ]
    return 100 * np.mean([v >= before.mean() + stds * before.std(ddof=1) for v, before in judged])


def test_spike_score_is_that_of_brute_force(tmp_path):
    losses = noise(1400)
    losses[[300, 700, 1390]] += 0.5
    grads = noise(1400, 1)
    run = small_run(
        tmp_path / "x",
        {"loss": losses.tolist(), "loss/text": noise(1400, 2).tolist(), "grad_norm": grads.tolist()},
    )
    assert value("spike_score", run) == pytest.approx(brute_spike_score(losses.tolist()))
    assert value("spike_score", run) == pytest.approx(100 * 3 / 1300)
    # The controls: another series of the same run has no spike, and an equally large decrease is not a spike.
    assert value("spike_score/text", run) == 0 == value("grad_norm_spike_score", run)
    down = noise(1400)
    down[[300, 700]] -= 0.5
    assert value("spike_score", small_run(tmp_path / "y", {"loss": down.tolist()})) == 0


def test_values_that_are_not_finite_are_left_out(tmp_path):
    losses = noise(1400)
    losses[[300, 700]] += 0.5
    gaps = np.insert(losses, [200, 600, 601], [math.nan, math.inf, -math.inf])
    one, other = (
        small_run(tmp_path / name, {"loss": x.tolist()}) for name, x in (("x", losses), ("y", gaps))
    )
    assert value("spike_score", one) == value("spike_score", other) == pytest.approx(100 * 2 / 1300)


# Divergence ------------------------------------------------------------------------------------------------


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
    assert value("time_of_divergence", run) == (1.0 if step is None else step / len(losses))
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
    assert divergence_step(run) == 57 and value("time_of_divergence", run) == 0.57
    # A run that was stopped has no value, because its future is unknown.
    run = small_run(tmp_path / "y", series, status="interrupted", config=config(100))
    assert math.isnan(value("time_of_divergence", run)) and math.isnan(value("diverged", run))
