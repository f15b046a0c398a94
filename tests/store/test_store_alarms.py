import json
import math
import random

import pytest

from mmqk.store import DivergenceRule


def first_reason(rule, series, start=0):
    """Return (step, reason) of the first divergence; ``series`` has the loss of each step (or None) by modality."""
    length = max(len(values) for values in series.values())
    for i in range(length):
        losses = {m: v[i] for m, v in series.items() if i < len(v) and v[i] is not None}
        if (reason := rule.reason(start + i, losses)) is not None:
            return start + i, reason
    return None


def noisy_descent(steps, seed=0, noise=0.15):
    rng = random.Random(seed)
    return [2.5 + 4.0 * math.exp(-step / 80) + rng.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_run_that_learns_is_quiet(seed):
    quiet = {"text": noisy_descent(600, seed), "image": noisy_descent(600, seed + 100, noise=0.3)}
    assert first_reason(DivergenceRule(50), quiet) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_diverges_at_once(value):
    image = noisy_descent(100)
    image[30] = value
    step, reason = first_reason(DivergenceRule(50), {"text": noisy_descent(100), "image": image})
    assert step == 30 and reason == f"image loss became {value}"


def test_fifty_steps_above_the_initial_loss_after_warmup_diverge():
    # The loss is above the limit from step 1 on, but only steps after the warm-up count: 21 to 70.
    losses = [7.0] + [7.2] * 200
    step, reason = first_reason(DivergenceRule(20), {"image": losses})
    assert step == 70
    assert reason == "image loss 7.20 was more than 0.1 nat above its initial 7.00 for 50 steps"


def test_forty_nine_steps_above_the_initial_loss_do_not_nor_does_a_smaller_rise():
    rise = ([7.2] * 49 + [7.05]) * 10
    assert first_reason(DivergenceRule(0), {"image": [7.0, *rise]}) is None
    assert first_reason(DivergenceRule(0), {"image": [7.0] + [7.09] * 500}) is None
    assert first_reason(DivergenceRule(500), {"image": [7.0] + [7.2] * 400}) is None


def test_a_median_half_a_nat_above_its_own_best_diverges():
    # The loss falls to 3 and rises to 3.6, far below the initial 7. The median rises when 26 of 50 values are high.
    losses = [7.0] + [3.0] * 199 + [3.6] * 100
    step, reason = first_reason(DivergenceRule(20), {"text": losses})
    assert step == 225
    assert reason == "50-step median 3.60 of the text loss was more than 0.5 nat above its best 3.00"


def test_a_short_spike_and_a_smaller_rise_do_not_diverge():
    assert first_reason(DivergenceRule(20), {"text": [7.0] + [3.0] * 99 + [6.0] * 24 + [3.0] * 99}) is None
    assert first_reason(DivergenceRule(20), {"text": [7.0] + [3.0] * 99 + [3.45] * 400}) is None


def test_an_absent_modality_neither_counts_nor_resets():
    present = [7.0] + [7.2] * 60
    gaps = [value for loss in present for value in (loss, None, None)]
    found = first_reason(DivergenceRule(0), {"image": gaps, "text": [5.0] * len(gaps)})
    assert found == (150, "image loss 7.20 was more than 0.1 nat above its initial 7.00 for 50 steps")


ABOVE_INITIAL = [7.0] + [7.2] * 200
ABOVE_BEST = [7.0] + [3.0] * 199 + [3.6] * 100


@pytest.mark.parametrize(
    ("losses", "cut"),
    [(ABOVE_INITIAL, 1), (ABOVE_INITIAL, 25), (ABOVE_INITIAL, 69), (ABOVE_BEST, 201), (ABOVE_BEST, 224)],
)
def test_a_resume_midway_gives_the_same_answer(losses, cut):
    whole = first_reason(DivergenceRule(20), {"text": losses, "image": [5.0] * len(losses)})
    rest = {"text": losses[cut:], "image": [5.0] * len(losses[cut:])}
    first = DivergenceRule(20)
    assert first_reason(first, {"text": losses[:cut], "image": [5.0] * cut}) is None
    resumed = DivergenceRule(20)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first_reason(resumed, rest, start=cut) == whole
    # The control: a rule without the stored state gives a different result.
    assert first_reason(DivergenceRule(20), rest, start=cut) != whole
