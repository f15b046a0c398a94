"""Compare family metrics over learning rates with examples computed by hand."""

import math

import pytest

from mmqk.lab.metrics import FamilyMetric, find_metric
from tests.lab.small_runs import config, small_run


def ended(path, rate, final, *, initial=7.0, excess=None, image=None, status="completed", steps=60, **more):
    """Return a run at a learning rate whose held-out loss falls from ``initial`` to ``final``."""
    stop = steps if status == "completed" else 30
    series = {"loss/text": [initial] + [final] * (stop - 1)}
    if status == "completed":
        series["val_loss/text"] = {steps: final}
    if excess is not None:
        series |= {"excess/text": [excess[0]] + [excess[1]] * (stop - 1), "val_excess/text": {steps: excess[1]}}
    if image is not None:
        series |= {"loss/image": [image[0]] + [image[1]] * (stop - 1), "val_loss/image": {steps: image[1]}}
    cfg = config(steps, 0, rate, **more)
    return small_run(path / f"{rate}", series, status=status, config=cfg, point={"optim.lr": rate})


def value(name, runs):
    metric, modality = find_metric(name)
    assert isinstance(metric, FamilyMetric)
    return metric.measured(runs, modality)


def test_lr_sensitivity_by_hand(tmp_path):
    # Three final losses are 3, 2.5 and 6, and one run diverged. Clipped at the initial loss 7, the four values exceed
    # the lowest loss 2.5 by 0.5, 0, 3.5 and 4.5.
    runs = [
        ended(tmp_path, 0.3, 2.4, status="diverged"),  # not finished: 2.4 is not its final loss
        ended(tmp_path, 0.001, 3.0),
        ended(tmp_path, 0.01, 2.5),
        ended(tmp_path, 0.1, 6.0),
    ]
    for name in ("lr_sensitivity/text", "lr_sensitivity"):
        assert value(name, runs).value == pytest.approx((0.5 + 0 + 3.5 + 4.5) / 4)
    # A final loss above the loss at initialization is clipped too, finite or not.
    (tmp_path / "more").mkdir()
    assert value("lr_sensitivity", [*runs[1:3], ended(tmp_path / "more", 0.3, 50.0)]).value == pytest.approx(5 / 3)
    # The control: the same loss at every learning rate.
    flat = [ended(tmp_path / "flat", rate, 3.0) for rate in (0.01, 0.1)]
    assert value("lr_sensitivity", flat).value == 0


def test_lr_sensitivity_clips_the_excess_where_every_run_has_one(tmp_path):
    # The second run ends with a loss of 6.8, below the initial loss of 7. Its excess loss ends at 4.3, above the
    # initial excess loss of 4.2, because the floor differs between batches. So only its excess loss is clipped.
    runs = [ended(tmp_path, 0.01, 3.0, excess=(4.2, 0.5)), ended(tmp_path, 0.1, 6.8, excess=(4.2, 4.3))]
    assert value("lr_sensitivity/text", runs).value == pytest.approx((0 + 3.7) / 2)
    runs[1] = ended(tmp_path / "b", 0.1, 6.8)  # this run has no excess loss, so both use the loss
    assert value("lr_sensitivity/text", runs).value == pytest.approx((0 + 3.8) / 2)


def test_lr_sensitivity_weighs_modalities_as_the_loss_does(tmp_path):
    weights = {"loss": {"weights": {"image": 0.5}}}
    runs = [
        ended(tmp_path, 0.01, 3.0, image=(6.0, 6.0), **weights),
        ended(tmp_path, 0.1, 4.0, image=(6.0, 4.5), **weights),
    ]
    # (3 + 0.5 * 6) / 1.5 = 4 and (4 + 0.5 * 4.5) / 1.5 = 4.1667.
    assert value("lr_sensitivity", runs).value == pytest.approx((4.0 + 0.5 * 4.5 - 6) / 1.5 / 2)
    assert value("lr_sensitivity/text", runs).value == pytest.approx(0.5)
    assert value("lr_sensitivity/image", runs).value == pytest.approx(0.75)


def test_an_arm_that_learns_nowhere_ranks_worst(tmp_path):
    runs = [ended(tmp_path, rate, 7.0, status="diverged") for rate in (0.01, 0.1)]
    found = value("lr_sensitivity", runs)
    assert found.value == math.inf and "ranked worst" in found.why and found.towards == 1
    # The control: if one run learns a little, the value is finite.
    assert value("lr_sensitivity", [runs[0], ended(tmp_path / "b", 0.1, 6.9)]).value == pytest.approx(0.05)


def test_what_is_missing_is_named(tmp_path):
    one, two = ended(tmp_path, 0.01, 3.0), ended(tmp_path, 0.1, 3.0)

    def why(runs, planned=()):
        metric, modality = find_metric("lr_sensitivity/text")
        found = metric.measured(runs, modality, planned)
        assert math.isnan(found.value) and math.isnan(metric.measure([], modality))
        return found.why

    assert why([]) == "there are no runs"
    assert why([one]) == "there is one learning rate: at least 2 are needed"
    assert "0.03 has not finished" in why([one, ended(tmp_path, 0.03, 3.0, status="interrupted")])
    again = ended(tmp_path / "again", 0.1, 3.0)
    assert "several runs have the learning rate 0.1" in why([one, two, again])
    assert why([one, two], [{"optim.lr": 0.1}, {"optim.lr": 0.3}]) == "there is no run at optim.lr 0.3"


def test_first_unstable_learning_rate(tmp_path):
    runs = [
        ended(tmp_path, 0.001, 4.0),  # slow, not unstable: below the best learning rate
        ended(tmp_path, 0.01, 3.0),
        ended(tmp_path, 0.03, 3.05),
        ended(tmp_path, 0.1, 3.2),
        ended(tmp_path, 0.3, 7.0, status="diverged"),
    ]
    assert value("first_unstable_lr", runs).value == 0.1
    # If no learning rate is unstable, the value is a bound: the learning rate that would be next in the grid.
    found = value("first_unstable_lr", runs[:3])
    assert found.value == pytest.approx(0.09) and "bound" in found.why and found.towards == 1
    assert value("first_unstable_lr", runs)[1:] == ("", 0)
    # If all learning rates are unstable, the value is the lowest one.
    lost = [ended(tmp_path / "lost", rate, 7.0, status="diverged") for rate in (0.01, 0.1)]
    assert value("first_unstable_lr", lost).value == 0.01
