"""Test the metrics of late failure on planted curves with known answers."""

import json
import math

import numpy as np
import pytest

from mmqk.lab.metrics import find_metric
from mmqk.lab.metrics.outcomes import failure_step, rise_step, window_means
from mmqk.lab.runs import read_runs
from tests.lab.fake_runs import Planted
from tests.lab.small_runs import config, small_run
from tests.lab.verdicts.test_claims import BASIC, one

STEPS = 6000


def curve(best_at: int, rise: float, until: int = STEPS) -> list[float]:
    """Return losses that fall by 1 nat until ``best_at``, and then stay ``rise`` above their lowest value."""
    steps = np.arange(1, until + 1)
    return np.where(steps <= best_at, 5 - steps / best_at, 4 + rise).tolist()


def run_of(path, text, image=None, status="completed", step=None):
    losses = {"loss/text": text} | ({} if image is None else {"loss/image": image})
    return small_run(path, losses, status=status, step=step, config=config(STEPS))


def value(name, run):
    return find_metric(name)[0].measure(run, None)


@pytest.mark.parametrize(
    ("best_at", "rise", "failed", "late"),
    [
        (4000, 0.3, 4500, 1.0),
        (4000, 0.08, None, 0.0),  # not 0.1 nat above the best window
        (1000, 0.4, 1500, 1.0),  # the best step is early, but at two thirds of the steps before the failure
        (5500, 0.3, None, 0.0),  # only one window is above the best window
        (6000, 0.0, None, 0.0),  # the loss improves to the end
    ],
)
def test_a_planted_rise_is_the_failure(tmp_path, best_at, rise, failed, late):
    run = run_of(tmp_path / "x", curve(best_at, rise))
    assert failure_step(run) == failed and value("late_failure", run) == late
    assert value("time_of_failure", run) == (1.0 if failed is None else failed / STEPS)


def test_a_rise_that_comes_back_is_no_failure(tmp_path):
    losses = np.array(curve(6000, 0.0))
    losses[3000:4500] += 0.4  # above the 0.1 nat of a failure, below the 0.5 nat of the divergence rule
    assert failure_step(run_of(tmp_path / "x", losses.tolist())) is None
    losses[4500:] += 0.7
    assert failure_step(run_of(tmp_path / "y", losses.tolist())) is not None  # the control


def test_a_divergence_after_an_early_best_is_not_late(tmp_path):
    """The image loss stops improving after a sixth of the steps, although the text loss improves to the end."""
    text, image = curve(6000, 0.0), curve(1000, 0.05)
    run = run_of(tmp_path / "x", text, image, status="diverged", step=6000)
    assert failure_step(run) == 6000
    assert value("late_failure", run) == 0 and value("time_of_failure", run) == 1
    both = run_of(tmp_path / "y", text, curve(4000, 0.05), status="diverged", step=6000)
    assert value("late_failure", both) == 1


@pytest.mark.parametrize("last", [3999, 4000])
def test_a_loss_that_is_not_a_number_is_no_improvement(tmp_path, last):
    """The last window of 500 steps ends with NaN if the run has 4,000 steps, and is incomplete if it has 3,999."""
    losses = curve(500, 0.0, last)
    losses[-1] = math.nan
    run = run_of(tmp_path / "x", losses, status="diverged")
    assert failure_step(run) == last and value("late_failure", run) == 0
    good = run_of(tmp_path / "y", [*curve(3500, 0.0, last - 1), math.nan], status="diverged")
    assert value("late_failure", good) == 1  # the control


def test_a_run_that_a_divergence_stopped_might_have_recovered(tmp_path):
    """The loss is 1 nat too high for 200 steps; a run that is not stopped shows whether it stays high."""
    spike = np.array(curve(6000, 0.0))
    spike[4000:4200] += 1
    stopped = run_of(tmp_path / "stopped", spike[:4040].tolist(), status="diverged")
    assert value("late_failure", stopped) == 1 and math.isnan(value("late_rise", stopped))
    recovered = run_of(tmp_path / "recovered", spike.tolist())
    assert rise_step(recovered) is None and value("late_rise", recovered) == 0
    spike[4200:] += 1
    lost = run_of(tmp_path / "lost", spike.tolist())
    assert rise_step(lost) == 4500 and value("late_rise", lost) == 1
    off = config(STEPS) | {"alarm": {"stop_diverged": False}}
    for name, at, late in (("late", 4040, 1.0), ("early", 40, 0.0)):
        losses = {"loss/text": [*curve(6000, 0.0, at - 1), math.nan]}
        run = small_run(tmp_path / name, losses, status="diverged", config=off)
        assert value("late_rise", run) == late


