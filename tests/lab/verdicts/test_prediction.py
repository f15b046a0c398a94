"""Claims that a metric predicts which runs of an arm fail."""

import math
import random

import numpy as np
import pytest
from scipy import special, stats

from mmqk.lab.effects import auroc
from tests.lab.fake_runs import Planted
from tests.lab.verdicts.test_claims import one

CLAIM = {
    "id": "C",
    "statement": "large logits foretell a failure",
    "arms": ["a", "b"],
    "test": "prediction",
    "min_effect": 0.6,
    "positive_control": "P",
}


def run(logit: float, seed: int, failed: bool, spread: float = 0.3) -> Planted:
    """Return a run whose validation loss is the same for every seed, so that no run stalls."""
    loss = {"text": 3.4 - 0.02 * seed, "image": 4.6 - 0.02 * seed}
    return Planted(logit, loss, spread, diverges=140 if failed else None, validated=not failed)


def arm(failed_logit: float, logit: float = 10.0, base: float = 1.0):
    """Return an arm in which every second run diverges; the logit is ``base`` times ``failed_logit`` in these runs,
    and ``base`` times ``logit`` in the others."""

    def planted(seed: int) -> Planted:
        failed = seed % 2 == 0
        return run(base * (failed_logit if failed else logit), seed, failed)

    return planted


@pytest.mark.parametrize(
    ("failed_logit", "verdict"), [(16.0, "reproduced"), (10.0, "inconclusive"), (6.0, "contradicted")]
)
def test_the_verdict_follows_the_auroc(tmp_path, failed_logit, verdict):
    arms = {"a": arm(failed_logit), "b": arm(failed_logit, base=3.0)}
    found = one(tmp_path, arms, [CLAIM], seeds=range(20))
    assert found.verdict == verdict
    assert found.counts == {"a": (10, 20), "b": (10, 20)} and found.effect.pairs == 200
    runs = {run.name: run for run in found.compared.runs}
    scores = [run.combined("attn_logit_absmax", np.max)[1][-3:] for run in runs.values()]
    value = auroc(
        [sorted(last)[1] for last in scores],
        [run.status.status == "diverged" for run in runs.values()],
        [run.arm for run in runs.values()],
    ).value
    assert found.effect.value == pytest.approx(value)


def test_a_difference_between_arms_predicts_nothing_within_them(tmp_path):
    """Most failures are in the arm with the larger logits, so the AUROC is high only if arms are pooled."""

    def mostly(fails: int, logit: float):
        def planted(seed: int) -> Planted:
            return run(logit, seed, seed // 3 % 6 < fails)

        return planted

    found = one(tmp_path, {"a": mostly(5, 30.0), "b": mostly(1, 10.0)}, [CLAIM], seeds=range(36))
    runs = found.compared.runs
    scores = [run.combined("attn_logit_absmax", np.max)[1][-1] for run in runs]
    pooled = auroc(scores, [run.status.status == "diverged" for run in runs])
    assert pooled.value > 0.75 and abs(found.effect.value - 0.5) < 0.2 and found.verdict != "reproduced"


def test_too_few_failures_leave_it_open(tmp_path):
    """A prediction needs at least 10 runs that fail and 10 that do not."""
    arms = {"a": lambda seed: run(10.0, seed, False), "b": arm(20.0)}
    found = one(tmp_path, arms, [CLAIM], seeds=range(12))
    assert found.verdict == "inconclusive" and found.effect is None
    assert any("6 failures and 6 survivors" in note for note in found.notes), found.notes


def test_the_p_value_is_that_of_the_interval_that_ends_at_the_threshold():
    rng = random.Random(1)
    failed = [i < 15 for i in range(40)]
    for scores in ([rng.gauss(f, 1.0) for f in failed], [float(f) for f in failed]):
        result = auroc(scores, failed)
        p = result.p_at(0.6)
        assert 0 < p < 1 and result.interval(p)[0] == pytest.approx(0.6)
    assert result.value == 1  # the second set of scores separates the runs
    z = 0.4 / math.sqrt(0.6 * 0.4 / 15)
    assert p == pytest.approx(2 * stats.norm.sf(z)) and special.ndtri(1 - p / 2) == pytest.approx(z)
