"""The share that is held out of a small set, compared with a count over the samples."""

import numpy as np
import pytest

from mmqk.data.shards.manifest import FEW, SHARE, default_share


@pytest.mark.parametrize(("samples", "held_out"), [(2, 1), (3, 1), (30, 10), (48, 16), (200, 16), (1000, 16)])
def test_a_batch_or_a_third_of_a_small_set_is_held_out(samples, held_out):
    for seed in range(20):
        fractions = np.random.default_rng(seed).random(samples)
        found = int((fractions < default_share(fractions.tolist())).sum())
        assert found == max(held_out, int((fractions < SHARE).sum()))  # never fewer than with the usual share


def test_a_large_set_keeps_the_usual_share_and_is_not_read_to_its_end():
    def endless():
        for place in range(FEW):
            yield 0.5 + place / (3 * FEW)  # the usual share would hold out nothing
        raise AssertionError

    assert default_share(endless()) == SHARE
    assert default_share([]) == default_share([0.7]) == default_share([0.7] * 9) == SHARE


@pytest.mark.parametrize("place", [0.001, 0.05, 0.5, 0.999])
def test_copies_of_one_image_leave_something_for_both_splits(place):
    fractions = np.array([place] * 150 + np.linspace(0.02, 0.98, 50).tolist())
    held_out = fractions < default_share(fractions.tolist())
    assert 0 < held_out.sum() < 200 and len(set(held_out[:150])) == 1