@pytest.mark.parametrize("tag", ["loss/text", "loss/image", "grad_norm"])
@pytest.mark.parametrize("stop", [True, False])
def test_a_run_that_ended_with_a_value_that_is_not_finite_cannot_recover(tmp_path, tag, stop):
    """`alarm.stop_diverged` has no effect on this: such a run ends with and without it."""
    series = {"loss/text": curve(6000, 0.0, 4040), "loss/image": curve(6000, 0.0, 4040), "grad_norm": [1.0] * 4040}
    config_of = config(STEPS) | {"alarm": {"stop_diverged": stop}}

    def rise(name):
        return value("late_rise", small_run(tmp_path / name, series, status="diverged", config=config_of))

    assert rise("finite") == 1 if not stop else math.isnan(rise("finite"))
    series[tag][-1] = math.nan
    assert rise("nan") == 1


def forked(folder, text, step, parent=None):
    """Write a run with these losses and an unchanged fork of it from ``step``; return both as a study loads them."""
    run_of(folder / "whole", text)
    small_run(folder / "fork", {"loss/text": dict(enumerate(text[step:], start=step + 1))}, config=config(STEPS))
    record = {"parent": {"folder": parent or "whole", "id": "whole", "step": step}}
    (folder / "fork" / "fork.json").write_text(json.dumps(record))
    return {run.name: run for run in read_runs(folder)}


@pytest.mark.parametrize("step", [2000, 4000, 4500])
def test_a_fork_has_the_losses_of_its_parent(tmp_path, step):
    """A fork that changes nothing has the values of its parent, which rises after step 4,000."""
    runs = forked(tmp_path, curve(4000, 0.3), step)
    fork, whole = runs["fork"], runs["whole"]
    for name in ("late_failure", "late_rise", "time_of_failure"):
        assert value(name, fork) == value(name, whole)
    for seen, wanted in zip(window_means(fork, "text"), window_means(whole, "text"), strict=True):
        np.testing.assert_array_equal(seen, wanted)
    fork.parent = None  # the control: alone, the fork does not know the lower losses of its parent
    assert len(window_means(fork, "text")[0]) == (STEPS - step) // 500
    assert (rise_step(fork) is None) == (step >= 4000)


def test_a_parent_is_found_by_its_id_and_never_in_a_circle(tmp_path):
    runs = forked(tmp_path / "moved", curve(4000, 0.3), 4500, parent="a folder of another machine")
    assert runs["fork"].parent is runs["whole"] and rise_step(runs["fork"]) == 4500
    folder = tmp_path / "circle"
    forked(folder, curve(4000, 0.3), 4500)
    record = {"parent": {"folder": "fork", "id": "fork", "step": 4500}}
    (folder / "whole" / "fork.json").write_text(json.dumps(record))
    assert [run.parent for run in read_runs(folder)] == [None, None]


def test_a_count_of_late_failures_leaves_out_early_ones(tmp_path):
    """The value of `late_failure` is exact, so a diverged run counts only if its value reaches `at_least`. For a
    metric whose value is a bound, every diverged run counts."""
    arms = {"a": Planted(10.0, diverges=140, validated=False), "b": Planted(10.0)}
    claim = BASIC | {"test": "count", "metric": "late_failure", "at_least": 1, "min_effect": 0.2}
    assert one(tmp_path / "late", arms, [claim]).counts == {"a": (0, 6), "b": (0, 6)}
    claim |= {"metric": "largest_attention_logit", "at_least": 1e9}
    assert one(tmp_path / "any", arms, [claim]).counts == {"a": (6, 6), "b": (0, 6)}


def test_the_rise_of_the_held_out_loss(tmp_path):
    """The value before the first step and the training losses do not count."""
    training = curve(4000, 0.5)

    def rise(name, *held_out):
        losses = {"loss/text": training, "val_loss/text": dict(enumerate(held_out))}
        run = small_run(tmp_path / name, losses, config=config(STEPS), status="completed", step=STEPS)
        return find_metric("loss_rise/text")[0].measure(run, "text")

    assert rise("a", 3.0, 4.0, 4.125, 4.25) == 0.25 and rise("b", 4.5, 4.25, 4.125, 4.0) == 0.0
    assert rise("c", 4.5, 4.0, 4.0, math.nan) == math.inf
    assert math.isnan(rise("d", 4.5, 4.0, 4.125))  # a value only at the end shows no rise
