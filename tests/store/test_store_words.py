"""Messages print percentages, milliseconds and norms without scientific notation."""

from __future__ import annotations

import re

import pytest

from mmqk.lab.formatting import count
from mmqk.monitors.foreign.layers import Layers
from mmqk.monitors.summary import summary_line
from mmqk.store.formatting import percent, plain
from mmqk.store.rules import Growth

POWER = re.compile(r"\de[+-]\d")


@pytest.mark.parametrize(
    ("value", "digits", "said"),
    [
        (1.6, 2, "1.6"), (160.0, 2, "160"), (99.96, 3, "100"), (999.6, 3, "1,000"), (1999.0, 2, "2,000"),
        (123456.0, 3, "123,000"), (-1500.0, 2, "-1,500"), (0.0, 3, "0"), (0.0173, 2, "0.017"),
        (float("inf"), 2, "inf"),
    ],
)  # fmt: skip
def test_a_number_has_its_digits_and_no_power_of_ten(value, digits, said):
    assert plain(value, digits) == said
    # The control: `plain` differs from Python's format only if that prints a power of ten.
    if POWER.search(f"{value:.{digits}g}"):
        assert plain(value, digits) != f"{value:.{digits}g}"
    else:
        assert plain(value, digits) == f"{value:.{digits}g}"


@pytest.mark.parametrize(
    ("share", "said"),
    [(1.6, "160 %"), (20.0, "2,000 %"), (0.0017, "0.17 %"), (1e-4, "0.01 %"), (9e-7, "less than 0.01 %"),
     (0.0, "0 %")],
)  # fmt: skip
def test_a_share_is_said_in_per_cent(share, said):
    assert percent(share) == said


def line(seconds: float, step: float, every: int) -> str:
    return summary_line(Layers([], [], 0), {"text": 8}, [], seconds, [step], every)


def test_the_cost_of_a_probe_is_written_out():
    assert "first probe (includes warm-up) 12,000 ms, 2,000 % of a step, 200 % of training" in line(12.0, 0.6, 10)
    assert "first probe (includes warm-up) 160 ms, 16,000 % of a step, 160 % of training" in line(0.16, 0.001, 100)
    assert "first probe (includes warm-up) 12.3 ms, 12.3 % of a step, 0.12 % of training" in line(0.0123, 0.1, 100)
    assert "less than 0.01 % of training" in line(1e-6, 1.0, 1000)


def test_an_alarm_and_a_count_write_large_numbers_out():
    rule = Growth(0, 1000)
    alarms = (rule.update(step, "final_norm/text", 2e4 * 2 ** (step / 100)) for step in range(0, 1000, 20))
    [alarm] = [alarm for alarm in alarms if alarm is not None]
    assert (
        alarm.value > 1e5 and not POWER.search(alarm.sentence) and f"{alarm.value:,.0f}"[:3] in alarm.sentence
    )
    assert [count(n) for n in (999, 999_999, 5e12)] == ["999", "1,000k", "5,000B"]
