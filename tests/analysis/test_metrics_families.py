"""Compare family metrics over learning rates and axes with examples computed by hand and with scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from mmqk.lab.metrics import FAMILY_METRICS, FamilyMetric, find_metric
from mmqk.lab.metrics.rates import dose_response
from mmqk.store import UserError
from tests.analysis.small_runs import config, small_run


def ended(path, rate, final, *, initial=7.0, excess=None, image=None, status="completed", steps=60, **more):
    """Return a run at a learning rate whose held-out loss falls from ``initial`` to ``final``."""
    stop = steps if status == "completed" else 30
    series = {"loss/text": [initial] + [final] * (stop - 1)}
    if status == "completed":
        series["val_loss/text"] = {steps: final}
    if excess is not None:
        series |= {
            "excess/text": [excess[0]] + [excess[1]] * (stop - 1),
            "val_excess/text": {steps: excess[1]},
        }
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
    assert value("lr_sensitivity", [*runs[1:3], ended(tmp_path / "more", 0.3, 50.0)]).value == pytest.approx(
        5 / 3
    )
    # The control: the same loss at every learning rate.
    flat = [ended(tmp_path / "flat", rate, 3.0) for rate in (0.01, 0.1)]
    assert value("lr_sensitivity", flat).value == 0


def test_lr_sensitivity_clips_the_excess_where_every_run_has_one(tmp_path):
    # The second run ends with a loss of 6.8, below the initial loss of 7. Its excess loss ends at 4.3, above the
    # initial excess loss of 4.2, because the floor differs between batches. So only its excess loss is clipped.
    runs = [
        ended(tmp_path, 0.01, 3.0, excess=(4.2, 0.5)),
        ended(tmp_path, 0.1, 6.8, excess=(4.2, 4.3)),
    ]
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


@pytest.mark.parametrize("name", ["lr_sensitivity/text", "first_unstable_lr/text", "first_diverging_lr/text"])
def test_what_is_missing_is_named(tmp_path, name):
    one, two = ended(tmp_path, 0.01, 3.0), ended(tmp_path, 0.1, 3.0)

    def why(runs, planned=()):
        metric, modality = find_metric(name)
        found = metric.measured(runs, modality, planned)
        assert math.isnan(found.value) and math.isnan(metric.measure([], modality))
        return found.why

    assert why([]) == "there are no runs"
    assert why([one]) == "there is one learning rate: at least 2 are needed"
    assert "0.03 has not finished" in why([one, ended(tmp_path, 0.03, 3.0, status="interrupted")])
    again = ended(tmp_path / "again", 0.1, 3.0)
    assert "several runs have the learning rate 0.1" in why([one, two, again])
    assert why([one, two], [{"optim.lr": 0.1}, {"optim.lr": 0.3}]) == "there is no run at optim.lr 0.3"
    again.seed = 5
    assert "several seeds" in why([one, again])
    rest = small_run(tmp_path / "rest", {"loss": [7.0] * 60}, config=config(60, 0, 0.3))
    assert "0.01 has no loss of image" not in why([one, rest]) and "rest has no loss of text" in why(
        [one, rest]
    )


def test_first_unstable_learning_rate(tmp_path):
    runs = [
        ended(tmp_path, 0.001, 4.0),  # slow, not unstable: below the best learning rate
        ended(tmp_path, 0.01, 3.0),
        ended(tmp_path, 0.03, 3.05),
        ended(tmp_path, 0.1, 3.2),
        ended(tmp_path, 0.3, 7.0, status="diverged"),
    ]
    assert value("first_unstable_lr", runs).value == 0.1
    assert value("first_diverging_lr", runs).value == 0.3
    # If no learning rate is unstable, the value is a bound: the learning rate that would be next in the grid.
    found = value("first_unstable_lr", runs[:3])
    assert found.value == pytest.approx(0.09) and "bound" in found.why and found.towards == 1
    assert value("first_unstable_lr", runs)[1:] == ("", 0)
    # If all learning rates are unstable, the value is the lowest one.
    lost = [ended(tmp_path / "lost", rate, 7.0, status="diverged") for rate in (0.01, 0.1)]
    assert value("first_unstable_lr", lost).value == value("first_diverging_lr", lost).value == 0.01


# Dose and response -----------------------------------------------------------------------------------------


def dosed(path, doses, logits, axis="data.dial.entropy.image", **more):
    """Return runs at values of an axis, with planted largest logits."""
    return [
        small_run(
            path / str(i),
            {"attn_logit_absmax/text-text/layer00": {1: logit}, "loss/text": {1: 3.0}, "lr": [0.1]},
            config=config(1),
            point={axis: dose} | more,
        )
        for i, (dose, logit) in enumerate(zip(doses, logits, strict=True))
    ]


def test_slope_and_monotonicity_are_scipys(tmp_path):
    rng = np.random.default_rng(5)
    doses = rng.permutation(np.arange(8) * 0.7).tolist()
    logits = np.exp(0.4 * np.array(doses) + rng.normal(0, 0.3, 8))
    logits[2] = logits[5]  # a tie
    runs = dosed(tmp_path, doses, logits.tolist())
    slope = stats.linregress(doses, np.log(logits)).slope
    for name, expected in (
        ("dose_response(largest_attention_logit)", slope),
        (
            "dose_response(largest_attention_logit/text, data.dial.entropy.image)",
            stats.linregress(doses, np.log(logits)).slope,
        ),
        ("dose_monotonicity(largest_attention_logit)", stats.kendalltau(doses, logits).statistic),
    ):
        assert value(name, runs).value == pytest.approx(expected)
    assert find_metric("dose_response(largest_attention_logit)")[0].unit == "log per unit of the axis"


def test_no_response_has_no_slope_and_no_order(tmp_path):
    runs = dosed(tmp_path, [0, 1, 2, 3], [5.0] * 4)
    assert value("dose_response(largest_attention_logit)", runs).value == 0
    order = value("dose_monotonicity(largest_attention_logit)", runs)
    assert math.isnan(order.value) and order.why == "all responses are equal, so they have no order"
    assert value("dose_monotonicity(diverged)", runs).why == order.why


def test_a_run_that_blew_up_has_a_rank_and_no_slope(tmp_path):
    runs = dosed(tmp_path, [0, 1, 2, 3], [5.0, 4.0, 9.0, math.nan])
    slope, order = (
        value(f"dose_{what}(largest_attention_logit)", runs) for what in ("response", "monotonicity")
    )
    assert math.isnan(slope.value) and "there is no slope: use dose_monotonicity" in slope.why
    assert order.value == pytest.approx(stats.kendalltau([0, 1, 2, 3], [5, 4, 9, 1e9]).statistic)


def test_a_run_that_diverged_ranks_worst_whatever_it_had_reached(tmp_path):
    runs = dosed(tmp_path, [0, 1, 2, 3], [5.0, 6.0, 9.0, 4.0])
    assert value("dose_monotonicity(largest_attention_logit)", runs).value == pytest.approx(0)
    runs[3].status = runs[3].status.__class__("diverged", 1)
    assert value("dose_monotonicity(largest_attention_logit)", runs).value == 1
    assert math.isnan(value("dose_response(largest_attention_logit)", runs).value)
    # A metric that describes a failure keeps its value for a diverged run.
    assert value("dose_response(diverged)", runs).value == pytest.approx(0.3)


def test_doses_that_say_nothing_are_named(tmp_path):
    name = "dose_response(largest_attention_logit)"
    assert "2 values of data.dial.entropy.image" in value(name, dosed(tmp_path / "a", [0, 1], [5, 6])).why
    assert "several runs have the same" in value(name, dosed(tmp_path / "b", [0, 1, 1], [5, 6, 7])).why
    assert "is not a number in 0" in value(name, dosed(tmp_path / "c", ["low", "mid", "high"], [5, 6, 7])).why
    assert "name one axis" in value(name, dosed(tmp_path / "d", [0, 1, 2], [5, 6, 7], seed_of="x")).why
    blind = dosed(tmp_path / "e", [0, 1, 2], [5, 6, 7])
    blind[1].status = blind[1].status.__class__("interrupted")
    assert "1 has no value" in value(name, blind).why
    assert dose_response([], lambda run: 0.0, "", True).why.startswith("the axes are none")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dose_response(lr_sensitivity)", "is a metric of a family"),
        ("dose_response(final_loss)", "needs a modality"),
        ("dose_response(beauty)", "'beauty' of a claim is unknown"),
        ("dose_response(q_norm, a, b)", "have arguments in brackets"),
        ("q_norm(text)", "have arguments in brackets"),
        ("time_of_failure/text", "has no modality: write time_of_failure"),
        ("grad_norm_spike_score/text", "has no modality: write grad_norm_spike_score"),
    ],
)
def test_impossible_names_are_refused(name, said):
    with pytest.raises(UserError, match=said):
        find_metric(name)


def test_family_metrics_are_found_by_name():
    assert find_metric("lr_sensitivity/image") == (FAMILY_METRICS["lr_sensitivity"], "image")
    assert find_metric("dose_response(final_loss/image, data.dial.entropy.image)")[1] == "image"
    assert find_metric("first_unstable_lr")[0].on_scale(0.01) == pytest.approx(math.log(0.01))
