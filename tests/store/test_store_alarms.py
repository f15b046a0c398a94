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


SPECIAL = (math.nan, math.inf, -math.inf)


def noisy_descent(steps, seed=0, noise=0.15):
    rng = random.Random(seed)
    return [2.5 + 4.0 * math.exp(-step / 80) + rng.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_run_that_learns_is_quiet(seed):
    quiet = {"text": noisy_descent(600, seed), "image": noisy_descent(600, seed + 100, noise=0.3)}
    assert first_reason(DivergenceRule(50), quiet) is None


ABOVE = "image loss 7.20 was more than 0.1 nat above its initial 7.00 for 50 steps"
MEDIAN = "50-step median 3.60 of the image loss was more than 0.5 nat above its best 3.00"
GAPS = [value for loss in [7.0] + [7.2] * 60 for value in (loss, None, None)]


@pytest.mark.parametrize(
    ("warmup", "losses", "found"),
    [
        # A loss that is not finite diverges at once, also during the warm-up.
        *((50, [*noisy_descent(30), value], (30, f"image loss became {value}")) for value in SPECIAL),
        # The loss is above the limit from step 1 on, but only steps after the warm-up count: 21 to 70.
        (20, [7.0] + [7.2] * 200, (70, ABOVE)),
        (0, [7.0, *([7.2] * 49 + [7.05]) * 10], None),
        (0, [7.0] + [7.09] * 500, None),
        (500, [7.0] + [7.2] * 400, None),
        # The loss rises to 3.6, far below the initial 7. The median rises when 26 of 50 values are high.
        (20, [7.0] + [3.0] * 199 + [3.6] * 100, (225, MEDIAN)),
        (20, [7.0] + [3.0] * 99 + [6.0] * 24 + [3.0] * 99, None),
        (20, [7.0] + [3.0] * 99 + [3.45] * 400, None),
        # A step without the modality neither counts nor resets.
        (0, GAPS, (150, ABOVE)),
    ],
)
def test_divergence_by_hand(warmup, losses, found):
    assert first_reason(DivergenceRule(warmup), {"image": losses, "text": [5.0] * len(losses)}) == found


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
