"""Compare the outcomes of runs with the definitions, with numbers on both sides of each threshold."""

import math

import pytest

from mmqk.lab.metrics import find_metric
from mmqk.lab.metrics.outcomes import divergence_step, outcomes
from mmqk.lab.metrics.probes import norm_slope
from mmqk.store import Alarm, append_alarms
from tests.lab.small_runs import config, small_run

DATA = {"source": "one"}


def ended(path, text, image=4.0, *, status="completed", data=DATA, chance=6.0, **more):
    stop = 100 if status == "completed" else 60
    series = {"loss/text": [7.0] + [text] * (stop - 1), "loss/image": [6.5] + [image] * (stop - 1)}
    series["val_unigram/text"] = series["val_unigram/image"] = {0: chance}
    if status == "completed":
        series |= {"val_loss/text": {100: text}, "val_loss/image": {100: image}}
    return small_run(path, series, status=status, config=config(100, data=data, **more))


def test_each_outcome_by_hand(tmp_path):
    runs = [
        ended(tmp_path / "best", 3.0),
        ended(tmp_path / "near", 3.09),
        ended(tmp_path / "stalled", 3.2),
        ended(tmp_path / "image", 3.0, 4.2),
        ended(tmp_path / "unlearned", 3.0, 5.95),
        ended(tmp_path / "lost", 3.0, status="diverged"),
        ended(tmp_path / "stopped", 3.0, status="interrupted"),
        ended(tmp_path / "other", 3.5, data={"source": "two"}),
    ]
    found = outcomes(runs)
    assert [one.kind for one in found] == [
        *("well", "well", "stalled", "stalled", "regime not reached", "diverged", "not finished", "well")
    ]
    assert found[2].above_best == pytest.approx({"text": 0.2, "image": 0.0})
    assert found[3].stalled == ("image",) and found[4].unlearned == ("image",)
    assert found[5].diverged == 60 and found[5].above_best["text"] == math.inf


def test_a_loss_that_is_off_neither_stalls_nor_is_unlearned(tmp_path):
    off = ended(tmp_path / "off", 3.0, 6.4, loss={"weights": {"image": 0.0}})
    on = ended(tmp_path / "on", 3.0, 6.4)
    assert [one.kind for one in outcomes([off, on, ended(tmp_path / "best", 3.0)])] == [
        "well",
        "regime not reached",
        "well",
    ]


def test_excess_is_used_where_it_is_known(tmp_path):
    # The held-out tokens of two seeds differ by 0.3 nat in difficulty, but their excess losses are equal.
    runs = []
    for name, loss, excess in (("a", 3.0, 0.5), ("b", 3.3, 0.52), ("c", 3.0, 0.7)):
        series = {"loss/text": [7.0] + [loss] * 99, "excess/text": [4.5] + [excess] * 99}
        series |= {"val_loss/text": {100: loss}, "val_excess/text": {100: excess}, "val_unigram/text": {0: 6.0}}
        runs.append(small_run(tmp_path / name, series, config=config(100, data=DATA)))
    assert [one.kind for one in outcomes(runs)] == ["well", "well", "stalled"]


# Slopes ----------------------------------------------------------------------------------------------------


def grown(path, rates, steps=1000, warmup=0, **more):
    """Return norms that grow by e^rate per 1,000 steps: text in layer 0 only, image in layers 0 and 1."""
    series = {}
    for name, rate in rates.items():
        series[name] = {step: 8 * math.exp(rate * step / 1000) for step in range(0, steps + 1, 50)}
    return small_run(path, series, config=config(steps, warmup, **more))


def test_slopes_by_modality_are_the_planted_ones(tmp_path):
    run = grown(tmp_path / "x", {"q_norm/text/layer00": 0.4, "q_norm/image/layer00": -0.3, "final_norm/image": 1.5})
    for name, rate in (("q_norm_slope/text", 0.4), ("q_norm_slope/image", -0.3), ("final_norm_slope/image", 1.5)):
        metric, modality = find_metric(name)
        assert metric.measure(run, modality) == pytest.approx(rate)
        assert metric.worst_seen(run, modality) == pytest.approx(rate)
    metric, _ = find_metric("k_norm_slope")
    assert math.isnan(metric.measure(run, None))


def test_a_slope_sees_its_window_alone(tmp_path):
    run = grown(tmp_path / "x", {"final_norm/text": 0.0})
    (columns,) = [run.series("final_norm/text")[1]]
    columns[:4] = 1000.0  # steps 0 to 150, before a fifth of the run
    columns[6:] *= 2.0  # steps from 300 on, after a quarter of the run
    late, early = find_metric("final_norm_slope")[0], find_metric("early_final_norm_slope")[0]
    assert 0 < late.measure(run, None) < 1
    assert early.measure(run, None) < -10
    warm = grown(tmp_path / "y", {"final_norm/text": 0.0}, warmup=150)
    warm.series("final_norm/text")[1][:3] = 1000.0  # within warm-up
    assert norm_slope(warm, statistic="final_norm", start=0.0, end=0.25) == pytest.approx(0)
    assert math.isnan(norm_slope(warm, statistic="final_norm", start=0.0, end=0.2))  # two probes


def test_a_norm_that_is_not_finite_ranks_worst(tmp_path):
    run = grown(tmp_path / "x", {"final_norm/text": 0.1, "attn_logit_absmax/text-text/layer00": 0.7})
    assert find_metric("logit_slope/text")[0].measure(run, "text") == pytest.approx(0.7)
    run.series("final_norm/text")[1][-1] = math.nan
    assert find_metric("final_norm_slope")[0].measure(run, None) == math.inf
    run.series("final_norm/text")[1][-1] = 0.0
    assert math.isnan(find_metric("final_norm_slope")[0].measure(run, None))


# Divergence -----------------------------------------------------------------------------------------------


def value(name, run):
    return find_metric(name)[0].measure(run, None)


@pytest.mark.parametrize(("named", "step"), [(["spike", "divergence"], 129), (["spike"], None)])
def test_a_run_diverges_at_its_first_alarm_of_divergence(tmp_path, named, step):
    run = small_run(tmp_path / "x", {"loss/text": [5.0] * 200}, config=config(200))
    alarms = [Alarm(name, at, "loss/text", 6.0, 5.1, "") for name, at in zip(named, (40, 129), strict=False)]
    append_alarms(run.path, alarms)
    assert divergence_step(run) == step
    assert value("time_of_failure", run) == (1.0 if step is None else step / 200)
    assert value("diverged", run) == (step is not None)


def test_a_fork_diverges_only_where_it_ended(tmp_path):
    for status, step in (("completed", None), ("diverged", 150)):
        run = small_run(tmp_path / status, {"loss/text": [5.0] * 150}, status=status, config=config(200))
        append_alarms(run.path, [Alarm("divergence", 40, "loss/text", 6.0, 5.1, "")])
        run.fork = {"parent": "p", "step": 20}
        assert divergence_step(run) == step


def test_what_ended_the_run_counts_too(tmp_path):
    # A gradient norm that is not finite ends a run as diverged, even if all its losses are finite.
    series = {"loss/text": [4.0] * 60}
    run = small_run(tmp_path / "x", series, status="diverged", step=57, config=config(100))
    assert divergence_step(run) == 57 and value("time_of_failure", run) == 0.57
    # A run that was stopped has no value, because its future is unknown.
    run = small_run(tmp_path / "y", series, status="interrupted", config=config(100))
    assert math.isnan(value("time_of_failure", run)) and math.isnan(value("diverged", run))
