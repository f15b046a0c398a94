"""Check that docs/metrics.md agrees with the code."""

from pathlib import Path

import pytest

from mmqk.lab.metrics import FAMILY_METRICS, METRICS

PAGE = (Path(__file__).parents[3] / "docs/metrics.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
ROWS = {
    cells[0].split("`")[1]: cells
    for line in PAGE.splitlines()
    if line.startswith("| `") and (cells := [cell.strip() for cell in line.strip("|").split("|")])
}


def test_every_metric_has_a_row():
    assert list(ROWS) == [*METRICS, *FAMILY_METRICS]


@pytest.mark.parametrize("name", [*METRICS, *FAMILY_METRICS])
def test_a_row_says_what_the_metric_is(name):
    metric = (METRICS | FAMILY_METRICS)[name]
    first, formula, scale = ROWS[name]
    assert scale == ", ".join(part for part in (metric.unit, metric.scale, metric.worst) if part)
    assert formula
    assert first.endswith("†") == getattr(metric, "counts_failures", False)
