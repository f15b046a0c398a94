"""Check that docs/metrics.md agrees with the code."""

import re
from pathlib import Path

import pytest

from mmqk.lab.metrics import FAMILY_METRICS, METRICS, families, outcomes, probes
from mmqk.lab.stats.effects import FEWEST_OF_EACH
from mmqk.store import rules

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
    first, formula, scale, _ = ROWS[name]
    assert scale == ", ".join(part for part in (metric.unit, metric.scale, metric.worst) if part)
    assert formula
    assert first.endswith("†") == getattr(metric, "counts_failures", False)


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (r"\*Last (\d+) probes\*", probes.LAST_PROBES),
        (r"mean of the last (\d+) training steps", outcomes.LOSS_WINDOW),
        (r"never fell ([\d.]+) nat below", outcomes.LEARNED_NATS),
        (r"\| per ([\d,]+) steps, linear, high \|", probes.SLOPE_STEPS),
        (r"(\d+) probes in the window", probes.FEWEST_PROBES),
        (r"at least (\d+) standard deviations", rules.SPIKE_STDS),
        (r"mean of the (\d+) before them", rules.SPIKE_WINDOW),
        (r"with at least (\d+) losses before them", rules.SPIKE_FEWEST),
        (r"has been more than ([\d.]+) nat above its first value", rules.ABOVE_INITIAL_NATS),
        (r"first value for (\d+) steps", rules.DIVERGENCE_WINDOW),
        (r"median more than ([\d.]+) nat above the best such", rules.ABOVE_BEST_NATS),
        (r"modality ended more than ([\d.]+) nat above the best run", outcomes.STALLED_NATS),
        (r"windows of (\d+) steps is more", outcomes.WINDOW_STEPS),
        (r"of at least the last (\d+) windows", outcomes.FEWEST_WINDOWS_ABOVE),
        (r"more than ([\d.]+) nat above the lowest", outcomes.ABOVE_OWN_BEST_NATS),
        (r"ended ([\d.]+) nat above the best loss", families.UNSTABLE_NATS),
        (r"needs (\d+) failures and", FEWEST_OF_EACH),
    ],
)
def test_numbers_on_the_page_are_those_of_the_code(said, value):
    found = re.search(said, TEXT)
    assert found is not None, said
    assert float(found[1].replace(",", "")) == value


def test_shares_of_a_run_are_the_words_of_the_page():
    assert probes.SLOPE_FROM_SHARE == 0.2 and "last four fifths of the run" in TEXT
    assert families.AT_SHARE == 0.2 and "the last probe in the first fifth of the run" in TEXT
    assert probes.EARLY_SHARE == 0.25 and "to a quarter of the run" in TEXT
    assert families.FEWEST_FITTED == 3 and "4 model sizes" in TEXT
