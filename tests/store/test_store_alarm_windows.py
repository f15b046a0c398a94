"""Running medians and moments equal those of the standard library after every value."""

from __future__ import annotations

import statistics

import pytest

from mmqk.store.rules import RunningMoments, Spike, Window
from tests.store.test_store_alarm_rules import fed, noise


def test_windows_are_those_of_the_standard_library():
    values = [100 + v for v in noise(500, std=1.0)] + noise(500, seed=1)
    window, moments = Window(51), RunningMoments(51)
    for i, value in enumerate(values):
        window.push(value)
        moments.push(value)
        last = values[max(0, i - 50) : i + 1]
        assert window.median == pytest.approx(statistics.median(last), rel=1e-12)
        assert moments.mean == pytest.approx(statistics.fmean(last), rel=1e-9)
        if len(last) > 1:
            assert moments.std == pytest.approx(statistics.stdev(last), rel=1e-6)
    assert len(window) == len(moments) == 51


@pytest.mark.parametrize("height", [1e9, 1e30])
def test_one_enormous_value_is_forgotten_when_it_leaves_the_window(height):
    values, moments = noise(1000), RunningMoments(51)
    values[300] = height
    for i, value in enumerate(values):
        moments.push(value)
        if i > 351:
            assert moments.mean == pytest.approx(statistics.fmean(values[i - 50 : i + 1]), rel=1e-9)
            assert moments.std == pytest.approx(statistics.stdev(values[i - 50 : i + 1]), rel=1e-6)
    after = noise(3000)
    after[500], after[2500] = height, 3.5
    assert [alarm.step for alarm in fed(Spike(), after)] == [501, 2501]
    # The control: sums that are never recomputed give a wrong variance after the large value.
    total = squares = 0.0
    for i, value in enumerate(values):
        total, squares = total + value, squares + value * value
        if i > 50:
            total, squares = total - values[i - 51], squares - values[i - 51] ** 2
    assert squares - total**2 / 51 != pytest.approx(50 * 0.02**2, rel=0.5)
